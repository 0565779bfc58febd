"""The anchor: the parent of every process that a local sandbox runs.

It starts the shells, tool servers and other processes, and it inherits their orphans.
"""

# Theory of operation.
#
# A checkpoint is a dump of one process tree, and the anchor is the root of that tree. It inherits every orphan
# (PR_SET_CHILD_SUBREAPER), so that nothing but pid 1 and pid 1's short-lived children for file operations is outside.
#
# The anchor is a bash of the sandbox and no program of ours, because a checkpoint holds only programs that the
# sandbox's own files contain. It is confined as the agent's processes are, and they may kill it. Then another one is
# started. What the old one left behind has become pid 1's children and can no longer be checkpointed.
#
# Pid 1 writes lines of bash to the anchor, and reads lines of numbers from it, over two pipes. Each line begins with a
# key that only the two know: the agent can write to the pipes through /proc, and what it made the anchor do would cross
# over to later calls. At a line without the key the anchor ends, and a number that came unasked ends it too. An agent
# that finds the key in the anchor's memory wakes it by its line, which shows after the call
# (`LocalShells.anchor_was_touched`). New processes need
# descriptors of pid 1, which bash cannot receive over a pipe. There are two ways:
#
# 1. A session's shell is started on the kit (`shell_kit`), whose descriptors the anchor has from birth. The shell opens
#    them again through /proc, so it shares no flags, offsets or locks with the anchor. One shell at a time has the kit.
# 2. For every other process, a third process, the holder, has the descriptors open and nothing else, and the new
#    process opens them through /proc/HOLDER/fd. Pid 1 itself cannot be the holder: the agent must not be able to look
#    into it. The holder is a fork of pid 1, which takes some milliseconds.
#
# A checkpoint holds no kit, so the anchor closes it before: pid 1's ends would be lost.

import contextlib
import fcntl
import os
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping
from typing import Any

from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.shell_kit import EXPORTS, ShellKit
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import close_all
from sandboxes.linux.spawn import spawn_leader
from sandboxes.shell_text import quote

BASH = "/bin/bash"
PATIENCE_S = 10.0
"""How long the anchor may take to answer. It takes a millisecond; an agent that stops it makes this time pass."""
_REQUESTS, _REPLIES = 3, 4
"""The anchor's descriptors of the two pipes."""
_KIT = {
    number: 40 + index
    for index, number in enumerate(
        (1, 2, session_texts.DUMP_FD, session_texts.GO_FD, session_texts.RESTORE_FD, session_texts.LOOP_FD,
         session_texts.COMMAND_FD, EXPORTS)
    )
}  # fmt: skip
"""The anchor's descriptors of the kit, by the shell's own descriptor numbers."""


def _sign(number: int) -> str:
    """Return how bash opens a descriptor of a shell: a pipe that is opened through /proc needs the right direction."""
    return ">" if number in {1, 2, session_texts.DUMP_FD} else "<"


def _bash(program: str) -> str:
    return f"exec -a bash {BASH} --noprofile --norc -c {program} bash"


_CLOSE_KIT = " ".join(f"{place}<&-" for place in _KIT.values())
_OPEN_KIT = " ".join(
    f"{number}{_sign(number)}/proc/self/fd/{place}" for number, place in _KIT.items() if number != EXPORTS
)
_START_ON_KIT = (
    f"( . /proc/self/fd/{_KIT[EXPORTS]}; exec 0</dev/null {_OPEN_KIT}; echo $BASHPID >&4; "
    f"{_bash(quote(session_texts.START))} 3<&- 4>&- {_CLOSE_KIT} ) &"
)
_LOOP = (
    f"LC_ALL=C; set -m; export -n PWD OLDPWD SHLVL; kit() {{ {_START_ON_KIT} }}; "
    'read -r -u 3 key; while read -r -u 3 proof line; do [[ $proof == "$key" ]] || exit; eval "$line"; jobs -n; done'
)
"""What the anchor runs.

`set -m` gives each shell a process group of its own, so that `kill 0` in one reaches no other. `jobs -n` forgets jobs
that have ended. The exported variables are removed from the environment of all processes to come. The function `kit`
starts a shell on the kit. Bash reads a pipe byte by byte, so the line that calls it is short, and the variables that
the shell is born with are in a text. `LC_ALL`, which is not exported, keeps bash from loading the locale of each
variable that it exports to a new process: that process loads its locale itself.
"""


class AnchorLostError(Exception):
    """The anchor is gone or gives no answer, because the agent has killed or stopped it."""


class ShellStartError(Exception):
    """The sandbox's shell does not start, or no process can be started at all.

    Attributes:
        broken: Whether a command has broken the sandbox's shell, so that every attempt fails alike. Otherwise the
            failure is ours or the machine's: it is no answer of the sandbox.
    """

    def __init__(self, text: str, *, broken: bool = False) -> None:
        super().__init__(text)
        self.broken = broken


