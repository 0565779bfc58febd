"""What a supervisor needs of the sandbox that it runs calls in: the platform's steps, and the sandbox's files."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from socket import socket
from typing import Protocol

from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.files.disk_watch import limit_note
from sandboxes.guest.files.operations import problem
from sandboxes.guest.files.tracker import Digests
from sandboxes.guest.process_call import StartedProcess
from sandboxes.guest.shell import Shell
from sandboxes.ipc.codec import with_members
from sandboxes.ipc.messages import CallDone, CommandOutcome, FileDelta, FileOutcome, Outcome, RunCommand, RunProcess
from sandboxes.linux.processes import Process
from sandboxes.shell_text import ShellSession

TIMED_OUT, OVER_DISK = 124, 137
"""Exit codes of commands that were killed: as `timeout` reports them, and as a shell reports a SIGKILL."""


@dataclass(frozen=True)
class Performed:
    """What came of a call, before its effects are known.

    Attributes:
        outcome: How it ended.
        body: Its output.
        session_changed: Whether the shell session differs from before.
        read: Whether the caller knows that the call changed nothing in a server's memory.
        awaited: Whether the processes that it started are known to be ready.
        host_full: Whether it was killed because the machine's disk was nearly full, or because the sandbox holds what
            all sandboxes share and the machine has none left of; see `linux.user_counts`.
    """

    outcome: Outcome
    body: bytes = b""
    session_changed: bool = False
    read: bool = False
    awaited: bool = False
    host_full: bool = False

    def nested_too_deep(self, disk_bytes: int) -> "Performed":
        """Return what came of a call that leaves directories nested too deeply: the agent gets a line about it.

        Such a state can be neither digested nor frozen. A process has received that line on its stderr already.
        """
        note = limit_note("depth", disk_bytes)
        match self.outcome:
            case CommandOutcome() as outcome:
                return replace(self, outcome=with_members(outcome, exit_code=OVER_DISK), body=self.body + note)
            case FileOutcome():
                status, media_type, body = problem(507, "File operation failed", note.decode().strip("\n[]"))
                return replace(self, outcome=FileOutcome(status, media_type), body=body)
        return self


class Files(Protocol):
    """What a sandbox's files differ in from its root state; `changes.Changes` is one implementation."""

    disk_bytes: int
    reserve_bytes: int
    too_deep: bool

    def look(self) -> bool:
        """Update the delta; return whether anything differs from before."""

    def nests_too_deep(self) -> bool:
        """Look for directories that are nested too deeply."""

    def digests(self, sessions: dict[str, ShellSession], *, alive: bool) -> Digests:
        """Return the state's digest, or its witness if processes run."""

    @property
    def order(self) -> bytes | None:
        """The order in which the last call wrote files; see `write_order`."""

    def expect(self, order: bytes) -> None:
        """Give what the next call writes a recorded order of times."""

    def shown(self) -> FileDelta | None:
        """Return what differs from the root state, for people; None if it is too much to show."""

    def free_bytes(self) -> int:
        """Return the free bytes of the machine's disk."""

    def over_disk(self, pids: Callable[[], Iterable[int]]) -> str | None:
        """Return a reason once the sandbox holds too much; see `disk_watch.DiskWatch`."""


class Platform(Protocol):
    """The steps of a call that depend on where the supervisor runs."""

    def living(self, ours: Collection[int] = (), *, collects: bool = True) -> set[Process]:
        """Return all processes of the sandbox but `ours`.

        Args:
            ours: Pids that are left out.
            collects: Whether children that have ended are collected first, which takes their exit status from others.
        """

    def ipc_objects(self) -> int:
        """Return the number of IPC objects that no process has to hold."""

    def run_command(self, request: RunCommand, command: bytes) -> Performed:
        """Run a command in a session's shell."""

    def start_process(self, request: RunProcess, stdin: bytes, to: socket) -> StartedProcess:
        """Start a process of its own, whose output goes to a socket.

        Raises:
            ShellStartError: No process can be started.
        """

    def become_agent(self) -> None:
        """Drop, in a child that works on the agent's paths, every right that the agent lacks."""

    def end_servers(self) -> None:
        """Kill the agent's processes, but not what starts others."""

    def forget_shell(self, shell: Shell, ending: str) -> None:
        """Give up a shell whose command did not end with a dump."""

    def finish_call(self, answer: CallDone, body: bytes, fresh: list[str]) -> None:
        """Send the answer, and get ready for the next call.

        Args:
            answer: The answer.
            body: The call's output.
            fresh: The sessions that go on in a fresh shell, if nothing survives.
        """


def not_started(error: ShellStartError) -> Performed:
    """Return what came of a command whose shell does not start, because an earlier command has broken it.

    Raises:
        ShellStartError: The failure is ours or the machine's. It ends the sandbox, and the call has no answer.
    """
    if not error.broken:
        raise error
    # 127 is the shell's exit code for "command not found" (POSIX, 2.8.2), so agents see an ordinary failure.
    return Performed(CommandOutcome(127, timed_out=False, truncated=False, stdout_bytes=0), f"{error}\n".encode())
