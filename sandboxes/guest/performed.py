"""What came of a call, as the supervisor knows it before the call's effects are measured."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sandboxes.calls import Mark, in_order
from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.files.disk_watch import limit_note
from sandboxes.guest.files.operations import problem
from sandboxes.guest.process_io import OVER_DISK
from sandboxes.ipc.codec import with_members
from sandboxes.ipc.messages import CommandOutcome, FileOutcome, Outcome, ProcessOutcome

_TOO_LARGE = 128 + signal.SIGXFSZ
"""Exit code of a command whose file came to the largest size that a file may have (RLIMIT_FSIZE)."""


@dataclass(frozen=True)
class Performed:
    """What came of a call, before its effects are known."""

    outcome: Outcome
    body: bytes = b""
    session_changed: bool = False  # Whether the shell session differs from before.
    read: bool = False  # Whether the caller knows that the call changed nothing in a server's memory.
    awaited: bool = False  # Whether the processes that it started are known to be ready.
    # Whether it was killed because the machine's disk was nearly full, or because the sandbox holds what all sandboxes
    # share and the machine has none left of; see `linux.user_counts`.
    host_full: bool = False
    is_broken: bool = False  # Whether no shell starts in the sandbox any more.

    @property
    def may_be_broken(self) -> bool:
        """Whether a program was not found or could not be executed (POSIX, 2.8.2)."""
        return isinstance(self.outcome, CommandOutcome | ProcessOutcome) and self.outcome.exit_code in (126, 127)

    def marks(self, reached: Iterable[str]) -> tuple[Mark, ...]:
        """Return the marks of a call, given which limits its watches have reported."""
        marks = ["disk" if limit == "depth" else limit for limit in reached]
        marks += ["broken"] if self.is_broken else []
        if isinstance(self.outcome, CommandOutcome | ProcessOutcome):
            marks += ["timeout"] if self.outcome.timed_out else []
            marks += ["disk"] if self.outcome.exit_code == _TOO_LARGE else []
        if isinstance(self.outcome, CommandOutcome) and self.outcome.truncated:
            marks.append("output")
        return in_order(marks)

    def nested_too_deep(self, disk_bytes: int) -> "Performed":
        """Return what came of a call that leaves directories nested too deeply: the agent gets a line about it."""
        # Such a state can be neither digested nor frozen. A process has received that line on its stderr already.
        note = limit_note("depth", disk_bytes)
        match self.outcome:
            case CommandOutcome() as outcome:
                return replace(self, outcome=with_members(outcome, exit_code=OVER_DISK), body=self.body + note)
            case FileOutcome():
                status, media_type, body = problem(507, "File operation failed", note.decode().strip("\n[]"))
                return replace(self, outcome=FileOutcome(status, media_type), body=body)
        return self

    def out_of_processes(self) -> "Performed":
        """Return what came of a call during which no process could be started: the agent gets a line about it."""
        # A process of its own has its output already.
        match self.outcome:
            case CommandOutcome() as outcome:
                note = limit_note("pids", 0)
                return replace(self, outcome=with_members(outcome, exit_code=OVER_DISK), body=self.body + note)
            case ProcessOutcome(exit_code=int()) as outcome:
                return replace(self, outcome=with_members(outcome, exit_code=OVER_DISK))
        return self


def not_started(error: ShellStartError) -> Performed:
    """Return what came of a command whose shell an earlier command has broken; any other failure is raised again."""
    if not error.broken:
        raise error
    # 127 is the shell's exit code for "command not found" (POSIX, 2.8.2), so agents see an ordinary failure.
    outcome = CommandOutcome(127, timed_out=False, truncated=False, stdout_bytes=0)
    return Performed(outcome, f"{error}\n".encode(), is_broken=True)
