"""E2B's processes: started, followed while clients listen, and left running when their clients ask for more.

A start is answered as soon as its process has ended. Where its rollout asks for something else before, the process is
left running in the sandbox: the start is recorded with what was told by then, and the rest is taken up by calls of
their own (`attend`), each a step of the rollout: so nobody is told what the sandbox at their node has not said.
See docs/decisions/0015.
"""

import asyncio
from hashlib import blake2b
from typing import Any

from proxy.compat.e2b import responses as e2b_told
from proxy.compat.e2b.connect_rpc import ConnectError
from proxy.compat.e2b.event_stream import EventStream
from proxy.compat.e2b.output_follower import Following, not_found
from proxy.compat.e2b.requests import Chosen, ProcessStart
from proxy.engine import Engine
from proxy.step import Answer
from proxy.tree.keys import CallKey, call_key, private_key
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Node
from sandboxes.calls import ToolCall, ToolResult
from sandboxes.listener import Headers
from sandboxes.process_output import OUT, Incoming

LOST_S = 0.1
"""How long after a client asks again it may be heard that it has lost its first stream."""
START_PATIENCE_S = 5.0
"""A client is told that its process has started when it has, or after this: its sandbox may be long in coming."""
LIST = ToolCall("process", "list", {})


def pid_of(node: Node, key: CallKey) -> int:
    """Return the pid that clients know a process by that was started by a call of this key at node.

    All rollouts that come this way are given the same, whether they run it or are answered from the tree.
    """
    digest = blake2b(node.id.to_bytes(8, "little") + key, digest_size=4).digest()
    return 1000 + int.from_bytes(digest, "little") % (1 << 30)


class ProcessRun:
    """One process under way, and the client that hears it meanwhile. See `Detachable`.

    shown: how much of its output the client has been told, in bytes. heir: where a client listens that asked again.
    """

    def __init__(self, start: ProcessStart, key: CallKey, stream: EventStream) -> None:
        self.key, self.pid, self.shown = key, 0, 0
        self.task: asyncio.Task[Answer] | None = None
        self.heir: EventStream | None = None
        self._start, self._stream = start, stream
        self._left = asyncio.Event()
        self._incoming = Incoming()

    async def awaits(self, rollout: Rollout, key: CallKey) -> bool:
        """Whether a start of this key is its own, sent again by a client that lost the answer.

        That it did may be heard a little after it asks again.
        """
        if self.key != key:
            return False
        try:
            async with asyncio.timeout(LOST_S):
                await (self.heir or self._stream).lost.wait()
        except TimeoutError:
            return False
        done = self.task is not None and self.task.done()
        return not done or self._led_to() is rollout.node

    def _led_to(self) -> Node | None:
        assert self.task is not None
        failed = self.task.cancelled() or self.task.exception() is not None
        return None if failed else self.task.result().record.target

    def placed(self, node: Node, key: CallKey, left: asyncio.Event) -> ToolCall:
        """See `Placed`."""
        self.pid, self._left = pid_of(node, key), left
        call = self._start.call
        arguments = {**call.arguments, "process": self.pid, "tag": self._start.tag}
        return ToolCall(call.endpoint, call.tool, arguments, call.body)

    async def head(self, _status: int, _headers: Headers) -> None:
        """See `Listener.head`."""
        self._stream.begin(self.pid)

    async def data(self, chunk: bytes) -> None:
        """See `Listener.data`."""
        for kind, data in self._incoming.feed(chunk):
            # How a sandbox says that it cannot start a process is no output of one.
            if kind == OUT and self.shown == 0 and e2b_told.cannot_start(data):
                return
            self.shown += len(data)
            for event in e2b_told.pieces(kind, data, terminal=self._start.has_terminal):
                self._stream.put(event)
            await self._stream.room()

    async def detached(self) -> None:
        """See `Detachable.detached`. What is about to be ended, because its time is up, is not left running before."""
        await self._left.wait()
        if self._stream.overdue:
            await asyncio.get_running_loop().create_future()


