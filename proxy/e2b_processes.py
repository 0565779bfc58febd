"""E2B's processes: started, followed while clients listen, and left running when their clients ask for more.

A start is answered as soon as its process has ended. Where its rollout asks for something else before, the process is
left running in the sandbox: the start is recorded with what was told by then, and the rest is taken up by calls of
their own (`attend`), each a step of the rollout: so nobody is told what the sandbox at their node has not said.
See docs/decisions/0015.
"""

import asyncio
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import structlog

from proxy.attach import StateLost
from proxy.canonical import CallKey, call_key, private_key
from proxy.dialects import e2b_told
from proxy.dialects.connect import ConnectError, of_problem
from proxy.dialects.e2b import Chosen, Start
from proxy.e2b_stream import EventStream
from proxy.engine import Engine
from proxy.errors import FORESEEN, problem_of
from proxy.forest import Rollout
from proxy.step import Answer, NothingHappened, RolloutGone
from proxy.tree import Node, Record
from sandboxes.calls import ToolCall, ToolResult
from sandboxes.http1 import Headers
from sandboxes.process import OUT, Incoming

log = structlog.get_logger()

LOST_S = 0.1
"""How long after a client asks again it may be heard that it has lost its first stream."""
START_PATIENCE_S = 5.0
"""A client is told that its process has started when it has, or after this: its sandbox may be long in coming."""
LOOK_S = 0.05
"""After a call, until what is left running is looked at for the first time; then twice as long each time, up to"""
LOOK_MOST_S = 1.0
BUSY_MOST_S = 10.0
"""while it says something: each look that finds something makes a state."""
ALONE_S = 30.0
"""Between looks at a terminal that nobody listens to: its state is in its sandbox alone, which is not idle then."""
PATIENT_S = 10.0
"""The same where others went on from this state without looking: it is probable that this one will, too."""
KEPT_OUT_S = 30.0
"""How long a process waits to be looked at while another one runs; then that is left running, too."""


def pid_of(node: Node, key: CallKey) -> int:
    """Return the pid that clients know a process by that was started by a call of this key at node.

    All rollouts that come this way are given the same, whether they run it or are answered from the tree.
    """
    digest = blake2b(node.id.to_bytes(8, "little") + key, digest_size=4).digest()
    return 1000 + int.from_bytes(digest, "little") % (1 << 30)


def attend(pid: int) -> ToolCall:
    """Return the call that takes up what a process that was left running has said since."""
    return ToolCall("process", "attend", {"process": pid})


class Run:
    """One process under way, and the client that hears it meanwhile. See `Departing`.

    shown: how much of its output the client has been told, in bytes. heir: where a client listens that asked again.
    """

    def __init__(self, start: Start, key: CallKey, stream: EventStream) -> None:
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

    async def left(self) -> None:
        """See `Departing.left`. What is about to be ended, because its time is up, is not left running before."""
        await self._left.wait()
        if self._stream.overdue:
            await asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class Watched:
    """The processes of one rollout that were left running and that clients listen to, by their pids.

    terminals: those that are looked at even if nobody listens.
    """

    rollout: Rollout
    streams: dict[int, list[EventStream]] = field(default_factory=dict)
    terminals: set[int] = field(default_factory=set)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    kept_out_s: float = 0.0
    task: asyncio.Task[None] | None = None


