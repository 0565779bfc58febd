"""The process under which all that a sandbox runs lives: one tree, whose root a checkpoint can name.

It starts the shells and inherits every orphan (PR_SET_CHILD_SUBREAPER), so nothing but pid 1 and what pid 1 forks for
file operations is outside its tree. It is a bash of the sandbox, for a checkpoint holds only programs that the
sandbox's own files contain. Like the agent's processes it is confined, and they may kill it: then another one is
started, and what the old one left behind can no longer be checkpointed.
pid 1 writes it lines of bash and reads lines of numbers, over pipes; shells get their descriptors through /proc, from a
process that holds them for as long as that takes.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from sandboxes.guest import bash_session as sessions
from sandboxes.linux import syscalls as kernel
from sandboxes.shell_quote import quote

BASH = "/bin/bash"
PATIENCE_S = 10.0
_REQUESTS, _REPLIES = 3, 4
_LOOP = 'set -m; export -n PWD OLDPWD SHLVL; while read -r -u 3 line; do eval "$line"; jobs -n; done'
"""`set -m`: each shell gets a process group of its own, so that `kill 0` in one reaches nobody else."""


class AnchorLostError(Exception):
    """The anchor is gone, or gives no answer: the agent killed or stopped it."""


class ShellStartError(Exception):
    """This sandbox's shell does not start (any more)."""


class Anchor:
    """pid 1's end. `ends`: our descriptors of the two pipes, requests first."""

    def __init__(self, pid: int, ends: tuple[int, int]) -> None:
        self.pid = pid
        self.ends = ends
        self._buffer = b""

    @classmethod
    def start(cls) -> "Anchor":
        """Fork it. A millisecond."""
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        answers, answering = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            _become_bash(theirs, answering)
        os.close(theirs)
        os.close(answering)
        return cls(pid, (ours, answers))

    def spawn(self, environment: Mapping[str, str], fds: Mapping[int, int], program: str | None = None) -> int:
        """Start a bash that has our descriptors fds at the places that they are listed under; return its pid.

        program: what it runs, as bash; the shell of a session where there is none.

        Raises:
            AnchorLost: the anchor is gone.
        """
        holder = _hold(fds)
        try:
            exports = "".join(f"export {name}={_word(value)}; " for name, value in environment.items())
            ways = {place: ">" if place in {1, 2, sessions.DUMP_FD} else "<" for place in fds}
            placed = " ".join(f"{place}{ways[place]}/proc/{holder}/fd/{fd}" for place, fd in fds.items())
            text = quote(sessions.START) if program is None else _word(program)
            bash = f"exec -a bash {BASH} --noprofile --norc -c {text} bash"
            # It says its pid when it has opened all: then the holder may go.
            return int(self._ask(f"( {exports}exec {placed}; echo $BASHPID >&4; exec 3<&- 4>&-; {bash} ) &"))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)

    def wait(self, pid: int) -> int:
        """Return the exit status of a shell that ended, or is about to, as a shell tells it (128 + signal).

        Raises:
            AnchorLost: the anchor is gone.
        """
        return int(self._ask(f"wait {pid}; echo $? >&4"))

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of this end: its pid, and the kernel's names of the pipes to it."""
        return {"pid": self.pid, "pipes": [os.readlink(f"/proc/self/fd/{fd}") for fd in self.ends]}  # noqa: PTH115

    def close(self) -> None:
        """End it. Its children become pid 1's."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        for fd in self.ends:
            os.close(fd)

    def _ask(self, line: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        try:
            view = memoryview(line.encode("latin-1") + b"\n")
            while view:
                view = view[os.write(self.ends[0], view) :]
            poll = select.poll()
            poll.register(self.ends[1], select.POLLIN)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not poll.poll(left * 1000):
                    raise AnchorLostError("it gives no answer")
                data = os.read(self.ends[1], 1 << 12)
                if not data:
                    raise AnchorLostError("it ended")
                self._buffer += data
        except OSError as error:
            raise AnchorLostError(str(error)) from error
        told, _, self._buffer = self._buffer.partition(b"\n")
        if not told.isdigit():
            raise AnchorLostError("it answers nonsense")
        return told.decode()


def _word(text: str) -> str:
    """Quote text as one word, on one line."""
    return quote(text.encode(errors="surrogateescape").decode("latin-1")).replace("\n", "'$'\\n''")


def _become_bash(requests: int, replies: int) -> NoReturn:
    """In a fork of pid 1: be the anchor."""
    try:
        os.setsid()
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        null = os.open("/dev/null", os.O_RDWR)
        kernel.arrange_descriptors({0: null, 1: null, 2: null, _REQUESTS: requests, _REPLIES: replies})
        kernel.reset_signals()
        os.execve(BASH, ["anchor", "--noprofile", "--norc", "-c", _LOOP], {})  # noqa: S606
    finally:
        os._exit(127)


def _hold(fds: Mapping[int, int]) -> int:
    """Fork a process that has fds open, and nothing else, and lets others look; return its pid when it is ready."""
    ready, say = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            kept = sorted({*fds.values(), say})
            os.closerange(0, kept[0])
            for fd, following in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
                os.closerange(fd + 1, following)
            # pid 1 is not dumpable, and a fork inherits that; this one has nothing that the agent's must not see.
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            os.close(say)
            signal.pause()
        finally:
            os._exit(0)
    os.close(say)
    os.read(ready, 1)
    os.close(ready)
    return pid
