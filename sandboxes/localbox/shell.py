"""A live bash of one session: started from a dump, given commands, asked for its next dump. Seen from pid 1."""

import contextlib
import fcntl
import os
import resource
import signal
import time
from collections.abc import Mapping

from sandboxes.localbox import session as sessions
from sandboxes.localbox.processes import descriptors
from sandboxes.localbox.session import Session

BASH = "/bin/bash"
_ARGUMENTS = ["bash", "--noprofile", "--norc", "-c", sessions.START, "bash"]
_LIMITS = tuple(
    (name, getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
)
_CHUNK = 1 << 16


class CannotStart(Exception):  # noqa: N818 - an answer about a sandbox whose bash is gone
    """This sandbox's /bin/bash does not start (any more)."""


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

    def __init__(self, name: str, session: Session | None, *, environment: Mapping[str, str], workdir: str) -> None:
        self.name = name
        self.session = session
        self.baseline: Session | None = None
        self.jobs: sessions.Jobs = ()
        self.runs = 0
        self.known_fds: dict[int, str] = {}
        self.dump = bytearray()
        self._ends: list[int] = []
        self._start(sessions.restore_script(session, workdir), environment if session is None else {})

    def _start(self, script: bytes, environment: Mapping[str, str]) -> None:
        out, out_end = self._pipe()
        err, err_end = self._pipe()
        self.dump_fd, dump_end = self._pipe()
        go_end, self.go = self._pipe()
        os.set_blocking(go_end, True)
        for fd in (out, err, self.dump_fd):
            os.set_blocking(fd, False)
        self.out, self.err = Output(out), Output(err)
        self.command = self._text(b"")
        restore, loop = self._text(script), self._text(sessions.LOOP.encode())
        null = self._keep(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        places = {0: null, 1: out_end, 2: err_end, sessions.RESTORE_FD: restore, sessions.LOOP_FD: loop}
        places |= {sessions.COMMAND_FD: self.command, sessions.GO_FD: go_end, sessions.DUMP_FD: dump_end}
        actions = [(os.POSIX_SPAWN_DUP2, fd, place) for place, fd in places.items()]
        try:
            self.pid = os.posix_spawn(
                BASH,
                _ARGUMENTS,
                environment,
                file_actions=actions,
                setsid=True,
                # Python ignores these two; a command must not inherit that.
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        except OSError as error:
            self.close()
            raise CannotStart(f"{BASH} does not start in this sandbox: {error.strerror}") from error
        # By name, as the kernel tells them: what else the idle shell has open, a command has opened.
        self.known_fds = {place: os.readlink(f"/proc/self/fd/{fd}") for place, fd in places.items()}  # noqa: PTH115
        for fd in (null, out_end, err_end, dump_end, go_end, restore, loop):
            self._ends.remove(fd)
            os.close(fd)
        if self.session is not None:
            self._restore_limits(self.session["limits"])

    def _pipe(self) -> tuple[int, int]:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        # Whoever a command becomes may open /dev/stdout again.
        os.fchmod(writing, 0o666)
        return self._keep(reading), self._keep(writing)

    def _text(self, text: bytes) -> int:
        fd = self._keep(os.memfd_create("text", os.MFD_CLOEXEC))
        os.pwrite(fd, text, 0)
        return fd

    def _keep(self, fd: int) -> int:
        self._ends.append(fd)
        return fd

    def _restore_limits(self, limits: Mapping[str, list[int]]) -> None:
        for name, (soft, hard) in limits.items():
            # A limit of another kernel or an unprivileged start may not be settable here.
            with contextlib.suppress(OSError, ValueError):
                resource.prlimit(self.pid, getattr(resource, name), (soft, hard))

    def run(self, command: bytes) -> None:
        """Begin a command; the shell answers with a dump."""
        self.runs += 1
        text = sessions.command_text(self.session, command)
        os.ftruncate(self.command, 0)
        written = 0
        while written < len(text):
            written += os.pwrite(self.command, text[written:], written)
        self.dump.clear()
        os.write(self.go, b"\n")

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

    def finish_dump(self) -> tuple[int, Session]:
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

    def holds_more(self) -> bool:
        """Whether the idle shell has other descriptors than when it was new; True where it does not let us look.

        Right after its dump it still has some, for less than a millisecond.
        """
        for pause in (0.0002, 0.0005, 0.001, 0.002, 0.004, 0.0):
            if descriptors(self.pid) == self.known_fds:
                return False
            time.sleep(pause)
        return True

    def close(self) -> None:
        """Close our ends; killing is the caller's."""
        for fd in self._ends:
            os.close(fd)
        self._ends.clear()


def reserve_descriptors() -> None:
    """Fill this process's low numbers, so that none of its own descriptors stands where a shell's has to go."""
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    while fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, 3) < sessions.DUMP_FD + 1:
        pass
