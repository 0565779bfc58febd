"""E2B's processes: starting them, sending their output to clients, and requests about running ones."""

# Theory of operation. A start is one call of its rollout, and its response is a stream (`ProcessRun`).
#
# 1. While the process runs, its output goes to the client's stream as it is produced.
# 2. When the process ends, the call is recorded and the stream ends.
# 3. When the rollout sends its next request first, the process is detached: the start is recorded with the output so
#    far and the process continues in the sandbox. `OutputFollower` polls it from then on, and each poll is a call of
#    its own. So no client receives output that the sandbox at its rollout's node has not produced.
# 4. When the client loses its connection and sends the same start again, the retry adopts the run: the call is not
#    executed twice, and the new stream gets the recorded result.
#
# `process_lifecycle` writes these states as a table. See docs/decisions/0015-processes-and-connections.md.

import asyncio
from hashlib import blake2b
from typing import Any

from proxy.compat.e2b import responses
from proxy.compat.e2b.connect_rpc import STREAM, ConnectError
from proxy.compat.e2b.event_stream import EventStream
from proxy.compat.e2b.output_follower import OutputFollower, not_found
from proxy.compat.e2b.process_lifecycle import NEXT, ProcessChange, ProcessState
from proxy.compat.e2b.requests import ProcessRequest, ProcessStart
from proxy.compat.endpoints import EndpointContext
from proxy.execution.step_notes import Answer
from proxy.http.answer_cache import hit_headers, response, timing_of
from proxy.http.lru_cache import LruCache
from proxy.tree.keys import CallKey, call_key, private_key
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Node
from sandboxes.calls import ToolCall, ToolResult
from sandboxes.listener import Headers
from sandboxes.process_output import OUT, Incoming
from sandboxes.state_table import next_state
from sandboxes.task_owner import TaskOwner

DISCONNECT_GRACE_S = 0.1
"""How long after a retry the loss of the first stream may be noticed; the two arrive on different connections."""
START_EVENT_S = 5.0
"""Delay after which a client gets the start event although its process waits for a sandbox: SDKs time out."""
_RESPONSES_BYTES = 32 << 20
"""Memory of whole responses to starts that the tree knows."""
LIST = ToolCall("process", "list", {})
"""The call that lists the background processes of a sandbox."""


def pid_of(node: Node, key: CallKey) -> int:
    """Return a process's pid, which depends only on node and key, so that all rollouts see it, on a hit or a miss."""
    digest = blake2b(node.id.to_bytes(8, "little") + key, digest_size=4).digest()
    return 1000 + int.from_bytes(digest, "little") % (1 << 30)


