"""The output of E2B processes that run in the background, polled and sent to the clients that are connected to them."""

# Theory of operation. A process that outlives the call that started it produces output while its rollout makes no call.
# What the rollout's clients see must still be part of the tree: a rollout that comes the same way later must see the
# same output at the same node. So output is never forwarded directly. It is taken up by polls (`poll_call`), which
# are calls like any other: a poll that returns output is recorded and moves the rollout to a new node.
#
# 1. *Before each request* of a rollout, `catch_up` replays the polls that the tree already knows at the rollout's node.
#    All rollouts that come this way thus take the same polls in the same order.
# 2. *Between requests*, one task per rollout (`_poll_while_followed`) runs polls. The pause between two polls starts at
#    `FIRST_POLL_S` after a call and doubles while nothing happens.
# 3. A poll is an ordinary call, so it waits for the rollout's turn. While another call runs, polls are put off
#    (`_is_blocked`), because that call may be a short one that the client waits for. After `MAX_BLOCKED_S` the running
#    process is detached in favour of the poll.
# 4. Once no client is connected any more, polling stops. Terminals are the exception: see `UNATTENDED_POLL_S`.
#
# Everything here concerns connections. What lasts is in the tree and in the sandbox. See
# docs/decisions/0015-processes-and-connections.md.

import asyncio
from dataclasses import dataclass, field

import structlog

from proxy.compat.e2b import responses
from proxy.compat.e2b.connect_rpc import ConnectError, from_problem
from proxy.compat.e2b.event_stream import EventStream
from proxy.compat.endpoints import EndpointContext
from proxy.execution.errors import RolloutGoneError, StateLostError
from proxy.http.problems import FORESEEN, problem_of
from proxy.tree.keys import call_key
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Record
from sandboxes.calls import ToolCall
from sandboxes.task_owner import TaskOwner

log = structlog.get_logger()

FIRST_POLL_S = 0.05
"""Delay between a call and the first poll of background output; doubles up to `MAX_POLL_S`."""
MAX_POLL_S = 1.0
"""Longest interval between polls while the process is silent. A client sees new output at most this late."""
MAX_BUSY_POLL_S = 10.0
"""Longest interval while the process produces output. Longer, because each poll that finds output creates a node."""
UNATTENDED_POLL_S = 30.0
"""Interval for terminals without a client. Polls keep their sandbox in use: a terminal's state exists only there."""
EXPECTED_CALL_S = 10.0
"""Delay of polls at a node from which other rollouts went on with a call: this rollout probably does so, too."""
MAX_BLOCKED_S = 30.0
"""How long polls wait for another call of the rollout to end. Then that call is detached."""
STOPPED = "Forkpoint is being stopped. Connect again when it is back."
"""The error of streams that are open at shutdown. SDKs connect again after `unavailable`."""


def poll_call(pid: int) -> ToolCall:
    """Return the call that takes up what a background process has written since the last poll."""
    return ToolCall("process", "attend", {"process": pid})


@dataclass(slots=True, eq=False)
class FollowedProcess:
    """One background process and the streams of the clients that are connected to it."""

    streams: list[EventStream] = field(default_factory=list)  # Streams that receive its output.
    is_terminal: bool = False  # The process is polled even while no client is connected.


@dataclass(slots=True, eq=False)
class FollowedRollout:
    """The followed background processes of one rollout."""

    rollout: Rollout
    processes: dict[int, FollowedProcess] = field(default_factory=dict)  # By pid.
    # Set when a call of the rollout has ended, so that the next poll comes soon.
    called: asyncio.Event = field(default_factory=asyncio.Event)
    blocked_s: float = 0.0  # For how long polls have been put off because another call runs; 0 when none runs.
    polling: asyncio.Task[None] | None = None  # None before the first stream and after the last.

    def end_streams(self, error: ConnectError) -> None:
        """End the streams of all processes with an error."""
        for process in self.processes.values():
            for stream in process.streams:
                stream.end(error)
        self.processes.clear()

    def is_followed(self) -> bool:
        """Forget streams that have ended; return whether a process is left to poll."""
        # Copied, because entries are deleted in the loop.
        for pid, process in list(self.processes.items()):
            process.streams[:] = [stream for stream in process.streams if not stream.closed]
            if not process.streams and not process.is_terminal:
                del self.processes[pid]
        return bool(self.processes)

    def max_pause_s(self, *, produced: bool) -> float:
        """Return the longest pause before the next poll; `produced` says that the last round returned output."""
        streams = [stream for process in self.processes.values() for stream in process.streams]
        if not streams:
            return UNATTENDED_POLL_S
        # Output of terminals and watches creates nodes that belong to this rollout anyway: it can be polled often.
        is_private = any(stream.form != "process" for stream in streams)
        return MAX_BUSY_POLL_S if produced and not is_private else MAX_POLL_S