class Processes:
    """Those of all rollouts. What is in memory here is about connections: what lasts is in the tree."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._step = engine, engine.step
        self._runs: dict[int, ProcessRun] = {}
        self.following = Following(engine)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def start(self, rollout: Rollout, asked: ProcessStart, stream: EventStream) -> None:
        """Answer a start on stream: to its end, or until what it started was left running, and is watched."""
        try:
            await self._start(rollout, asked, stream)
        finally:
            self.following.moved(rollout)

    async def _start(self, rollout: Rollout, asked: ProcessStart, stream: EventStream) -> None:
        key = call_key(asked.call)
        run = self._runs.get(rollout.id)
        if run is None or not await run.awaits(rollout, key):
            self._runs.pop(rollout.id, None)
            self.following.catch_up(rollout)
            # What can be typed at is nobody else's: see `Conversation`.
            own = private_key(key, rollout.id, rollout.calls) if asked.has_terminal else key
            record = self._step.known(rollout, own)
            if record is not None:
                self.following.tell(rollout, pid_of(record.source, record.key), record, stream)
                return
            run = self._runs[rollout.id] = ProcessRun(asked, key, stream)
            run.task = asyncio.ensure_future(self._step.run(rollout, run.placed, own, run))
        else:
            run.heir = stream
            if run.pid:
                stream.begin(run.pid)
        answer = await self._answer(run, stream)
        skip = 0 if stream is run.heir else run.shown
        pid = run.pid or pid_of(answer.record.source, answer.record.key)
        self.following.tell(rollout, pid, answer.record, stream, skip=skip)
        if self._runs.get(rollout.id) is run and not stream.gone:
            del self._runs[rollout.id]

    async def _answer(self, run: ProcessRun, stream: EventStream) -> Answer:
        assert run.task is not None
        try:
            async with asyncio.timeout(START_PATIENCE_S):
                return await asyncio.shield(run.task)
        except TimeoutError:
            if run.pid:
                stream.begin(run.pid)
        return await asyncio.shield(run.task)

    async def connect(self, rollout: Rollout, pid: int | None, tag: str, stream: EventStream) -> None:
        """Follow a process on stream.

        Raises:
            ConnectError: there is none.
        """
        found = await self._find(rollout, pid, tag)
        stream.form = "terminal" if found["tty"] else "process"
        self.following.follow(rollout, found["process"], stream)

    async def act(self, rollout: Rollout, asked: Chosen) -> None:
        """Write to a process, close its stdin, resize its terminal, or send it a signal.

        Raises:
            ConnectError: there is none, or it has no such stdin or terminal.
        """
        pid = asked.pid if asked.pid is not None else (await self._find(rollout, None, asked.tag))["process"]
        result = await self.ask(rollout, ToolCall("process", asked.verb, {"process": pid, **asked.more}, asked.data))
        if result.status == 404:
            raise not_found(pid)
        if result.status != 200:
            raise ConnectError("failed_precondition", result.body.decode(errors="replace"))

    async def ask(self, rollout: Rollout, call: ToolCall) -> ToolResult:
        """Answer a call that is no start."""
        self._runs.pop(rollout.id, None)
        self.following.catch_up(rollout)
        key = call_key(call)
        try:
            record = self._step.known(rollout, key)
            if record is None:
                record = (await self._step.run(rollout, call, key)).record
            return self._engine.store.records.result(record)
        finally:
            self.following.moved(rollout)

    async def _find(self, rollout: Rollout, pid: int | None, tag: str) -> dict[str, Any]:
        """Return what a process was started with, its `process` among it."""
        for process in e2b_told.left_running(await self.ask(rollout, LIST)):
            if process["process"] == pid or (tag and process["tag"] == tag):
                return process
        raise not_found(pid if pid is not None else tag)

    def end(self, rollout: Rollout, why: str) -> None:
        """End all streams of a rollout that has ended."""
        self._runs.pop(rollout.id, None)
        self.following.end(rollout, ConnectError("unavailable", why))
