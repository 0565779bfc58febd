"""A live shell of one session: it gets commands, and answers each with a dump of the session.

What a shell is asked and answers is here; `local_shell.LocalShell` says how one starts.
"""

import contextlib
import hashlib
import os
import re
import select
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from sandboxes.guest.anchors.shell_kit import changeable
from sandboxes.guest.bash import session as session_texts
from sandboxes.linux.descriptors import close_all, overwrite, read_available
from sandboxes.linux.live_state import report_writes
from sandboxes.linux.processes import limits, run_counts, wait_until_asleep
from sandboxes.process_output import KeptOutput
from sandboxes.shell_text import Jobs, ShellSession

_PIECES_S = 0.0002
"""How long the rest of a dump is left to gather. Bash writes each line by itself, 60 lines in 0.3 ms, and a reader that
takes each as it comes makes 60 reads, while both wait for the pipe's lock. Doubled, a call takes 0.2 ms longer."""
_PIECES = 16
"""How many pieces are read before the caller looks at other things again. A plain session's dump comes in four."""
_MUCH_BYTES = 1 << 15
"""Half of a pipe. After a read that has brought so much the next one follows at once, because a full pipe stops bash.
Doubled, bash may stop; halved, nothing changes for dumps of the usual 3 kB."""


def may_be_waited_for(jobs: Jobs, session: ShellSession) -> bool:
    """Return whether a later call may wait for a job: it still runs, or a variable has its pid."""
    last = next((entry[3:] for entry in jobs if entry.startswith("$! ")), None)
    return len(jobs) > (last is not None) or (
        last is not None and any(re.search(rf"\b{last}\b", line) for line in session["variables"])
    )


def is_in_proc_of(pid: int, folder: str) -> bool:
    """Return whether a directory is one of a process in /proc, so that no later process can be in it (pure).

    Args:
        pid: The process, as the sandbox numbers it.
        folder: The directory's name.
    """
    return f"{folder}/".startswith(f"/proc/{pid}/")


