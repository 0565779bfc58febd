"""E2B's directory watches.

The sandbox keeps a watch like a background process whose output lines are events, and every poll that returns events is
a step of its rollout. See docs/decisions/0015-processes-and-connections.md.
"""

import asyncio
from typing import Any

from proxy.compat.e2b import responses
from proxy.compat.e2b.connect_rpc import ConnectError
from proxy.compat.e2b.event_stream import EventStream
from proxy.compat.e2b.file_requests import WatchRequest
from proxy.compat.e2b.output_follower import poll_call
from proxy.compat.e2b.processes import Processes, pid_of
from proxy.compat.endpoints import EndpointContext
from proxy.tree.keys import CallKey, call_key, private_key
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Node
from sandboxes.calls import ToolCall


class DirWatches:
    """Answers requests about the watches of all rollouts. The sandboxes keep all state of watches."""

    def __init__(self, context: EndpointContext, processes: Processes) -> None:
        self._context, self._step, self._processes = context, context.step, processes

    async def answer(self, rollout: Rollout, request: WatchRequest) -> dict[str, Any]:
        """Answer a request that is no stream. Raises ConnectError if the directory or the watch does not exist."""
        if request.verb == "begin":
            return {"watcherId": str(await self._begin(rollout, request))}
        watch = int(request.watcher) if request.watcher.isascii() and request.watcher.isdigit() else 0
        if request.verb == "events":
            return {"events": await self._events(rollout, watch)}
        result = await self._processes.call(rollout, ToolCall("process", "unwatch", {"process": watch}))
        if result.status != 200:
            raise _not_found(request.watcher)
        return {}

    async def follow(self, rollout: Rollout, request: WatchRequest, stream: EventStream) -> None:
        """Send a directory's events while the client is connected. Raises ConnectError if it does not exist."""
        watch = await self._begin(rollout, request)
        self._processes.follower.follow(rollout, watch, stream)

    async def _begin(self, rollout: Rollout, request: WatchRequest) -> int:
        assert request.call is not None
        call = request.call
        # A watch makes states that depend on when it is polled, so no other rollout shares them.
        own_key = private_key(call_key(call), rollout.id, rollout.calls)
        watch = 0

        def numbered_call(node: Node, key: CallKey, _detach: asyncio.Event) -> ToolCall:
            nonlocal watch
            watch = pid_of(node, key)
            return ToolCall(call.endpoint, call.tool, {**call.arguments, "process": watch})

        self._processes.follower.catch_up(rollout)
        record = (await self._step.run(rollout, numbered_call, own_key)).record
        error = responses.failure(self._context.store.records.result(record))
        if error is not None:
            raise error
        return watch

    async def _events(self, rollout: Rollout, watch: int) -> list[dict[str, str]]:
        self._processes.follower.catch_up(rollout)
        call = poll_call(watch)
        self._step.detach(rollout)
        answer = await self._step.poll(rollout, call, call_key(call))
        if answer is None:
            return []
        result = self._context.store.records.result(answer.record)
        if result.status != 200:
            raise _not_found(str(watch))
        return list(responses.watch_events(result.body))


def _not_found(watcher: str) -> ConnectError:
    return ConnectError("not_found", f"watcher with id {watcher} not found")
