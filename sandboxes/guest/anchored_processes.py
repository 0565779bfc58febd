"""The processes of a sandbox that its anchor starts and collects."""

import contextlib
import functools
import os
import select
import signal
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TypeVar

from sandboxes.guest.anchors.anchor import Anchor, ShellStartError
from sandboxes.guest.anchors.programs import start_anchor
from sandboxes.guest.anchors.shell_kit import narrow
from sandboxes.guest.anchors.starter import AnchorLostError
from sandboxes.guest.users import User, has_several
from sandboxes.linux import processes
from sandboxes.linux.descriptors import read_available
from sandboxes.linux.live_state import passed_on, settings
from sandboxes.linux.spawn import BASH

READY_S = 10.0
"""How long a shell may take to its first dump. It takes milliseconds on an idle machine. The value is an estimate."""
MAX_KILL_S = 10.0
"""Longest wait for a killed shell. One that does not end in that time is stuck in the kernel."""
_REPARENTED_S = 0.001
"""How often a look is taken whether an orphan has become a child of pid 1. It takes microseconds on an idle machine."""
StartedT = TypeVar("StartedT")


class ChildDeaths:
    """Wakes a `poll` for each child of this process that ends."""

    # CRIU can make pid 1 the parent of a daemon: it makes the leader of the daemon's session again, and the daemon is
    # an orphan when that leader ends. Programs look whether the daemon's pid is gone, so pid 1 must collect it
    # promptly.

    def __init__(self) -> None:
        """Begin to wake. A process can have one such object only."""
        self._reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        narrow([writing])
        # The signal has to have a handler, or the interpreter writes nothing to the pipe.
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def fileno(self) -> int:
        """Return the descriptor, for `select.poll`."""
        return self._reading

    def clear(self) -> None:
        """Forget what came, before the children are collected."""
        read_available(self._reading)


def known(status: int | None) -> int:
    """Return an exit code, or raise `ShellStartError` for one that is not known: the call has no result then."""
    if status is None:
        raise ShellStartError("the process that had collected an exit code was killed before it reported the code")
    return status


