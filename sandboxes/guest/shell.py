"""A live shell of one session: it gets commands, and answers each with a dump of the session."""

import contextlib
import functools
import hashlib
import os
import re
import resource
import select
import signal
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sandboxes.guest.anchors.native_anchor import NativeAnchor
from sandboxes.guest.anchors.shell_kit import TEXTS, ShellKit, changeable, widen
from sandboxes.guest.anchors.starter import AnchorLostError
from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.bash.restore import orders
from sandboxes.linux import processes
from sandboxes.linux.descriptors import close_all, overwrite, read_available
from sandboxes.linux.live_state import report_writes
from sandboxes.linux.processes import death_of, has_descriptors, run_counts, wait_until_asleep
from sandboxes.process_output import KeptOutput
from sandboxes.shell_text import Jobs, ShellSession

if TYPE_CHECKING:
    from sandboxes.guest.anchors.template import ShellTemplate

_PIECES_S = 0.0002
"""How long the rest of a dump is left to gather. Bash writes each line by itself, 60 lines in 0.3 ms, and a reader that
takes each as it comes makes 60 reads, while both wait for the pipe's lock. Doubled, a call takes 0.2 ms longer."""
_PIECES = 16
"""How many pieces are read before the caller looks at other things again. A plain session's dump comes in four."""
_MUCH_BYTES = 1 << 15
"""Half of a pipe. After a read that has brought so much the next one follows at once, because a full pipe stops bash.
Doubled, bash may stop; halved, nothing changes for dumps of the usual 3 kB."""
_LIMITS = tuple(
    (name, getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
)
"""All resource limits of this kernel. RLIMIT_OFILE is another name of RLIMIT_NOFILE."""


def may_be_waited_for(jobs: Jobs, session: ShellSession) -> bool:
    """Return whether a later call may wait for a job: it still runs, or a variable has its pid."""
    last = next((entry[3:] for entry in jobs if entry.startswith("$! ")), None)
    return len(jobs) > (last is not None) or (
        last is not None and any(re.search(rf"\b{last}\b", line) for line in session["variables"])
    )


class Output(KeptOutput):
    """One stream of a shell's command, from our end of the pipe."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        # `tail_bytes`: how much of what is kept of a longer output are its last bytes.
        self.fd, self.tail_bytes = fd, 0

    def drain(self, max_bytes: int) -> None:
        """Read without waiting, and keep max_bytes."""
        while data := read_available(self.fd):
            self.add(data, max_bytes, self.tail_bytes)


class Shell:
    """A live bash that is a child of the anchor, over pipes."""

    def __init__(self, name: str, session: ShellSession | None, pid: int, ends: Mapping[int, int]) -> None:
        """Take over a bash that runs, and our ends of its pipes and of its command's text, by its own numbers."""
        # `session`: the session that it was started from; None for one in which nothing has happened.
        # `death`: a descriptor that is readable once it has ended. By then the pid may be another process's.
        self.name, self.session, self.pid, self.death = name, session, pid, death_of(pid)
        self.baseline: ShellSession | None = None  # The session in its last dump; None until the first dump.
        self.jobs: Jobs = ()  # The jobs in its last dump.
        # What it knows of jobs that may be waited for: a digest of all its lists of jobs since the first such job.
        # Empty if there was none; a fresh shell that is restored from a dump then does as well.
        self.knowledge = b""
        self.born: list[str] = []  # What the first shell passed on to its children (`live_state.inherited`).
        self.runs = 0  # How many commands it was given.
        self._watches: list[int] = []
        self.out, self.err = Output(ends[1]), Output(ends[2])
        self.command_fd, self.go_fd = ends[session_texts.COMMAND_FD], ends[session_texts.GO_FD]
        self.dump_fd = ends[session_texts.DUMP_FD]
        # A dump arrives in pieces of the pipe's size, and between them the supervisor watches disk and time.
        self._dump = bytearray()
        # What it was started on, which the anchor may lend again; None if its descriptors are its own.
        self.kit: ShellKit | None = None
        # What forks the bash that runs the next command; None if the shell's own bash does. While `forked` is not set,
        # `pid` is the template's.
        self.template: ShellTemplate | None = None
        self.forked = False
        # Kept together, so that `close` cannot forget one.
        self._ends = [*ends.values(), self.death]
        # The kernel's names of what an idle shell has open. Whatever else it has open, a command has opened.
        self._known = {0: "/dev/null", **dict.fromkeys(TEXTS, "/memfd:text (deleted)"), **self._pipe_names()}

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of an idle shell, with the names of the pipes that lead to it."""
        facts = {name: getattr(self, name) for name in ("name", "session", "pid", "baseline", "jobs", "runs")}
        facts |= {"knowledge": self.knowledge.hex(), "born": self.born}
        return {**facts, "pipes": {str(number): name for number, name in self._pipe_names().items()}}

    def _pipe_names(self) -> dict[int, str]:
        ours = {1: self.out.fd, 2: self.err.fd, session_texts.GO_FD: self.go_fd, session_texts.DUMP_FD: self.dump_fd}
        # Both ends of a pipe have the same name `pipe:[inode]` (proc_pid_fd(5)), so our end tells what the shell has
        # open.
        return {number: os.readlink(f"/proc/self/fd/{fd}") for number, fd in ours.items()}  # noqa: PTH115

    def restore_limits(self) -> None:
        """Give the shell its session's resource limits. It must have become the shell's program already."""
        # An execve(2) that is under way puts the limit of the stack back at its end (finalize_exec in the kernel).
        for name, (soft, hard) in ({} if self.session is None else self.session["limits"]).items():
            # The session may be of another kernel, or of a privileged start, whose limits cannot be set here.
            with contextlib.suppress(OSError, ValueError):
                resource.prlimit(self.pid, getattr(resource, name), (soft, hard))

    def _parse_dump(self, dump: bytes) -> tuple[int, ShellSession, Jobs]:
        status, session, jobs = session_texts.parse_dump(dump)
        # The kernel tells limits more reliably than `ulimit -a`, whose words differ between bash versions.
        session["limits"] = self._changed_limits()
        return status, session, jobs

    def _changed_limits(self) -> dict[str, list[int]]:
        changed: dict[str, list[int]] = {}
        # The kernel's text of all limits costs a tenth of asking for each.
        if processes.limits(self.pid) == _own_limits():
            return changed
        for name, number in _LIMITS:
            with contextlib.suppress(OSError, ValueError):
                # Compared with this process's own limits, with which the shell was born.
                now = resource.prlimit(self.pid, number)
                if now != _own_limit(number):
                    changed[name] = list(now)
        return changed

    def stands_at(self, folder: str) -> bool:
        """Return whether a name leads to the directory that the idle shell is in, and will for the next shell."""
        if self.waits_as_template:
            # Its fork enters the directory by its name.
            return True
        if f"{folder}/".startswith(f"/proc/{self.pid}/"):
            # No later process can be in it.
            return False
        try:
            return os.path.samestat(os.stat(f"/proc/{self.pid}/cwd"), os.stat(folder.encode("latin-1")))  # noqa: PTH116
        except OSError:
            return False

    def send_kill(self) -> None:
        """Have the kernel end the shell, without a wait: from now on it runs nothing."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.death, signal.SIGKILL)

    def run(self, command: bytes) -> None:
        """Begin a command. The shell ends it by writing a dump."""
        # The text goes into a file that the shell has open, because a line on a pipe could be longer than the pipe.
        self.runs += 1
        # What came between calls is dropped: how much that is depends on the moment.
        for output in (self.out, self.err):
            output.drain(0)
            output.take()
        widen((self.out.fd, self.err.fd, self.dump_fd))
        go, text = orders(self.session, command)
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
        """Return the exit status and the session of the dump that has come, and keep its jobs in `jobs`."""
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

    def _end_watches(self) -> None:
        close_all(self._watches)
        self._watches.clear()

    def at_rest(self) -> object:
        """Return `facts` once the shell sleeps: after its first dump it goes on for a moment."""
        wait_until_asleep(self.pid, lambda: False)
        return self.facts()

    def facts(self) -> object:
        """Return what a call of another session may change of an idle shell; equal to nothing while the shell runs."""
        [runs] = run_counts([(self.pid, 0)]).values()
        return (runs if runs >= 0 else object(), processes.limits(self.pid), self.pipes)

    @property
    def pipes(self) -> list[tuple[int, ...]]:
        """What commands can change of its pipes and of its command's text; see `changeable`."""
        fds = {1: self.out.fd, 2: self.err.fd, session_texts.DUMP_FD: self.dump_fd, session_texts.GO_FD: self.go_fd}
        return changeable({**fds, session_texts.COMMAND_FD: self.command_fd})

    def holds_more(self) -> bool:
        """Whether the idle shell has other descriptors than when it was new; True if that cannot be seen."""
        # Right after its dump it still has some open, until it waits for its next command. So it is given a moment. No
        # process can open one in a template.
        return not wait_until_asleep(self.pid, lambda: self.waits_as_template or has_descriptors(self.pid, self._known))

    # -- with a template ---------------------------------------------------------------------------------------------

    @property
    def waits_as_template(self) -> bool:
        """Whether its process is a template, and no bash was forked for the next command."""
        return self.template is not None and not self.forked

    def fork(self, anchor: NativeAnchor) -> None:
        """Have the template fork the bash for the next command; `AnchorLostError` if it or the directory is gone."""
        assert self.template is not None
        assert self.baseline is not None
        pid = self.template.fork(self.baseline["cwd"])
        death = death_of(pid)
        try:
            anchor.take_note_of(pid)
        except AnchorLostError:
            # Nothing else knows of it.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(death, signal.SIGKILL)
            os.close(death)
            raise
        self._go_on_as(pid, death)
        self.forked = True

    def _go_on_as(self, pid: int, death: int) -> None:
        os.close(self.death)
        self.pid, self.death, self._ends[-1] = pid, death, death

    def fold(self) -> bool:
        """Go back to the template, before a command; the fork has ended. Return whether there is one that can fork."""
        if self.template is None or self.template.session is not self.session or not self.template.is_ready:
            return False
        self._end_watches()
        if self.forked:
            self.template.last_fork = self.pid
            self._go_on_as(self.template.pid, os.dup(self.template.death))
            self.forked = False
        self.jobs, self.knowledge, self.runs = (), b"", 0
        self._dump.clear()
        return True

    def drop_template(self) -> None:
        """End the template. A shell that waits as one ends with it."""
        if self.template is not None:
            self.template.end()
            self.template = None

    # -- its end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close our ends of its pipes, and end its template. The shell itself is not killed."""
        self._end_watches()
        self.drop_template()
        close_all(self._ends)
        self._ends.clear()


@functools.cache
def _own_limits() -> bytes:
    return processes.limits(os.getpid())


@functools.cache
def _own_limit(number: int) -> tuple[int, int]:
    # They do not change any more when shells are started.
    return resource.getrlimit(number)
