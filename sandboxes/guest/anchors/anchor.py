"""The anchor: the parent of every process that a local sandbox runs, which inherits their orphans."""

# Theory of operation.
#
# A checkpoint is a dump of one process tree, and the anchor is the root of that tree. It inherits every orphan
# (PR_SET_CHILD_SUBREAPER), so that nothing but pid 1 and pid 1's short-lived children for file operations is outside.
# It is confined as the agent's processes are, and they may kill it. Then another one is started. What the old one left
# behind has become pid 1's children and can no longer be checkpointed.
#
# There are two programs for it:
#
# 1. A bash from copies of this machine's files, with the library `linux/anchor.c`. It forks shells. Its files lie in
#    the sandbox's /dev, which is no layer, so it holds nothing of the layers and stays when they change. The kernel
#    moves its root and working directory along (pivot_root(2)). Nothing of the agent's may enter it, or an agent could
#    keep a file of a layer open through it and change that layer after it was sealed. So it is not dumpable, from
#    before the agent's first process on. One that was started beside such processes ends at the next change of layers.
# 2. The sandbox's own bash, where there was no compiler. It executes shells. It has the program's file of a layer, so
#    it ends when layers change.
#
# Pid 1 writes requests to the anchor, and reads lines of numbers from it, over two pipes. The agent can write to the
# pipes of a bash through /proc, and what it made the anchor do would cross over to later calls. So each line begins
# with a key that only the two know. At a line without the key that anchor ends. An agent that finds the key in the
# anchor's memory wakes it by its line, which shows after the call (`Shells.anchor_was_touched`). A number that
# came unasked ends each anchor.
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
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from sandboxes.guest.anchors.shell_kit import PAGE, PLACES, ShellKit, narrow
from sandboxes.guest.anchors.starter import AnchorLostError, Starter
from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.users import ROOT, User
from sandboxes.linux import confine, spawn
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import close_all

_REQUESTS, _REPLIES = 3, 4
"""The anchor's descriptors of the two pipes."""
_UNKNOWN = 256
"""What `linux/anchor.c` tells in place of an exit status that it does not know."""


class ShellStartError(Exception):
    """The sandbox's shell does not start, or no process can be started at all."""

    def __init__(self, text: str, *, broken: bool = False) -> None:
        super().__init__(text)
        # Whether a command has broken the sandbox's shell, so that every attempt fails alike. Otherwise the failure is
        # ours or the machine's: it is no answer of the sandbox.
        self.broken = broken


class Anchor(Starter, ABC):
    """Pid 1's end of the conversation with an anchor. If the anchor is gone, requests raise `AnchorLostError`."""

    stays = False  # Whether it may stay when the layers change.
    forks = False  # Whether its shells are forks.
    hidden: ClassVar[bool]  # Whether the agent's processes cannot look into it.
    user = ROOT  # The user of the processes that it starts.

    def __init__(self, pid: int, ends: tuple[int, int], kit: ShellKit | None = None) -> None:
        super().__init__(ends)
        self.pid = pid
        self.kit = kit  # What it can start a shell on; None if it has none.

    @classmethod
    def _start(cls, program: str, arguments: Sequence[str], variables: Sequence[str] = ()) -> Self:
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        answers, answering = os.pipe2(os.O_CLOEXEC)
        narrow([ours], 2 * PAGE)
        narrow([answers])
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        kit = ShellKit()
        descriptors = {0: null, 1: null, 2: null, _REQUESTS: theirs, _REPLIES: answering}
        descriptors |= {place: kit.theirs[number] for number, place in PLACES.items()}
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

    def request_shell(self, environment: Mapping[str, str], *, template: bool = False) -> None:
        """Ask for a session's shell on the kit, which was lent; only an anchor that forks can make it a template."""
        assert self.kit is not None
        self.send(self._request_on_kit(self.kit, environment, template=template))

    def started(self) -> int:
        """Return the pid of the bash that was asked for last, once it has opened its descriptors."""
        pid = self.receive()
        if not pid:
            raise AnchorLostError("it cannot start bash")
        return pid

    def start_on(
        self, environment: Mapping[str, str], fds: Mapping[int, int], program: str | None = None,
        user: User | None = None, folder: str = "",
    ) -> int:  # fmt: skip
        """Start a bash and return its pid, once it has opened its descriptors; without a program, a session's shell."""
        # It gets our descriptors by its own numbers. It begins in the folder, or in / where it cannot; only an anchor
        # that forks goes there.
        holder = _hold(fds)
        try:
            paths = {number: f"/proc/{holder}/fd/{fd}" for number, fd in sorted(fds.items())}
            text = session_texts.START if program is None else program
            self.send(self._request(environment, paths, text, user, folder))
            # The pid comes when all descriptors are open: then the holder can end.
            return self.started()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)

    def close_kit(self) -> None:
        """Close the kit, here and in the anchor. A shell that was started on it keeps its own descriptors."""
        if self.kit is not None:
            self.kit.close()
            self.kit = None
            self.ask(self._request_to_close())

    def wait(self, pid: int) -> int | None:
        """Return the exit status of a process that has ended (128 + a signal); None if an earlier anchor started it."""
        status = self.ask(self._request_for_status(pid))
        return None if status == _UNKNOWN else status

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

    # -- by program --------------------------------------------------------------------------------------------------

    @abstractmethod
    def _request_on_kit(self, kit: ShellKit, environment: Mapping[str, str], *, template: bool) -> bytes:
        """Return the request for a shell on the kit, with these variables; see `request_shell`."""

    @abstractmethod
    def _request(
        self, environment: Mapping[str, str], paths: Mapping[int, str], program: str, user: User | None, folder: str
    ) -> bytes:
        """Return the request for a bash with these files as its descriptors, in ascending order."""

    @abstractmethod
    def _request_to_close(self) -> bytes: ...

    @abstractmethod
    def _request_for_status(self, pid: int) -> bytes: ...


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
            confine.stop_looking()
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            os.close(say)
            signal.pause()
        finally:
            os._exit(0)
    os.close(say)
    os.read(ready, 1)
    os.close(ready)
    return pid
