"""The anchor: the parent of every process that a local sandbox runs.

It starts the shells, tool servers and other processes, and it inherits their orphans.
"""

# Theory of operation.
#
# A checkpoint is a dump of one process tree, and the anchor is the root of that tree. It inherits every orphan
# (PR_SET_CHILD_SUBREAPER), so that nothing but pid 1 and pid 1's short-lived children for file operations is outside.
# It is confined as the agent's processes are, and they may kill it. Then another one is started. What the old one left
# behind has become pid 1's children and can no longer be checkpointed.
#
# There are three programs for it:
#
# 1. A bash from copies of the host's files, with the library `linux/preloaded.c`. It forks session shells instead of
#    executing them, and is otherwise as the second one (`shell_files/copies.py`).
# 2. `linux/anchor.c`, compiled when the package is built. Its file lies in the sandbox's /dev, which is no layer, so it
#    holds nothing of the layers and stays when they change. The kernel moves its root and working directory along
#    (pivot_root(2)). Nothing of the agent's may enter it, or an agent could keep a file of a layer open through it and
#    change that layer after it was sealed. So it is not dumpable, from before the agent's first process on. One that
#    was started beside such processes ends at the next change of layers.
# 3. The sandbox's bash, where there was no compiler. It has the program's file of a layer, so it ends when layers
#    change.
#
# Pid 1 writes requests to the anchor, and reads lines of numbers from it, over two pipes. To those of a bash the agent
# can write through /proc, and what it made the anchor do would cross over to later calls. So each line begins with a
# key that only the two know. At a line without the key that anchor ends. An agent that finds the key in the anchor's
# memory wakes it by its line, which shows after the call (`LocalShells.anchor_was_touched`). A number that came unasked
# ends each anchor.
#
# New processes need descriptors of pid 1, which bash cannot receive over a pipe. There are two ways:
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
import functools
import os
import re
import select
import signal
import struct
import termios
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.shell_kit import EXPORTS, ShellKit
from sandboxes.linux import processes, spawn
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import close_all, write_out
from sandboxes.linux.spawn import BASH
from sandboxes.shell_files import facts as shell_facts
from sandboxes.shell_text import quote

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
_KIT_PATHS = {0: "/dev/null"} | {
    number: f"/proc/self/fd/{place}" for number, place in sorted(_KIT.items()) if number != EXPORTS
}
"""What a shell on the kit opens, by its own descriptor numbers."""
_EXPORTABLE = re.compile(r"(?!(?:BASHOPTS|BASH_VERSINFO|EUID|PPID|SHELLOPTS|UID)$)[A-Za-z_][A-Za-z0-9_]*")
"""The names that bash can export: identifiers, but not those of its variables that are read-only."""
_START_ON_KIT = (
    f"( . /proc/self/fd/{_KIT[EXPORTS]}; exec 0</dev/null {_OPEN_KIT}; echo $BASHPID >&4; "
    f"{_bash(quote(session_texts.START))} 3<&- 4>&- {_CLOSE_KIT} ) &"
)
_BASH_LOOP = (
    f"LC_ALL=C; set -m; export -n PWD OLDPWD SHLVL; kit() {{ {_START_ON_KIT} }}; "
    'read -r -u 3 key; while read -r -u 3 proof line; do [[ $proof == "$key" ]] || exit; eval "$line"; jobs -n; done'
)
"""What bash runs as the anchor.

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


class Anchor(ABC):
    """Pid 1's end of the conversation with an anchor.

    Attributes:
        stays: Whether it may stay when the layers change.
        hidden: Whether the agent's processes cannot look into it.
        pid: The anchor's process.
        ends: Our descriptors of the two pipes, requests first.
        kit: What it can start a shell on; None if it has none.
    """

    stays = False
    hidden: ClassVar[bool]

    def __init__(self, pid: int, ends: tuple[int, int], kit: ShellKit | None = None) -> None:
        self.pid = pid
        self.ends = ends
        self.kit = kit
        self._buffer = b""

    @classmethod
    def _start(cls, program: str, arguments: Sequence[str], variables: Sequence[str] = ()) -> Self:
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        answers, answering = os.pipe2(os.O_CLOEXEC)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        kit = ShellKit()
        descriptors = {0: null, 1: null, 2: null, _REQUESTS: theirs, _REPLIES: answering}
        descriptors |= {place: kit.theirs[number] for number, place in _KIT.items()}
        try:
            # A session and a process group of its own: signals to the group of pid 1 do not reach it.
            pid = spawn.spawn_leader(program, arguments, descriptors, variables)
        except OSError:
            kit.close()
            close_all((ours, answers))
            raise
        finally:
            close_all((null, theirs, answering))
        return cls(pid, (ours, answers), kit)

    def start_on_kit(self, environment: Mapping[str, str]) -> int:
        """Start a session's shell on the kit, which was lent; return its pid, once it has opened its descriptors.

        Raises:
            AnchorLostError: The anchor is gone, or cannot start it.
        """
        self.request_shell(environment)
        return self.started()

    def request_shell(self, environment: Mapping[str, str]) -> None:
        """Ask for a session's shell on the kit, which was lent; `started` waits for it.

        Raises:
            AnchorLostError: The anchor is gone.
        """
        assert self.kit is not None
        self._send(self.request_on_kit(self.kit, environment))

    def started(self) -> int:
        """Return the pid of the bash that was asked for last, once it has opened its descriptors.

        Raises:
            AnchorLostError: The anchor is gone, or cannot start it.
        """
        pid = self._receive()
        if not pid:
            raise AnchorLostError("it cannot start bash")
        return pid

    def start_on(self, environment: Mapping[str, str], fds: Mapping[int, int], program: str | None = None) -> int:
        """Start a bash and return its pid, once it has opened its descriptors.

        Args:
            environment: Variables to export to it.
            fds: Our descriptors that it gets, by the numbers that it gets them under.
            program: The bash text that it runs; None for the loop of a session's shell.

        Raises:
            AnchorLostError: The anchor is gone, or cannot start it.
        """
        holder = _hold(fds)
        try:
            paths = {number: f"/proc/{holder}/fd/{fd}" for number, fd in sorted(fds.items())}
            self._send(self._request(environment, paths, session_texts.START if program is None else program))
            # The pid comes when all descriptors are open: then the holder can end.
            return self.started()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)

    def close_kit(self) -> None:
        """Close the kit, here and in the anchor. A shell that was started on it keeps its own descriptors.

        Raises:
            AnchorLostError: The anchor is gone.
        """
        if self.kit is not None:
            self.kit.close()
            self.kit = None
            self._ask(self._request_to_close())

    def wait(self, pid: int) -> int:
        """Return the exit status of a process that has ended, or is about to; 128 + its number for a signal.

        Raises:
            AnchorLostError: The anchor is gone.
        """
        return self._ask(self._request_for_status(pid))

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep: the pid, and the kernel's names of the pipes; a disk format."""
        return {"pid": self.pid, "pipes": [os.readlink(f"/proc/self/fd/{fd}") for fd in self.ends]}  # noqa: PTH115

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
        """Whether one of the pipes has something in it, which only a command can have written between calls."""
        return any(map(_unread_bytes, self.ends))

    # -- by program --------------------------------------------------------------------------------------------------

    @abstractmethod
    def request_on_kit(self, kit: ShellKit, environment: Mapping[str, str]) -> bytes:
        """Return the request for a shell on the kit, with these variables."""

    @abstractmethod
    def _request(self, environment: Mapping[str, str], paths: Mapping[int, str], program: str) -> bytes:
        """Return the request for a bash with these files as its descriptors, in ascending order."""

    @abstractmethod
    def _request_to_close(self) -> bytes: ...

    @abstractmethod
    def _request_for_status(self, pid: int) -> bytes: ...

    def _ask(self, request: bytes) -> int:
        self._send(request)
        return self._receive()

    def _send(self, request: bytes) -> None:
        try:
            if _unread_bytes(self.ends[1]):
                raise AnchorLostError("it answers unasked")
            write_out(self.ends[0], request)
        except OSError as error:
            raise AnchorLostError(str(error)) from error

    def _receive(self) -> int:
        deadline = time.monotonic() + PATIENCE_S
        try:
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
        # The agent may have written to the pipe of a bash through /proc. What is no number is not trusted.
        if (number := session_texts.number(answer.decode("latin-1"))) is None:
            raise AnchorLostError("it answers nonsense")
        return number


