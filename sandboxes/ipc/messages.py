"""The vocabulary of our processes: every message between the proxy and the processes that run and watch sandboxes.

Each request class names its answer as type argument, so mypy checks both ends against each other. Requests on one
socket are answered in order. A process that fails says `Failed` and ends; that answers any request.

This module has what the proxy and a sandbox's supervisor (pid 1) say about calls; `state_messages` what they say about
states, `server_messages` about tool servers, `launch_messages` what the proxy and the launcher say. After a `CallDone`
with `discard` or `seal`, pid 1 answers as to `Pause` unasked. After a `LayerState` with something in the upper layer,
it waits for `LayersSwitched` on its second socket.
"""

from typing import TYPE_CHECKING, Any

from sandboxes.calls import Mark
from sandboxes.effects import StateDigest
from sandboxes.ipc.codec import Amount, Count, IpcMessage, IpcRecord, IpcRequest, Number, plain_json

if TYPE_CHECKING:
    ReportedSession = dict[str, Any]
else:
    ReportedSession = dict[str, plain_json(3)]
"""A shell session as a supervisor reports it."""

FileDelta = dict[str, tuple[str, int]]
"""The paths that differ from the root state: what each is now, and its modification time in nanoseconds."""


# Not under a request: any request may be answered by it (`Channel.ask` raises it as `PeerFailedError`).
class Failed(IpcMessage, op="failed"):
    """The sender ends, or could not do what was requested. The error is text for people."""

    error: str


class Done(IpcMessage, op="done"):
    """The request was carried out, and there is nothing else to report."""


# -- calls -----------------------------------------------------------------------------------------------------------


# A record and no message: it has no op, because it only comes as a member of messages.
class StateSummary(IpcRecord):
    """What every answer reports of the sandbox's state."""

    # Of a digest and a witness at most one is there: beside running processes no digest can be taken.
    digest: StateDigest | None  # The state's names. None while something is running, or if directories are too deep.
    witness: bytes | None  # Beside running processes, a digest of what they do not write. None otherwise.
    restless: bool  # Whether something that runs in the sandbox may be changing the state by itself.


# A message, although it comes only as a member: the op tells the outcomes of a union apart.
class CommandOutcome(IpcMessage, op="command_outcome"):
    """How a session's command ended; the body is its stdout, then its stderr."""

    exit_code: int  # The command's exit status; 124 after a timeout, 137 after too much disk use.
    timed_out: bool
    truncated: bool  # Whether it printed more than is recorded.
    stdout_bytes: int  # Where stderr begins in the body.


class SqlOutcome(IpcRecord):
    """What is to be known of a statement on a database file besides its result."""

    timed_out: bool  # By the statement's own time limit.
    volatile: bool  # Its result depends on chance or on the time of day.


class FileOutcome(IpcMessage, op="file_outcome"):
    """The HTTP-like answer of an operation on files, on a database or on a background process."""

    status: int
    media_type: str
    # Optional, because only statements on databases have such facts.
    sql: SqlOutcome | None = None  # None also for a statement whose process was killed.


class ProcessOutcome(IpcMessage, op="process_outcome"):
    """How a process of its own ended, or that it goes on."""

    exit_code: int | None  # None for a process that goes on in the background.
    timed_out: bool
    detached: bool = False  # Whether its client started it detached.
    kept: bool = False  # Whether it may be polled later, by its number.


class ServerOutcome(IpcMessage, op="server_outcome"):
    """A tool server's answer has come over its own connection; with the last lines that it printed, if requested."""

    log: str


# The codec reads a union of messages by their op, so a new kind of outcome must be added here.
Outcome = CommandOutcome | FileOutcome | ProcessOutcome | ServerOutcome


class ResourcesUsed(IpcRecord):
    """What a call used of the machine; the members are those of `ResourceUse`."""

    cpu_s: Amount | None
    peak_bytes: Count | None
    read_bytes: Count | None
    written_bytes: Count | None


