"""A live bash of one session: started from a dump, given commands, asked for its next dump. Seen from pid 1."""

import contextlib
import os
import resource
import select
from collections.abc import Mapping
from typing import Any

from sandboxes.guest import bash_session as sessions
from sandboxes.guest.anchor import BASH, Anchor, AnchorLostError, ShellStartError
from sandboxes.linux.processes import open_descriptors, wait_until_asleep
from sandboxes.session_types import Jobs, ShellSession

_LIMITS = tuple(
    (name, getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
)
_CHUNK = 1 << 16


class Output:
    """One stream of a shell: keeps the first limit bytes, counts the rest."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.kept = bytearray()
        self.dropped = 0

    def drain(self, limit: int) -> None:
        """Take what is there without waiting."""
        while True:
            try:
                data = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                return
            room = max(0, limit - len(self.kept))
            self.kept += data[:room]
            self.dropped += max(0, len(data) - room)

    def take(self) -> tuple[bytes, bool]:
        """Return what was kept, with a last line on what was not, and whether anything was not."""
        kept, dropped = bytes(self.kept), self.dropped
        self.kept.clear()
        self.dropped = 0
        if dropped:
            kept += f"\n[forkpoint: {dropped} more bytes left out]\n".encode()
        return kept, dropped > 0


class Shell:
    """One bash. `session` is what it was started from, `baseline` what its first dump says that is."""

    def __init__(self, name: str, session: ShellSession | None, pid: int, ends: Mapping[int, int]) -> None:
        self.name = name
        self.session = session
        self.pid = pid
        self.baseline: ShellSession | None = None
        self.jobs: Jobs = ()
        self.runs = 0
        self.dump = bytearray()
        self._ends = list(ends.values())
        # Readable when it has ended; by then its pid may be another's.
        self.death = os.pidfd_open(pid)
        self._ends.append(self.death)
        self.out, self.err = Output(ends[1]), Output(ends[2])
        self.command, self.go, self.dump_fd = (
            ends[place] for place in (sessions.COMMAND_FD, sessions.GO_FD, sessions.DUMP_FD)
        )
        # By name, as the kernel tells them: what else the idle shell has open, a command has opened.
        texts = (sessions.RESTORE_FD, sessions.LOOP_FD, sessions.COMMAND_FD)
        self.known_fds = {0: "/dev/null", **dict.fromkeys(texts, "/memfd:text (deleted)"), **self._pipe_names()}

    @classmethod
    def start(
        cls, anchor: Anchor, name: str, session: ShellSession | None, *, environment: dict[str, str], workdir: str
    ) -> "Shell":
        """Start a bash that is on its way to be session; None is a session that nothing has happened in.

        Raises:
            CannotStart: there is no bash that could be executed.
            AnchorLost: the anchor is gone.
        """
        ours, theirs = new_pipes()
        texts = {
            sessions.RESTORE_FD: sessions.restore_script(session, workdir),
            sessions.LOOP_FD: sessions.LOOP.encode(),
        }
        for place, text in {**texts, sessions.COMMAND_FD: b""}.items():
            theirs[place] = os.memfd_create("text", os.MFD_CLOEXEC)
            os.pwrite(theirs[place], text, 0)
        theirs[0] = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            pid = anchor.spawn(environment if session is None else {}, theirs)
            # The command's text is written anew for each call: we keep it open.
            ours[sessions.COMMAND_FD] = os.dup(theirs[sessions.COMMAND_FD])
            shell = cls(name, session, pid, ours)
        except (AnchorLostError, ProcessLookupError) as error:
            said = _said(ours[2])
            for fd in ours.values():
                os.close(fd)
            if isinstance(error, AnchorLostError):
                raise
            raise ShellStartError(f"{BASH} does not start in this sandbox: {said}") from error
        finally:
            for fd in theirs.values():
                os.close(fd)
        if session is not None:
            shell._restore_limits(session["limits"])
        return shell

    @classmethod
    def adopt(cls, told: Mapping[str, Any], ends: Mapping[int, int]) -> "Shell":
        """Take over a shell that was restored with its processes; told is what `remember` said of it."""
        # Its command is written anew for each: the same memory, opened again.
        command = os.open(f"/proc/{told['pid']}/fd/{sessions.COMMAND_FD}", os.O_RDWR | os.O_CLOEXEC)
        shell = cls(told["name"], told["session"], told["pid"], {**ends, sessions.COMMAND_FD: command})
        shell.baseline, shell.jobs, shell.runs = told["baseline"], tuple(told["jobs"]), told["runs"]
        return shell

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of this side of an idle shell, and which pipes lead to it."""
        facts = {name: getattr(self, name) for name in ("name", "session", "pid", "baseline", "jobs", "runs")}
        return {**facts, "pipes": {str(place): name for place, name in self._pipe_names().items()}}

    def _pipe_names(self) -> dict[int, str]:
        """Return, by their places in the shell, the kernel's names of the pipes that lead to it."""
        ours = {1: self.out.fd, 2: self.err.fd, sessions.GO_FD: self.go, sessions.DUMP_FD: self.dump_fd}
        return {place: os.readlink(f"/proc/self/fd/{fd}") for place, fd in ours.items()}  # noqa: PTH115

    def _restore_limits(self, limits: Mapping[str, list[int]]) -> None:
        for name, (soft, hard) in limits.items():
            # A limit of another kernel or an unprivileged start may not be settable here.
            with contextlib.suppress(OSError, ValueError):
                resource.prlimit(self.pid, getattr(resource, name), (soft, hard))

    def run(self, command: bytes) -> None:
        """Begin a command; the shell answers with a dump."""
        self.runs += 1
        go, text = self.orders(command)
        os.ftruncate(self.command, 0)
        written = 0
        while written < len(text):
            written += os.pwrite(self.command, text[written:], written)
        self.dump.clear()
        os.write(self.go, go)

    def orders(self, command: bytes) -> tuple[bytes, bytes]:
        """Return the line that lets the shell go, and what it evaluates then."""
        return sessions.orders(self.session, command)

    def read_dump(self) -> bool:
        """Take what has come of a dump; return whether it is whole."""
        while True:
            try:
                data = os.read(self.dump_fd, _CHUNK)
            except BlockingIOError:
                return False
            if not data:
                return False
            if len(self.dump) <= sessions.MAX_DUMP_BYTES:
                self.dump += data
            else:
                # Too long to keep: only its end still matters.
                self.dump[-len(sessions.END) :] = (self.dump[-len(sessions.END) :] + data)[-len(sessions.END) :]
            if self.dump.endswith(sessions.END):
                return True

    def finish_dump(self) -> tuple[int, ShellSession]:
        """Return exit status and session of the dump that came; what it says of jobs, keep in `jobs`.

        Raises:
            MalformedDump: a command has interfered with it.
        """
        status, session, self.jobs = sessions.parse_dump(bytes(self.dump))
        session["limits"] = self._changed_limits()
        return status, session

    def _changed_limits(self) -> dict[str, list[int]]:
        changed = {}
        for name, number in _LIMITS:
            with contextlib.suppress(OSError, ValueError):
                now = resource.prlimit(self.pid, number)
                if now != resource.getrlimit(number):
                    changed[name] = list(now)
        return changed

    @property
    def ended(self) -> bool:
        return bool(select.select([self.death], [], [], 0)[0])

    def holds_more(self) -> bool:
        """Whether the idle shell has other descriptors than when it was new; True where it does not let us look.

        Right after its dump it still has some, until it waits for its next command.
        """
        return not wait_until_asleep(self.pid, self.as_when_new)

    def as_when_new(self) -> bool:
        """Whether its descriptors are those that it has when it waits for its first command."""
        return open_descriptors(self.pid) == self.known_fds

    def close(self) -> None:
        """Close our ends; killing is the caller's."""
        for fd in self._ends:
            os.close(fd)
        self._ends.clear()


def new_pipes() -> tuple[dict[int, int], dict[int, int]]:
    """Return our ends and a shell's ends of its pipes, by their places in the shell."""
    ours, theirs = {}, {}
    for place in (1, 2, sessions.DUMP_FD):
        ours[place], theirs[place] = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours[place], False)
        # Whoever a command becomes may open /dev/stdout again.
        os.fchmod(theirs[place], 0o666)
    theirs[sessions.GO_FD], ours[sessions.GO_FD] = os.pipe2(os.O_CLOEXEC)
    return ours, theirs


def _said(fd: int) -> str:
    try:
        return os.read(fd, _CHUNK).decode(errors="replace").strip()
    except BlockingIOError:
        return "it gives no reason"