class Output(KeptOutput):
    """One stream of a shell's command.

    Attributes:
        fd: Our end of the pipe.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.fd = fd

    def drain(self, max_bytes: int) -> None:
        """Read without waiting, and keep the first max_bytes."""
        while data := read_available(self.fd):
            self.add(data, max_bytes)


class Shell(ABC):
    """A live shell.

    Attributes:
        name: The name of its session.
        session: The session that it was started from; None for one in which nothing has happened.
        pid: Its process, as the supervisor numbers it.
        death: A descriptor that is readable once it has ended. By then the pid may be another process's.
        baseline: The session in its last dump; None until the first dump.
        jobs: The jobs in its last dump.
        knowledge: What it knows of jobs that may be waited for: a digest of all its lists of jobs since the first such
            job. Empty if there was none; a fresh shell that is restored from a dump then does as well.
        born: What the first shell passed on to its children (`live_state.inherited`).
        runs: How many commands it was given.
        out: The stdout of its command.
        err: The stderr of its command.
        dump_fd: Our end of the pipe on which it dumps.
        go_fd: Our end of the pipe whose lines let it go on.
        command_fd: The text of its command.
    """

    def __init__(self, name: str, session: ShellSession | None, pid: int, death: int, ends: Mapping[int, int]) -> None:
        """Take over a shell that was started, or is about to be.

        Args:
            name: The name of its session.
            session: The session that it is started from.
            pid: Its process; 0 while it is not known.
            death: A descriptor that is readable once it has ended.
            ends: Our ends of its pipes and of its command's text, by its own descriptor numbers.
        """
        self.name, self.session, self.pid, self.death = name, session, pid, death
        self.baseline: ShellSession | None = None
        self.jobs: Jobs = ()
        self.knowledge = b""
        self.born: list[str] = []
        self.runs = 0
        self._watches: list[int] = []
        self.out, self.err = Output(ends[1]), Output(ends[2])
        self.command_fd, self.go_fd = ends[session_texts.COMMAND_FD], ends[session_texts.GO_FD]
        self.dump_fd = ends[session_texts.DUMP_FD]
        # A dump arrives in pieces of the pipe's size, and between them the supervisor watches disk and time.
        self._dump = bytearray()

    @abstractmethod
    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of an idle shell; its members are a disk format."""

    @abstractmethod
    def _orders(self, command: bytes) -> tuple[bytes, bytes]:
        """Return the line that lets the shell go on, and the text that it then evaluates."""

    @abstractmethod
    def _parse_dump(self, dump: bytes) -> tuple[int, ShellSession, Jobs]:
        """Return the exit status, the session and the jobs of a dump, with the session's resource limits.

        Raises:
            MalformedDumpError: A command has interfered with the dump.
        """

    @abstractmethod
    def restore_limits(self) -> None:
        """Give the shell its session's resource limits. It must have become the shell's program already.

        An execve(2) that is under way puts the limit of the stack back at its end (finalize_exec in the kernel).
        """

    @property
    def waits_as_template(self) -> bool:
        """Whether its process is a template, which no process of the sandbox can enter and which runs no command."""
        return False

    @abstractmethod
    def stands_at(self, folder: str) -> bool:
        """Return whether a name leads to the directory that the idle shell is in, and will for the next shell."""

    @abstractmethod
    def is_as_new(self) -> bool:
        """Return whether its open descriptors are those of a shell that waits for its first command."""

    def send_kill(self) -> None:
        """Have the kernel end the shell, without a wait: from now on it runs nothing."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.death, signal.SIGKILL)

    @abstractmethod
    def close(self) -> None:
        """Close our ends of its pipes. The shell itself is not killed."""
        close_all(self._watches)
        self._watches.clear()

    def run(self, command: bytes) -> None:
        """Begin a command. The shell ends it by writing a dump.

        The command's text goes into a file that the shell has open, because a line on a pipe could be longer than the
        pipe; the line on the pipe only lets the shell go on.
        """
        self.runs += 1
        # What came between calls is dropped: how much that is depends on the moment.
        for output in (self.out, self.err):
            output.drain(0)
            output.take()
        go, text = self._orders(command)
        # A shorter command must not end with the tail of the last one.
        overwrite(self.command_fd, text)
        self._dump.clear()
        # Last: this line makes the shell read the text.
        os.write(self.go_fd, go)

    def read_dump(self) -> bool:
        """Read what has come of a dump, and give bash a moment if that is only a part; return whether it is whole."""
        # Not to the end: a command may write to this pipe without one, and the caller watches its time.
        for _ in range(_PIECES):
            if not (data := read_available(self.dump_fd)):
                break
            if len(self._dump) <= session_texts.MAX_DUMP_BYTES:
                self._dump += data
            else:
                # A session may be made huge on purpose. Only its end is kept then, to see that the dump is over.
                self._dump[-len(session_texts.END) :] = (self._dump[-len(session_texts.END) :] + data)[
                    -len(session_texts.END) :
                ]
            # A command that writes this mark itself ends its dump early; `parse_dump` checks the form of the rest.
            if self._dump.endswith(session_texts.END):
                return True
            if len(data) < _MUCH_BYTES:
                time.sleep(_PIECES_S)
        # Without data the shell has ended. What has come so far is no dump.
        return False

    def finish_dump(self) -> tuple[int, ShellSession]:
        """Return the exit status and the session of the dump that has come, and keep its jobs in `jobs`.

        Raises:
            MalformedDumpError: A command has interfered with the dump.
        """
        status, session, jobs = self._parse_dump(bytes(self._dump))
        if jobs != self.jobs:
            self.jobs = jobs
            # Bash keeps the exit status of each of them, and no dump can show these.
            if self.knowledge or may_be_waited_for(jobs, session):
                self.knowledge = hashlib.blake2b(self.knowledge + repr(jobs).encode(), digest_size=16).digest()
        return status, session

    @property
    def ended(self) -> bool:
        """Whether the shell has ended."""
        # A pidfd becomes readable when its process is a zombie, before the parent has waited for it (pidfd_open(2)).
        return bool(select.select([self.death], [], [], 0)[0])

    def watch(self) -> None:
        """Have the kernel report the next write to one of its files in /proc; see `live_state.was_written`."""
        if not self._watches:
            # A shell that has just ended is noticed otherwise.
            with contextlib.suppress(OSError):
                self._watches = report_writes(self.pid)

    def at_rest(self) -> object:
        """Return `facts` once the shell sleeps: after its first dump it goes on for a moment."""
        wait_until_asleep(self.pid, lambda: False)
        return self.facts()

    def facts(self) -> object:
        """Return what a call of another session may change of an idle shell; equal to nothing while the shell runs."""
        [runs] = run_counts([(self.pid, 0)]).values()
        return (runs if runs >= 0 else object(), limits(self.pid), self.pipes)

    @property
    def pipes(self) -> list[tuple[int, ...]]:
        """What commands can change of its pipes and of its command's text; see `changeable`."""
        fds = {1: self.out.fd, 2: self.err.fd, session_texts.DUMP_FD: self.dump_fd, session_texts.GO_FD: self.go_fd}
        return changeable({**fds, session_texts.COMMAND_FD: self.command_fd})

    def holds_more(self) -> bool:
        """Whether the idle shell has other descriptors than when it was new; True if that cannot be seen.

        Right after its dump it still has some open, until it waits for its next command. So it is given a moment.
        """
        return not wait_until_asleep(self.pid, self.is_as_new)