class OutputFollower:
    """Polls the followed background processes of all rollouts and sends their output to the connected clients."""

    def __init__(self, context: EndpointContext) -> None:
        self._context, self._step = context, context.step
        self._followed: dict[int, FollowedRollout] = {}
        self._tasks = TaskOwner()
        self._closing: asyncio.Task[None] | None = None

    def follow(self, rollout: Rollout, pid: int, stream: EventStream) -> None:
        """Send what a background process writes, or a watch observes, from now on."""
        stream.begin(pid)
        self._connect(rollout, pid, stream)

    def deliver_start(
        self, rollout: Rollout, pid: int, record: Record, stream: EventStream, *, sent_bytes: int = 0
    ) -> None:
        """Send the recorded result of a start, beyond `sent_bytes`, and follow a process that still runs."""
        result = self._context.store.records.result(record)
        if result.status != 200:
            stream.end(ConnectError("invalid_argument", result.body.decode(errors="replace")))
        elif not _deliver(result.body, pid, [stream], sent_bytes=sent_bytes):
            self._connect(rollout, pid, stream)

    def follows(self, rollout: Rollout) -> bool:
        """Return whether a background process of a rollout is followed, so that polls may come before its calls."""
        return rollout.id in self._followed

    def catch_up(self, rollout: Rollout) -> None:
        """Take the polls that the tree knows here before each request: all rollouts take the same steps in order."""
        followed = self._followed.get(rollout.id)
        # A poll may lead to a node at which further polls are known.
        while followed is not None and any(self._take_known(followed, pid) for pid in sorted(followed.processes)):
            pass

    def call_ended(self, rollout: Rollout) -> None:
        """Catch up and poll again soon, because a call of this rollout has ended."""
        self.catch_up(rollout)
        followed = self._followed.get(rollout.id)
        if followed is not None:
            followed.called.set()

    def end(self, rollout: Rollout, error: ConnectError) -> None:
        """End all streams of a rollout with an error."""
        followed = self._followed.pop(rollout.id, None)
        # Popped first: the polling task sees that its entry is gone, and leaves a newer one alone.
        if followed is not None:
            followed.end_streams(error)
            if followed.polling is not None:
                followed.polling.cancel()

    def _connect(self, rollout: Rollout, pid: int, stream: EventStream) -> None:
        if rollout.finished:
            stream.end(ConnectError("unavailable", f"The sandbox {rollout.name!r} has ended."))
            return
        # A second stream for the same process shares its polls.
        followed = self._followed.setdefault(rollout.id, FollowedRollout(rollout))
        process = followed.processes.setdefault(pid, FollowedProcess())
        process.streams.append(stream)
        process.is_terminal = process.is_terminal or stream.form == "terminal"
        # A background process is not killed when the client's deadline passes, so the stream must end by itself.
        stream.enforce_deadline()
        self.catch_up(rollout)
        followed.called.set()
        if self._closing is None:
            self._closing = self._tasks.spawn("end E2B streams at shutdown", self._end_at_shutdown())
        if followed.polling is None:
            followed.polling = self._tasks.spawn("poll E2B processes", self._poll_while_followed(followed))

    async def _end_at_shutdown(self) -> None:
        await self._context.lifecycle.closing.wait()
        for followed in list(self._followed.values()):
            self.end(followed.rollout, ConnectError("unavailable", STOPPED))

    def _take_known(self, followed: FollowedRollout, pid: int) -> bool:
        record = self._step.known(followed.rollout, call_key(poll_call(pid)))
        if record is not None:
            self._deliver_poll(followed, pid, record)
        return record is not None

    def _deliver_poll(self, followed: FollowedRollout, pid: int, record: Record) -> None:
        process = followed.processes[pid]
        result = self._context.store.records.result(record)
        if result.status != 200:
            for stream in process.streams:
                stream.end(not_found(pid))
        elif not _deliver(result.body, pid, process.streams):
            return
        del followed.processes[pid]

    async def _poll_while_followed(self, followed: FollowedRollout) -> None:
        pause_s = FIRST_POLL_S
        while followed.is_followed():
            followed.called.clear()
            try:
                async with asyncio.timeout(EXPECTED_CALL_S if _others_went_on(followed.rollout) else pause_s):
                    await followed.called.wait()
                # The rollout made a call. Its effect on the processes may show at once.
                pause_s = FIRST_POLL_S
            except TimeoutError:
                if self._is_blocked(followed, pause_s):
                    continue
                try:
                    produced = await self._poll_all(followed)
                except (RolloutGoneError, StateLostError) as error:
                    followed.end_streams(from_problem(problem_of(error)))
                    break
                pause_s = min(pause_s * 2, followed.max_pause_s(produced=produced))
        followed.polling = None
        # `end` may have removed this entry, and a new stream may have made another one since.
        if self._followed.get(followed.rollout.id) is followed:
            del self._followed[followed.rollout.id]

    def _is_blocked(self, followed: FollowedRollout, pause_s: float) -> bool:
        """Return whether to put polls off because another call runs, which a client may be waiting for."""
        followed.blocked_s = followed.blocked_s + pause_s if self._step.order.busy(followed.rollout) else 0.0
        return 0.0 < followed.blocked_s < MAX_BLOCKED_S

    async def _poll_all(self, followed: FollowedRollout) -> bool:
        produced = False
        for pid in sorted(followed.processes):
            call = poll_call(pid)
            try:
                if followed.blocked_s > 0:
                    # After MAX_BLOCKED_S a call is still running: detach it, so that the poll gets its turn.
                    self._step.detach(followed.rollout)
                answer = await self._step.poll(followed.rollout, call, call_key(call))
            except (RolloutGoneError, StateLostError):
                raise
            except FORESEEN as error:
                # No client has made this request, so no client gets the error. The next round tries again.
                log.info("poll of a background process failed", pid=pid, error=str(error))
                continue
            if answer is None:
                continue
            produced = True
            # During the await another request may have caught up with the end of this process.
            if pid in followed.processes:
                self._deliver_poll(followed, pid, answer.record)
        return produced


