"""E2B's watched directories. One is kept in its sandbox as a process that was left running is: what happens in it are
lines that it says, taken up in steps of its rollout's own. See docs/decisions/0015.
"""

from typing import Any

from proxy.compat.e2b import responses as e2b_told
from proxy.compat.e2b.connect_rpc import ConnectError
from proxy.compat.e2b.event_stream import EventStream
from proxy.compat.e2b.file_requests import Watching
from proxy.compat.e2b.output_follower import attend
from proxy.compat.e2b.processes import Processes, pid_of
from proxy.engine import Engine
from proxy.execution.errors import NothingHappened
from proxy.tree.keys import CallKey, call_key, private_key
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Node
from sandboxes.calls import ToolCall


class Watches:
    """Those of all rollouts; what is known of them is in their sandboxes."""

    def __init__(self, engine: Engine, processes: Processes) -> None:
        self._engine, self._step, self._processes = engine, engine.step, processes

    async def answer(self, rollout: Rollout, asked: Watching) -> dict[str, Any]:
        """Answer a request that is not for a stream.

        Raises:
            ConnectError: there is no such directory, or no such watch.
        """
        if asked.verb == "begin":
            return {"watcherId": str(await self._begin(rollout, asked))}
        watch = int(asked.watcher) if asked.watcher.isascii() and asked.watcher.isdigit() else 0
        if asked.verb == "events":
            return {"events": await self._events(rollout, watch)}
        ended = await self._processes.ask(rollout, ToolCall("process", "unwatch", {"process": watch}))
        if ended.status != 200:
            raise _not_found(asked.watcher)
        return {}

    async def follow(self, rollout: Rollout, asked: Watching, stream: EventStream) -> None:
        """Tell what happens in a directory as long as the client listens.

        Raises:
            ConnectError: there is no such directory.
        """
        watch = await self._begin(rollout, asked)
        self._processes.following.follow(rollout, watch, stream)

    async def _begin(self, rollout: Rollout, asked: Watching) -> int:
        assert asked.call is not None
        call = asked.call
        # Its rollout's own, like a terminal: nobody else waits for it, or is told what comes of it.
        own = private_key(call_key(call), rollout.id, rollout.calls)
        watch = 0

        def placed(node: Node, key: CallKey, _left: object) -> ToolCall:
            nonlocal watch
            watch = pid_of(node, key)
            return ToolCall(call.endpoint, call.tool, {**call.arguments, "process": watch})

        self._processes.following.catch_up(rollout)
        record = (await self._step.run(rollout, placed, own)).record
        error = e2b_told.failure(self._engine.store.records.result(record))
        if error is not None:
            raise error
        return watch

    async def _events(self, rollout: Rollout, watch: int) -> list[dict[str, str]]:
        self._processes.following.catch_up(rollout)
        call = attend(watch)
        try:
            result = self._engine.store.records.result((await self._step.run(rollout, call, call_key(call))).record)
        except NothingHappened:
            return []
        if result.status != 200:
            raise _not_found(str(watch))
        return list(e2b_told.happened(result.body))


def _not_found(watcher: str) -> ConnectError:
    return ConnectError("not_found", f"watcher with id {watcher} not found")