class CallDone(IpcMessage, op="call_done"):
    """A call has ended; the body is its output."""

    outcome: Outcome
    # The supervisor measures, because the way to the proxy is not part of the call.
    seconds: Number  # How long it ran.
    changed_session: bool  # Whether the shell session differs from before.
    changed_processes: bool  # Whether processes appeared, ended or worked.
    changed_files: bool  # Whether files differ from before.
    settling: bool  # Whether it left processes running that may still be starting.
    # Read by `host.guest.Guest.conclude`: the sandbox dies, so that the result is never recorded.
    host_full: bool  # Whether the machine's disk was nearly full, so that the result cannot be trusted.
    short: bool  # Whether the machine had none left of what all sandboxes share (`linux.user_counts`).
    state: StateSummary
    order: bytes | None = None  # The order in which it wrote files (`guest.files.write_order`); None if there is none.
    last_pid: int = 0  # The pid that was assigned last before it, and before the shell that it ran in was started.
    resources: ResourcesUsed | None = None  # What it used of the machine; None if the sandbox cannot tell.
    marks: tuple[Mark, ...] = ()  # Which limits it reached, and whether the sandbox is broken.
    # At most one of the two: an upper layer is thrown away or kept.
    discard: bool = False  # The upper layer makes no difference; it is to be replaced by an empty one.
    seal: bool = False  # The upper layer is to become a frozen layer.


class CourseExpected(IpcMessage, op="course_expected"):
    """The next call is prepared. Its processes get the pids after this one, unless the launcher changes that."""

    last_pid: int


# Sent before a call that a replay repeats. A message of its own, because every kind of call may follow.
class ExpectCourse(IpcRequest[CourseExpected], op="expect_course"):
    """Give the next call's files a recorded order (`CallDone.order`), and its processes the pids after `last_pid`."""

    order: bytes | None
    last_pid: int


class RunCommand(IpcRequest[CallDone], op="exec"):
    """Run a command, the body, in a session's shell."""

    session: str
    timeout_s: Number


# The descriptor is the archive of `unpack`, which may be larger than any frame.
class RunFileOperation(IpcRequest[CallDone], op="file", descriptors=(0, 1)):
    """Run an operation of `guest.files.operations.perform` in a child with the agent's rights."""

    tool: str
    arguments: dict[str, Any]
    # Also the time limit of the child that runs it, so that a hostile file cannot hold the supervisor.
    timeout_s: Number


class UseBackgroundProcess(IpcRequest[CallDone], op="background"):
    """List, poll, write to, resize, signal or watch something that runs in the background; see `guest.background`."""

    tool: str
    arguments: dict[str, Any]
    timeout_s: Number


# The output has a socket of its own: on the channel, a frame must be whole before it can be sent.
class ProcessStarted(IpcMessage, op="process_started", descriptors=(1, 1)):
    """A process of its own was requested; its output comes on the socket that accompanies this message."""


class RunProcess(IpcRequest[ProcessStarted], op="process"):
    """Run a process of its own, outside any session, with the call's arguments; the body is its stdin."""

    arguments: dict[str, Any]
    # Whole and not a difference: the process gets these variables and no others.
    environment: dict[str, str]
    timeout_s: Number


# No request, so nothing answers it: the process may end at the same moment.
class Detach(IpcMessage, op="detach"):
    """The client of the running process has left; the process goes on in the background."""


# -- inspection ------------------------------------------------------------------------------------------------------


class Described(IpcMessage, op="described"):
    """The state, for people who look at it."""

    delta: FileDelta | None  # The files that differ from the root state; None if they are too many to show.
    sessions: dict[str, ReportedSession]  # The shell sessions that differ from a new one, by name.
    pristine: ReportedSession | None  # A new shell's session; None if none was started yet.


class DescribeState(IpcRequest[Described], op="describe"):
    """Describe the state of the sandbox."""


# The master end crosses to the proxy; the shell keeps the other end.
class TerminalOpened(IpcMessage, op="terminal_opened", descriptors=(1, 1)):
    """A shell runs on a new terminal, whose master end accompanies this message."""


class TerminalFailed(IpcMessage, op="terminal_failed"):
    """There is no terminal, for this reason."""

    error: str


class OpenTerminal(IpcRequest[TerminalOpened | TerminalFailed], op="terminal"):
    """Open an interactive shell in the main session's state, on a terminal of this size in characters."""

    columns: int
    rows: int