def _others_went_on(rollout: Rollout) -> bool:
    """Return whether another rollout made a state-changing call at this rollout's node."""
    return any(not record.observation and not record.private for record in rollout.node.records.values())


def _deliver(body: bytes, pid: int, streams: list[EventStream], *, sent_bytes: int = 0) -> bool:
    """Send a recorded result to each stream: its output, and the end if there is one. Return whether there is."""
    last, error = None, None
    try:
        last = responses.ended(body)
    except ConnectError as failure:
        error = failure
    # A process that could not be started has no output: the sandbox's message became the error.
    never_started = error is not None and error.code == "invalid_argument"
    for stream in streams:
        events = [] if never_started else _events(body, stream.form, sent_bytes)
        # A process that was killed before any output still needs its start event before the error.
        if events or error is None:
            stream.begin(pid)
        for event in [*events, *([last] if last else [])]:
            stream.put(event)
        if last or error:
            stream.end(error)
    return bool(last or error)


def _events(body: bytes, form: str, sent_bytes: int) -> list[responses.ProcessEvent]:
    if form == "watch":
        return [{"filesystem": event} for event in responses.watch_events(body)]
    return list(responses.output(body, skip=sent_bytes, terminal=form == "terminal"))


def not_found(process: int | str) -> ConnectError:
    """Return the error for a process that does not exist, given its pid or its tag."""
    return ConnectError("not_found", f"process with {'tag' if isinstance(process, str) else 'pid'} {process} not found")