class Anchor:
    """Pid 1's end of the conversation with an anchor.

    Attributes:
        pid: The anchor's process.
        ends: Our descriptors of the two pipes, requests first.
        kit: What it can start a shell on; None if it has none.
    """

    def __init__(self, pid: int, ends: tuple[int, int], key: str, kit: ShellKit | None = None) -> None:
        self.pid = pid
        self.ends = ends
        self.kit = kit
        self._key, self._buffer = key, b""

    @classmethod
    def start(cls) -> "Anchor":
        """Start an anchor. 0.1 ms, and a millisecond of the anchor's own.

        Raises:
            OSError: No process can be started.
        """
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        answers, answering = os.pipe2(os.O_CLOEXEC)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        kit = ShellKit()
        descriptors = {0: null, 1: null, 2: null, _REQUESTS: theirs, _REPLIES: answering}
        descriptors |= {place: kit.theirs[number] for number, place in _KIT.items()}
        try:
            # A session and a process group of its own: signals to the group of pid 1 do not reach it.
            pid = spawn_leader(BASH, ["anchor", "--noprofile", "--norc", "-c", _LOOP], descriptors)
        except OSError:
            kit.close()
            close_all((ours, answers))
            raise
        finally:
            close_all((null, theirs, answering))
        key = os.urandom(8).hex()
        # Where bash is gone, nobody reads it, and the first request fails.
        with contextlib.suppress(BrokenPipeError):
            os.write(ours, key.encode() + b"\n")
        return cls(pid, (ours, answers), key, kit)

    def spawn_on_kit(self) -> int:
        """Start a session's shell on the kit, which was lent; return its pid, once it has opened its descriptors.

        Raises:
            AnchorLostError: The anchor is gone.
        """
        return int(self._ask("kit"))

    def close_kit(self) -> None:
        """Close the kit, here and in the anchor. A shell that was started on it keeps its own descriptors.

        Raises:
            AnchorLostError: The anchor is gone.
        """
        if self.kit is not None:
            self.kit.close()
            self.kit = None
            self._ask(f"exec {_CLOSE_KIT}; echo 0 >&4")

    def spawn(self, environment: Mapping[str, str], fds: Mapping[int, int], program: str | None = None) -> int:
        """Start a bash and return its pid, once it has opened its descriptors.

        Args:
            environment: Variables to export to it.
            fds: Our descriptors that it gets, by the numbers that it gets them under.
            program: The bash text that it runs; None for the loop of a session's shell.

        Raises:
            AnchorLostError: The anchor is gone.
        """
        holder = _hold(fds)
        try:
            redirections = " ".join(f"{number}{_sign(number)}/proc/{holder}/fd/{fd}" for number, fd in fds.items())
            bash = _bash(_quoted_line(session_texts.START if program is None else program))
            # The pid comes when all descriptors are open: then the holder can end.
            return int(
                self._ask(
                    f"( {exports(environment)}exec {redirections}; echo $BASHPID >&4; "
                    f"exec 3<&- 4>&- {_CLOSE_KIT}; {bash} ) &"
                )
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)

    def wait(self, pid: int) -> int:
        """Return the exit status of a process that has ended, or is about to; 128 + its number for a signal.

        Raises:
            AnchorLostError: The anchor is gone.
        """
        return int(self._ask(f"wait {pid}; echo $? >&4"))

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep: the pid, and the kernel's names of the pipes; a disk format."""
        return {"pid": self.pid, "key": self._key, "pipes": [os.readlink(f"/proc/self/fd/{fd}") for fd in self.ends]}  # noqa: PTH115

    def close(self) -> None:
        """Kill the anchor. Its children become pid 1's."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        close_all(self.ends)
        if self.kit is not None:
            self.kit.close()

    @property
    def has_unread(self) -> bool:
        """Whether one of the pipes has something in it, which nobody but a command can have written between calls."""
        return any(map(_unread_bytes, self.ends))

    def _ask(self, line: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        try:
            if _unread_bytes(self.ends[1]):
                raise AnchorLostError("it answers unasked")
            # An anchor of an earlier version, which comes back with its checkpoint, knows no key.
            view = memoryview(f"{self._key} {line}\n".lstrip(" ").encode("latin-1"))
            while view:
                view = view[os.write(self.ends[0], view) :]
            poll = select.poll()
            poll.register(self.ends[1], select.POLLIN)
            while b"\n" not in self._buffer:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
                    raise AnchorLostError("it gives no answer")
                data = os.read(self.ends[1], 1 << 12)
                if not data:
                    raise AnchorLostError("it ended")
                self._buffer += data
        except OSError as error:
            raise AnchorLostError(str(error)) from error
        answer, _, self._buffer = self._buffer.partition(b"\n")
        # The agent may have written to the anchor's pipe through /proc. What is no number is not trusted.
        if not answer.isdigit():
            raise AnchorLostError("it answers nonsense")
        return answer.decode()


def _unread_bytes(pipe: int) -> int:
    size: int = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]
    return size


def exports(environment: Mapping[str, str]) -> str:
    """Return a line of bash that exports variables."""
    return "".join(f"export {name}={_quoted_line(value)}; " for name, value in environment.items())


def _quoted_line(text: str) -> str:
    """Return a text quoted for bash on one line, because the anchor reads line by line."""
    return quote(text.encode(errors="surrogateescape").decode("latin-1")).replace("\n", "'$'\\n''")


def _hold(fds: Mapping[int, int]) -> int:
    """Fork a process that has fds open and nothing else; return its pid when it is ready."""
    ready, say = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            kept = sorted({*fds.values(), say})
            os.closerange(0, kept[0])
            for fd, following in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
                os.closerange(fd + 1, following)
            # Pid 1 is not dumpable, which closes its /proc to the agent, and a fork inherits that. The holder has
            # nothing that the agent must not see.
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            os.close(say)
            signal.pause()
        finally:
            os._exit(0)
    os.close(say)
    os.read(ready, 1)
    os.close(ready)
    return pid