class BashAnchor(Anchor):
    """The sandbox's bash as the anchor.

    Attributes:
        key: What each line begins with; empty for an anchor of an earlier version, which knows none.
    """

    hidden = False
    key = ""

    @classmethod
    def start(cls) -> Self:
        """Start an anchor. 0.1 ms, and a millisecond of the anchor's own.

        Raises:
            OSError: No process can be started.
        """
        anchor = cls._start(BASH, ["anchor", "--noprofile", "--norc", "-c", _BASH_LOOP])
        anchor.key = os.urandom(8).hex()
        # If bash is gone, no process reads it, and the first request fails.
        with contextlib.suppress(BrokenPipeError):
            os.write(anchor.ends[0], anchor.key.encode() + b"\n")
        return anchor

    @classmethod
    def adopt(cls, remembered: Mapping[str, Any], ends: tuple[int, int]) -> Self:
        """Return our end of an anchor that was restored; see `adopted_anchor`."""
        anchor = cls(remembered["pid"], ends)
        anchor.key = remembered.get("key", "")
        return anchor

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep; a disk format. The key is in it."""
        return {**super().remember(), "key": self.key}

    def _line(self, text: str) -> bytes:
        return f"{self.key} {text}\n".lstrip(" ").encode("latin-1")

    def request_on_kit(self, kit: ShellKit, environment: Mapping[str, str]) -> bytes:
        """Return the request for a shell on the kit, whose text has the variables then."""
        kit.write_exports(_exports(environment).encode("latin-1"))
        return self._line("kit")

    def _request(self, environment: Mapping[str, str], paths: Mapping[int, str], program: str) -> bytes:
        redirections = " ".join(f"{number}{_sign(number)}{path}" for number, path in paths.items())
        return self._line(
            f"( {_exports(environment)}exec {redirections}; echo $BASHPID >&4; "
            f"exec 3<&- 4>&- {_CLOSE_KIT}; {_bash(_quoted_line(program))} ) &"
        )

    def _request_to_close(self) -> bytes:
        return self._line(f"exec {_CLOSE_KIT}; echo 0 >&4")

    def _request_for_status(self, pid: int) -> bytes:
        return self._line(f"wait {pid}; echo $? >&4")


class NativeAnchor(Anchor):
    """The program `linux/anchor.c` as the anchor.

    Attributes:
        digest: The digest of the program.
    """

    hidden = True
    digest = ""

    @classmethod
    def start(cls, program: str = spawn.ANCHOR) -> Self:
        """Start an anchor. 0.2 ms.

        Args:
            program: Its path in the sandbox.

        Raises:
            OSError: No process can be started.
        """
        # An anchor that is started beside the agent's processes could be entered before it hides.
        alone = not processes.list_processes()
        anchor = cls._start(program, ["anchor"])
        anchor.stays, anchor.digest = alone, spawn.anchor_digest()
        return anchor

    @classmethod
    def start_with_bash(cls, files: str = spawn.SHELL_FILES) -> Self | None:
        """Start a bash with `linux/preloaded.c` as the anchor. A millisecond of CPU, most of it the anchor's own.

        Args:
            files: The path in the sandbox of what `shell_files.copies` has made.

        Returns:
            None if shells cannot be forks: without such files, if the sandbox's bash is another one, and beside
            processes of the agent. What the loader of programs reads could change while it does.

        Raises:
            OSError: No process can be started.
        """
        if not os.access(f"{files}/bash", os.X_OK) or not _is_known_bash(files) or processes.list_processes():
            return None
        variables = [f"LD_LIBRARY_PATH={files}", f"LD_PRELOAD={files}/preloaded.so"]
        anchor = cls._start(f"{files}/bash", _shell_arguments(session_texts.START), variables)
        anchor.stays, anchor.digest = True, _contents(f"{files}/digest").decode()
        return anchor

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep; a disk format. The program's digest is in it."""
        return {**super().remember(), "program": self.digest}

    def request_on_kit(self, kit: ShellKit, environment: Mapping[str, str]) -> bytes:  # noqa: ARG002
        """Return the request for a shell on the kit. It is the same for each shell with these variables."""
        return self._request(environment, _KIT_PATHS, session_texts.START)

    def _request(self, environment: Mapping[str, str], paths: Mapping[int, str], program: str) -> bytes:
        return _packed_start(tuple(environment.items()), tuple(paths.items()), program)

    def _request_to_close(self) -> bytes:
        return _packed(["c"])

    def _request_for_status(self, pid: int) -> bytes:
        return _packed([f"w{pid}"])