class Processes:
    """Those of all rollouts. What is in memory here is about connections: what lasts is in the tree."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._step = engine, engine.step
        self._runs: dict[int, Run] = {}
        self._watched: dict[int, Watched] = {}
        self._closing: asyncio.Task[None] | None = None

    # -- requests ----------------------------------------------------------------------------------------------------

    async def start(self, rollout: Rollout, asked: Start, stream: EventStream) -> None:
        """Answer a start on stream: to its end, or until what it started was left running, and is watched."""
        try:
            await self._start(rollout, asked, stream)
        finally:
            self._moved(rollout)

    async def _start(self, rollout: Rollout, asked: Start, stream: EventStream) -> None:
        key = call_key(asked.call)
        run = self._runs.get(rollout.id)
        if run is None or not await run.awaits(rollout, key):
            self._runs.pop(rollout.id, None)
            self.catch_up(rollout)
            # What can be typed at is nobody else's: see `Conversation`.
            own = private_key(key, rollout.id, rollout.calls) if asked.has_terminal else key
            record = self._step.known(rollout, own)
            if record is not None:
                self._tell(rollout, pid_of(record.source, record.key), record, stream)
                return
            run = self._runs[rollout.id] = Run(asked, key, stream)
            run.task = asyncio.ensure_future(self._step.run(rollout, run.placed, own, run))
        else:
            run.heir = stream
            if run.pid:
                stream.begin(run.pid)
        answer = await self._answer(run, stream)
        skip = 0 if stream is run.heir else run.shown
        pid = run.pid or pid_of(answer.record.source, answer.record.key)
        self._tell(rollout, pid, answer.record, stream, skip=skip)
        if self._runs.get(rollout.id) is run and not stream.gone:
            del self._runs[rollout.id]

    async def _answer(self, run: Run, stream: EventStream) -> Answer:
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
        self.follow(rollout, found["process"], stream)

    def follow(self, rollout: Rollout, pid: int, stream: EventStream) -> None:
        """Tell on stream what a process says from now on, or what happens where one watches."""
        stream.begin(pid)
        self._watch(rollout, pid, stream)

    async def act(self, rollout: Rollout, asked: Chosen) -> None:
        """Write to a process, close its stdin, resize its terminal, or send it a signal.

        Raises:
            ConnectError: there is none, or it has no such stdin or terminal.
        """
        pid = asked.pid if asked.pid is not None else (await self._find(rollout, None, asked.tag))["process"]
        result = await self.ask(rollout, ToolCall("process", asked.verb, {"process": pid, **asked.more}, asked.data))
        if result.status == 404:
            raise _not_found(pid)
        if result.status != 200:
            raise ConnectError("failed_precondition", result.body.decode(errors="replace"))

    async def ask(self, rollout: Rollout, call: ToolCall) -> ToolResult:
        """Answer a call that is no start."""
        self._runs.pop(rollout.id, None)
        self.catch_up(rollout)
        key = call_key(call)
        try:
            record = self._step.known(rollout, key)
            if record is None:
                record = (await self._step.run(rollout, call, key)).record
            return self._engine.store.result(record)
        finally:
            self._moved(rollout)

    def _moved(self, rollout: Rollout) -> None:
        self.catch_up(rollout)
        watched = self._watched.get(rollout.id)
        if watched is not None:
            watched.moved.set()

    async def _find(self, rollout: Rollout, pid: int | None, tag: str) -> dict[str, Any]:
        """Return what a process was started with, its `process` among it."""
        for process in e2b_told.left_running(await self.ask(rollout, LIST)):
            if process["process"] == pid or (tag and process["tag"] == tag):
                return process
        raise _not_found(pid if pid is not None else tag)

    def end(self, rollout: Rollout, why: str) -> None:
        """End all streams of a rollout that has ended."""
        self._runs.pop(rollout.id, None)
        watched = self._watched.pop(rollout.id, None)
        if watched is not None:
            _end(watched, ConnectError("unavailable", why))
            if watched.task is not None:
                watched.task.cancel()

    async def _close(self) -> None:
        """Once the engine closes, look at nothing any more."""
        await self._engine.closing.wait()
        for watched in list(self._watched.values()):
            self.end(watched.rollout, "Forkpoint is being stopped. Connect again when it is back.")

    # -- what was left running ---------------------------------------------------------------------------------------

    def catch_up(self, rollout: Rollout) -> None:
        """Tell what the tree knows that processes have said at the node where rollout stands, and take these steps.

        Before each request, so that whoever comes this way takes the same steps in the same order.
        """
        watched = self._watched.get(rollout.id)
        if watched is None:
            return
        told = True
        while told:
            told = any(self._known(watched, pid) for pid in sorted(watched.streams))

    def _known(self, watched: Watched, pid: int) -> bool:
        record = self._step.known(watched.rollout, call_key(attend(pid)))
        if record is not None:
            self._said(watched, pid, record)
        return record is not None

    def _tell(self, rollout: Rollout, pid: int, record: Record, stream: EventStream, *, skip: int = 0) -> None:
        """Tell a recorded answer to a start, but for its first bytes of output."""
        result = self._engine.store.result(record)
        if result.status != 200:
            stream.end(ConnectError("invalid_argument", result.body.decode(errors="replace")))
            return
        if _told(result.body, pid, [stream], skip=skip):
            return
        self._watch(rollout, pid, stream)

    def _said(self, watched: Watched, pid: int, record: Record) -> None:
        result = self._engine.store.result(record)
        if result.status != 200:
            for stream in watched.streams.pop(pid):
                stream.end(_not_found(pid))
        elif _told(result.body, pid, watched.streams[pid]):
            del watched.streams[pid]

    def _watch(self, rollout: Rollout, pid: int, stream: EventStream) -> None:
        if rollout.finished:
            stream.end(ConnectError("unavailable", f"the sandbox {rollout.name!r} has ended"))
            return
        watched = self._watched.setdefault(rollout.id, Watched(rollout))
        watched.streams.setdefault(pid, []).append(stream)
        if stream.form == "terminal":
            watched.terminals.add(pid)
        stream.bind()
        self.catch_up(rollout)
        watched.moved.set()
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        if watched.task is None:
            watched.task = asyncio.ensure_future(self._look(watched))

    async def _look(self, watched: Watched) -> None:
        """Look at what runs while its rollout asks for nothing, until nobody listens any more."""
        pause_s = LOOK_S
        while self._listened(watched):
            watched.moved.clear()
            try:
                async with asyncio.timeout(PATIENT_S if self._others_went_on(watched) else pause_s):
                    await watched.moved.wait()
                pause_s = LOOK_S
            except TimeoutError:
                if self._kept_out(watched, pause_s):
                    continue
                try:
                    said = await self._look_once(watched)
                except (RolloutGone, StateLost) as error:
                    _end(watched, of_problem(problem_of(error)))
                    break
                pause_s = min(pause_s * 2, _most_s(watched, said=said))
        watched.task = None
        if self._watched.get(watched.rollout.id) is watched:
            del self._watched[watched.rollout.id]

    def _listened(self, watched: Watched) -> bool:
        for pid, streams in list(watched.streams.items()):
            streams[:] = [stream for stream in streams if not stream.over]
            if not streams and pid not in watched.terminals:
                del watched.streams[pid]
        return bool(watched.streams)

    def _others_went_on(self, watched: Watched) -> bool:
        node = watched.rollout.node
        return any(not record.observation and not record.private for record in node.records.values())

    def _kept_out(self, watched: Watched, pause_s: float) -> bool:
        """Whether another call is under way, which may be one that its client waits for."""
        watched.kept_out_s = watched.kept_out_s + pause_s if watched.rollout.turn.locked() else 0.0
        return 0.0 < watched.kept_out_s < KEPT_OUT_S

    async def _look_once(self, watched: Watched) -> bool:
        """Take up what processes have said since; return whether that was anything."""
        said = False
        for pid in sorted(watched.streams):
            call = attend(pid)
            try:
                leaves = watched.kept_out_s > 0
                answer = await self._step.run(watched.rollout, call, call_key(call), leaves=leaves)
            except NothingHappened:
                continue
            except (RolloutGone, StateLost):
                raise
            except FORESEEN as error:
                # Nobody has asked for this; it is tried again.
                log.info("a process could not be looked at", pid=pid, error=str(error))
                continue
            said = True
            if pid in watched.streams:
                self._said(watched, pid, answer.record)
        return said


LIST = ToolCall("process", "list", {})


def _most_s(watched: Watched, *, said: bool) -> float:
    """Return how long to wait at most until the next look; said: whether the last one found anything."""
    if not any(watched.streams.values()):
        return ALONE_S
    # What a terminal says, or who watches, makes states that are its rollout's alone.
    own = any(stream.form != "process" for streams in watched.streams.values() for stream in streams)
    return BUSY_MOST_S if said and not own else LOOK_MOST_S


def _told(body: bytes, pid: int, streams: list[EventStream], *, skip: int = 0) -> bool:
    """Tell what an answer says of a process; return whether that is its end."""
    try:
        last, error = e2b_told.ended(body), None
    except ConnectError as failed:
        last, error = None, failed
    silent = error is not None and error.code == "invalid_argument"
    for stream in streams:
        events = [] if silent else _events(body, stream.form, skip)
        if events or error is None:
            stream.begin(pid)
        for event in [*events, *([last] if last else [])]:
            stream.put(event)
        if last or error:
            stream.end(error)
    return bool(last or error)


def _events(body: bytes, form: str, skip: int) -> list[e2b_told.Event]:
    if form == "watch":
        return [{"filesystem": event} for event in e2b_told.happened(body)]
    return list(e2b_told.output(body, skip=skip, terminal=form == "terminal"))


def _end(watched: Watched, error: ConnectError) -> None:
    for streams in watched.streams.values():
        for stream in streams:
            stream.end(error)
    watched.streams.clear()


def _not_found(process: int | str) -> ConnectError:
    return ConnectError("not_found", f"process with {'tag' if isinstance(process, str) else 'pid'} {process} not found")