class ProcessRun:
    """One start under way: the call's listener (see `Detachable`) and the stream of the client that waits for it."""

    def __init__(self, start: ProcessStart, key: CallKey, stream: EventStream) -> None:
        self.state = ProcessState.NOT_STARTED  # See `process_lifecycle`.
        # The pid that clients know is 0 until the call has its turn. A retry replaces the stream, which has then
        # received no output.
        self.pid, self.sent_bytes, self.stream = 0, 0, stream
        self.task: asyncio.Task[Answer] | None = None
        self._start, self._key = start, key
        self._detach = asyncio.Event()
        self._incoming = Incoming()

    def change(self, change: ProcessChange) -> None:
        """Move to the next state."""
        self.state = next_state(NEXT, self.state, change)

    async def is_retried_by(self, rollout: Rollout, key: CallKey) -> bool:
        """Return whether a start with this key is the same, retried after a lost stream, and not a second process."""
        if self._key != key:
            return False
        try:
            async with asyncio.timeout(DISCONNECT_GRACE_S):
                await self.stream.lost.wait()
        except TimeoutError:
            return False
        # After its end the run answers only while the rollout has not gone on from the node that it led to.
        return self.task is None or not self.task.done() or _target(self.task) is rollout.node

    def adopt(self, stream: EventStream) -> None:
        """Continue with the stream of a retry, which gets the whole output when the call is recorded."""
        self.change(ProcessChange.RETRY)
        # The new stream has received nothing, so it must get the output from the first byte.
        self.stream, self.sent_bytes = stream, 0
        if self.pid:
            stream.begin(self.pid)

    def call(self, node: Node, key: CallKey, detach: asyncio.Event) -> ToolCall:
        """Build the call once its node and key are known; see `executor.CallFactory`."""
        self.pid, self._detach = pid_of(node, key), detach
        call = self._start.call
        arguments = {"tag": "", **call.arguments, "process": self.pid}
        return ToolCall(call.endpoint, call.tool, arguments, call.body)

    async def head(self, _status: int, _headers: Headers) -> None:
        """Send the start event: the sandbox has started the process."""
        self.change(ProcessChange.START)
        self.stream.begin(self.pid)

    async def data(self, chunk: bytes) -> None:
        """Send a piece of output, unless a retry has adopted the run."""
        for kind, data in self._incoming.feed(chunk):
            if self.state is not ProcessState.FOLLOWED:
                return
            # The sandbox reports a failed start as output. `_deliver` turns the recorded report into an error.
            if kind == OUT and self.sent_bytes == 0 and responses.cannot_start(data):
                return
            self.sent_bytes += len(data)
            for event in responses.output_events(kind, data, terminal=self._start.has_terminal):
                self.stream.put(event)
            await self.stream.wait_for_space()

    async def detached(self) -> None:
        """Return once the process is to be detached. Never returns for a process whose time limit has passed."""
        await self._detach.wait()
        if self.stream.overdue:
            # The sandbox is about to kill the process. Detaching it now would let it survive its limit.
            await asyncio.get_running_loop().create_future()


def _target(task: asyncio.Task[Answer]) -> Node | None:
    """Return the node that a completed start led to; None if the start failed."""
    failed = task.cancelled() or task.exception() is not None
    return None if failed else task.result().record.target