def start_anchor(*, forks: bool = True) -> Anchor:
    """Start an anchor with the program that there is.

    Args:
        forks: Whether it may be one that forks shells.

    Raises:
        OSError: No process can be started.
    """
    if forks and (anchor := NativeAnchor.start_with_bash()) is not None:
        return anchor
    return NativeAnchor.start() if os.access(spawn.ANCHOR, os.X_OK) else BashAnchor.start()


def _is_known_bash(files: str) -> bool:
    """Return whether the sandbox's bash, and all that loading it involves, is what the files were copied from."""
    facts = _contents(f"{files}/facts")
    return bool(facts) and facts == shell_facts.as_now(facts)


def _contents(path: str) -> bytes:
    """Return what is in a file; nothing if it was removed."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()
    except FileNotFoundError:
        return b""


def adopted_anchor(remembered: Mapping[str, Any], ends: tuple[int, int]) -> Anchor:
    """Return our end of an anchor that was restored.

    Args:
        remembered: What `Anchor.remember` returned before the checkpoint.
        ends: Our descriptors of its new pipes.
    """
    if "program" not in remembered:
        return BashAnchor.adopt(remembered, ends)
    anchor = NativeAnchor(remembered["pid"], ends)
    anchor.digest = remembered["program"]
    return anchor


def _unread_bytes(pipe: int) -> int:
    size: int = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]
    return size


@functools.lru_cache(maxsize=4)
def _packed_start(environment: tuple[tuple[str, str], ...], paths: tuple[tuple[int, str], ...], program: str) -> bytes:
    """Return the request for a bash. It is kept, because each call starts a shell on the same kit."""
    files = [f"{_sign(number)}{number:02}{path}" for number, path in paths]
    arguments = [f"a{word}" for word in _shell_arguments(program)]
    # As if a bash had exported them: another one would take options and functions from the rest.
    variables = [f"e{name}={value}" for name, value in environment if _EXPORTABLE.fullmatch(name)]
    return _packed([*files, *arguments, *variables])


def _shell_arguments(program: str) -> list[str]:
    return ["bash", "--noprofile", "--norc", "-c", program, "bash"]


def _packed(texts: Sequence[str]) -> bytes:
    body = b"".join(os.fsencode(text) + b"\0" for text in texts)
    return struct.pack("=II", len(body), len(texts)) + body


def _exports(environment: Mapping[str, str]) -> str:
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