class AnchoredProcesses:
    """The processes of a sandbox as far as their anchor goes."""

    def __init__(self, user: User) -> None:
        self.user = user
        # The anchor; None until the first process is started, and after the agent has killed it.
        self.anchor: Anchor | None = None
        # Called when no process can be started. It returns whether it has ended some that were too many.
        self.make_room: Callable[[], bool] = lambda: False
        self._anchor_runs: dict[processes.Process, int] = {}
        self._ended: dict[int, int] = {}

    @property
    def anchor_pids(self) -> set[int]:
        """The anchor's process, if there is one."""
        return set() if self.anchor is None else {self.anchor.pid}

    @property
    def hidden_pids(self) -> set[int]:
        """Those of `anchor_pids` into which no process of the sandbox can look: their descriptors stay closed to it."""
        return self.anchor_pids if self.anchor is not None and self.anchor.hidden else set()

    def reap(self) -> None:
        """Collect processes that ended as children of pid 1, because their anchor was gone."""
        # The kernel gives orphans to pid 1, which has to wait for them (wait(2)). Their codes are kept for `status_of`.
        ended = processes.reap()
        self._ended |= ended
        if self.anchor is not None and self.anchor.pid in ended:
            # Now, because another process may get its pid.
            self._drop_anchor()

    def kill_except(self, spared: AbstractSet[processes.Process], first: int | None = None) -> None:
        """Kill all processes but the spared ones; see `processes.kill_except`."""
        self._ended |= processes.kill_except(spared, first=first)

    def status_of(self, pid: int) -> int | None:
        """Return how a process of the anchor ended; None if what had collected it was killed before it reported."""
        parents = {os.getpid()}
        if self.anchor is not None:
            try:
                if (status := self.anchor.wait(pid)) is not None:
                    return status
            except AnchorLostError:
                parents.add(self.anchor.pid)
                self._drop_anchor()
        # Without its parent it becomes a child of pid 1, as soon as the kernel has ended the anchor. If the anchor had
        # collected it, there is no such process any more.
        deadline = time.monotonic() + MAX_KILL_S
        self.reap()
        while pid not in self._ended and processes.parent(pid) in parents and time.monotonic() < deadline:
            time.sleep(_REPARENTED_S)
            self.reap()
        return self._ended.get(pid)

    def watch_anchor(self) -> None:
        """Note how often the anchor has run: it sleeps while a command runs, unless it collects an orphan."""
        if self.anchor is not None and not self.anchor.hidden:
            self._anchor_runs = self._runs_of_anchor()

    def anchor_was_touched(self) -> bool:
        """Return whether a command may have changed the anchor, from which all later shells are forked."""
        # A command can change its limits and scheduling. It can also write bash to the pipe of a bash, and trace that.
        # Called only while nothing survives, so pid 1 itself is as it was before the first call.
        if (anchor := self.anchor) is None:
            return False
        if anchor.hidden:
            changed = passed_on(anchor.pid) != self._own_settings
            return changed or anchor.has_unread or processes.is_stopped(anchor.pid)
        noted, self._anchor_runs = self._anchor_runs, {}
        ran = bool(noted) and self._runs_of_anchor() != noted
        return ran or anchor.has_unread or settings(anchor.pid) != settings(os.getpid())

    @functools.cached_property
    def _own_settings(self) -> list[str]:
        return passed_on(os.getpid())

    def _runs_of_anchor(self) -> dict[processes.Process, int]:
        return {} if self.anchor is None else processes.run_counts([(self.anchor.pid, 0)])

    @property
    def changes_users(self) -> bool:
        """Whether the anchor can start a process as another user; `ShellStartError` if no process can be started."""
        return self._ready_anchor().forks and has_several()

    def launch(
        self, environment: dict[str, str], fds: dict[int, int], program: str, user: User | None = None, folder: str = ""
    ) -> int:
        """Start a program under the anchor; see `Anchor.start_on`. If that fails, raise `ShellStartError`."""
        return self._under_the_anchor(lambda anchor: anchor.start_on(environment, fds, program, user, folder))

    def _under_the_anchor(self, start: Callable[[Anchor], StartedT]) -> StartedT:
        try:
            return self._start_under_the_anchor(start)
        except (ShellStartError, BlockingIOError) as error:
            # What the agent runs has taken the last place. Once it is gone, the call can be answered.
            if self.make_room():
                return self._start_under_the_anchor(start)
            if isinstance(error, BlockingIOError):
                raise ShellStartError(f"no process can be started in this sandbox: {error.strerror}") from error
            raise

    def _start_under_the_anchor(self, start: Callable[[Anchor], StartedT]) -> StartedT:
        # The agent may have killed the anchor at any time, even just now. Another loss has another cause.
        for _ in range(2):
            with contextlib.suppress(AnchorLostError):
                return start(self._ready_anchor())
            self._drop_anchor()
        try:
            anchor = self._ready_anchor()
            return start(anchor)
        except AnchorLostError as error:
            if anchor.forks or _runs():
                raise ShellStartError(f"bash does not start in this sandbox: {error}") from error
            # A recorded answer: how the attempts failed depends on moments, and must not be part of its text.
            raise ShellStartError(f"{BASH} does not start in this sandbox", broken=True) from error

    def _ready_anchor(self) -> Anchor:
        if self.anchor is None:
            try:
                self.anchor = start_anchor(self.user)
            except OSError as error:
                raise ShellStartError(f"no process can be started in this sandbox: {error.strerror}") from error
        return self.anchor

    def _drop_anchor(self) -> None:
        if self.anchor is not None:
            self.anchor.close()
            self.anchor = None


def _runs() -> bool:
    """Return whether the sandbox's bash can be executed. Called only after a failure."""
    try:
        pid = os.fork()
    except BlockingIOError:
        # No answer: there are too many processes.
        return True
    if pid == 0:
        try:
            os.execve(BASH, ["bash", "--noprofile", "--norc", "-c", "exit 42"], {})  # noqa: S606
        finally:
            os._exit(127)
    death = os.pidfd_open(pid)
    # A program that takes longer may be one that works on a busy machine.
    if not select.select([death], [], [], READY_S)[0]:
        os.kill(pid, signal.SIGKILL)
    os.close(death)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in {42, -signal.SIGKILL}