class Processes:
    """Answers requests about the processes of all rollouts; it remembers connections, and the tree the rest."""

    def __init__(self, context: EndpointContext) -> None:
        self._context, self._step = context, context.step
        self._runs: dict[int, ProcessRun] = {}
        # Responses to known starts, by record.
        self._responses: LruCache[int, bytes] = LruCache(_RESPONSES_BYTES, len)
        self._tasks = TaskOwner()
        self.follower = OutputFollower(context)  # Polls the background processes.

    async def start(self, rollout: Rollout, request: ProcessStart, stream: EventStream) -> None:
        """Start a process. Returns once the process has ended, or is detached and followed."""
        try:
            await self._start(rollout, request, stream)
        finally:
            self.follower.call_ended(rollout)

    async def _start(self, rollout: Rollout, request: ProcessStart, stream: EventStream) -> None:
        key = call_key(request.call)
        run = self._runs.get(rollout.id)
        if run is not None and await run.is_retried_by(rollout, key):
            # The call is still running, or its record is the answer: nothing is executed.
            run.adopt(stream)
        else:
            self._runs.pop(rollout.id, None)
            self.follower.catch_up(rollout)
            # What is typed at a terminal cannot be predicted, so no other rollout may share its state.
            own_key = private_key(key, rollout.id, rollout.calls) if request.has_terminal else key
            record = self._step.known(rollout, own_key)
            if record is not None:
                self.follower.deliver_start(rollout, pid_of(record.source, record.key), record, stream)
                return
            run = self._runs[rollout.id] = ProcessRun(request, key, stream)
            # The call outlives this request: a client that lost its stream may retry.
            run.task = self._tasks.spawn(
                "start E2B process", self._step.run(rollout, run.call, own_key, run), awaited=True
            )
        answer = await self._answer(run, stream)
        if run.stream is not stream:
            # A retry adopted the run meanwhile, and delivers the result.
            return
        pid = run.pid or pid_of(answer.record.source, answer.record.key)
        run.change(self.follower.deliver_start(rollout, pid, answer.record, stream, sent_bytes=run.sent_bytes))
        # A client that is gone may retry; the run is kept for that.
        if self._runs.get(rollout.id) is run and not stream.gone:
            del self._runs[rollout.id]

    async def _answer(self, run: ProcessRun, stream: EventStream) -> Answer:
        assert run.task is not None
        try:
            # Shielded: the client may go, but the call continues and is recorded.
            async with asyncio.timeout(START_EVENT_S):
                return await asyncio.shield(run.task)
        except TimeoutError:
            if run.pid:
                stream.begin(run.pid)
        return await asyncio.shield(run.task)

    def known(self, rollout: Rollout, key: CallKey) -> bytes | None:
        """Return the whole HTTP response to a start whose process has ended, and take its step; None for any other."""
        if rollout.id in self._runs or self.follower.follows(rollout):
            return None
        record = self._step.find(rollout, key)
        if record is None:
            return None
        whole = self._responses.get(record.id)
        if whole is None:
            result = self._context.store.records.result(record)
            body = responses.whole_stream(result, pid_of(record.source, record.key))
            if body is None:
                return None
            headers = [(b"content-type", STREAM.encode()), (b"content-length", b"%d" % len(body))]
            headers += hit_headers(timing_of(self._context.store.records.resources(record)))
            whole = self._responses[record.id] = response(200, headers, body)
        # Last, as on any hit: whatever fails above leaves the rollout where its agent saw it.
        self._step.take(rollout, record)
        return whole

    async def connect(self, rollout: Rollout, pid: int | None, tag: str, stream: EventStream) -> None:
        """Follow a background process from now on, by its pid or else its tag. Raises ConnectError if there is none."""
        process = await self._find(rollout, pid, tag)
        stream.form = "terminal" if process["tty"] else "process"
        self.follower.follow(rollout, process["process"], stream)

    async def act(self, rollout: Rollout, request: ProcessRequest) -> None:
        """Write to a process, close its stdin, resize its terminal, or send it a signal.

        Raises ConnectError if the process does not exist, or has no such stdin or terminal.
        """
        pid = request.pid if request.pid is not None else (await self._find(rollout, None, request.tag))["process"]
        arguments = {"process": pid, **request.arguments}
        result = await self.call(rollout, ToolCall("process", request.verb, arguments, request.data))
        # The sandbox answers 404 for an unknown process, and 409 for a missing stdin or terminal.
        if result.status == 404:
            raise not_found(pid)
        if result.status != 200:
            raise ConnectError("failed_precondition", result.body.decode(errors="replace"))

    async def call(self, rollout: Rollout, call: ToolCall) -> ToolResult:
        """Return the result of a call that is not a start, from the tree or by running it."""
        # The client has gone on from its last start, so that start is not retried any more.
        self._runs.pop(rollout.id, None)
        self.follower.catch_up(rollout)
        key = call_key(call)
        try:
            record = self._step.known(rollout, key)
            if record is None:
                record = (await self._step.run(rollout, call, key)).record
            return self._context.store.records.result(record)
        finally:
            self.follower.call_ended(rollout)

    async def _find(self, rollout: Rollout, pid: int | None, tag: str) -> dict[str, Any]:
        """Return the listed properties of a background process; `process` is its pid."""
        # The list is a call of its own: which processes run is part of the sandbox's state.
        for process in responses.background_processes(await self.call(rollout, LIST)):
            if process["process"] == pid or (tag and process["tag"] == tag):
                return process
        raise not_found(pid if pid is not None else tag)

    def end(self, rollout: Rollout, reason: str) -> None:
        """End all streams of a rollout that has ended or is paused."""
        self._runs.pop(rollout.id, None)
        self.follower.end(rollout, ConnectError("unavailable", reason))
