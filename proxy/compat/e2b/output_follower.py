"""What processes of E2B's that were left running say, told to the clients that listen, in steps of their rollouts.

See docs/decisions/0015.
"""

import asyncio
from dataclasses import dataclass, field

import structlog

from proxy.compat.e2b import responses as e2b_told
from proxy.compat.e2b.connect_rpc import ConnectError, of_problem
from proxy.compat.e2b.event_stream import EventStream
from proxy.engine import Engine
from proxy.execution.errors import NothingHappened, RolloutGoneError, StateLostError
from proxy.http.problems import FORESEEN, problem_of
from proxy.tree.keys import call_key
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Record
from sandboxes.calls import ToolCall

log = structlog.get_logger()

LOOK_S = 0.05
"""After a call, until what is left running is looked at for the first time; then twice as long each time, up to"""
LOOK_MOST_S = 1.0
BUSY_MOST_S = 10.0
"""while it says something: each look that finds something makes a state."""
ALONE_S = 30.0
"""Between looks at a terminal that nobody listens to: its state is in its sandbox alone, which is not idle then."""
PATIENT_S = 10.0
"""The same where others went on from this state without looking: it is probable that this one will, too."""
STOPPED = "Forkpoint is being stopped. Connect again when it is back."
KEPT_OUT_S = 30.0
"""How long a process waits to be looked at while another one runs; then that is left running, too."""


def attend(pid: int) -> ToolCall:
    """Return the call that takes up what a process that was left running has said since."""
    return ToolCall("process", "attend", {"process": pid})


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


class Following:
    """Who listens to which processes, in all rollouts. What they say lasts in the tree; this is about connections."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._step = engine, engine.step
        self._watched: dict[int, Watched] = {}
        self._closing: asyncio.Task[None] | None = None

    def follow(self, rollout: Rollout, pid: int, stream: EventStream) -> None:
        """Tell on stream what a process says from now on, or what happens where one watches."""
        stream.begin(pid)
        self._watch(rollout, pid, stream)

    def moved(self, rollout: Rollout) -> None:
        """Catch up, and look again soon: a call of this rollout has ended."""
        self.catch_up(rollout)
        watched = self._watched.get(rollout.id)
        if watched is not None:
            watched.moved.set()

    def end(self, rollout: Rollout, error: ConnectError) -> None:
        """End all streams of a rollout with error."""
        watched = self._watched.pop(rollout.id, None)
        if watched is not None:
            _end(watched, error)
            if watched.task is not None:
                watched.task.cancel()

    async def _close(self) -> None:
        """Once the engine closes, look at nothing any more."""
        await self._engine.closing.wait()
        for watched in list(self._watched.values()):
            self.end(watched.rollout, ConnectError("unavailable", STOPPED))

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

    def tell(self, rollout: Rollout, pid: int, record: Record, stream: EventStream, *, skip: int = 0) -> None:
        """Tell a recorded answer to a start, but for its first bytes of output."""
        result = self._engine.store.records.result(record)
        if result.status != 200:
            stream.end(ConnectError("invalid_argument", result.body.decode(errors="replace")))
            return
        if _told(result.body, pid, [stream], skip=skip):
            return
        self._watch(rollout, pid, stream)

    def _said(self, watched: Watched, pid: int, record: Record) -> None:
        result = self._engine.store.records.result(record)
        if result.status != 200:
            for stream in watched.streams.pop(pid):
                stream.end(not_found(pid))
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
                except (RolloutGoneError, StateLostError) as error:
                    _end(watched, of_problem(problem_of(error)))
                    break
                pause_s = min(pause_s * 2, _max_s(watched, said=said))
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
            except (RolloutGoneError, StateLostError):
                raise
            except FORESEEN as error:
                # Nobody has asked for this; it is tried again.
                log.info("a process could not be looked at", pid=pid, error=str(error))
                continue
            said = True
            if pid in watched.streams:
                self._said(watched, pid, answer.record)
        return said


def _max_s(watched: Watched, *, said: bool) -> float:
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


def _events(body: bytes, form: str, skip: int) -> list[e2b_told.ProcessEvent]:
    if form == "watch":
        return [{"filesystem": event} for event in e2b_told.happened(body)]
    return list(e2b_told.output(body, skip=skip, terminal=form == "terminal"))


def _end(watched: Watched, error: ConnectError) -> None:
    for streams in watched.streams.values():
        for stream in streams:
            stream.end(error)
    watched.streams.clear()


def not_found(process: int | str) -> ConnectError:
    """Return what is said of a process that is not there, by its pid or its tag."""
    return ConnectError("not_found", f"process with {'tag' if isinstance(process, str) else 'pid'} {process} not found")
