"""The shells of a local sandbox: children of the anchor, started and collected by it."""

import contextlib
import functools
import os
import resource
import select
import signal
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sandboxes.guest.anchor import BASH, Anchor, AnchorLostError, ShellStartError
from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.bash.restore import orders, restore_script
from sandboxes.guest.process_io import death_of
from sandboxes.guest.shell import Shell
from sandboxes.guest.shell_pool import KILLED, READY_S, Shells
from sandboxes.linux import processes
from sandboxes.linux.processes import open_descriptors
from sandboxes.shell_text import Jobs, ShellSession

_LIMITS = tuple(
    (name, getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
)
"""All resource limits of this kernel. RLIMIT_OFILE is another name of RLIMIT_NOFILE."""
_CHUNK = 1 << 16
"""How much is read at once: the size of a pipe."""
StartedT = TypeVar("StartedT")


class LocalShell(Shell):
    """A bash that is a child of the anchor."""

    def __init__(self, name: str, session: ShellSession | None, pid: int, ends: Mapping[int, int]) -> None:
        """Take over a bash that runs; see `Shell`."""
        super().__init__(name, session, pid, death_of(pid), ends)
        # Kept together, so that `close` cannot forget one.
        self._ends = [*ends.values(), self.death]
        # The kernel's names of what an idle shell has open. Whatever else it has open, a command has opened.
        texts = (session_texts.RESTORE_FD, session_texts.LOOP_FD, session_texts.COMMAND_FD)
        self._known = {0: "/dev/null", **dict.fromkeys(texts, "/memfd:text (deleted)"), **self._pipe_names()}

    @classmethod
    def start(
        cls, anchor: Anchor, name: str, session: ShellSession | None, script: bytes, environment: dict[str, str]
    ) -> "LocalShell":
        """Start a bash that becomes a session. It is ready when its first dump has come.

        Args:
            anchor: Starts it.
            name: The session's name.
            session: The session; None for a new one.
            script: What it sources to become that session.
            environment: Its variables, before it has sourced the script.

        Raises:
            AnchorLostError: The anchor is gone.
        """
        # Anonymous pipes have no name in the file system. The agent can still reach them through /proc, so the form of
        # a dump is checked (`parse_dump`).
        ours, theirs = new_pipes()
        texts = {
            session_texts.RESTORE_FD: script,
            session_texts.LOOP_FD: session_texts.LOOP.encode(),
        }
        for number, text in {**texts, session_texts.COMMAND_FD: b""}.items():
            # Text in anonymous memory is no file of the sandbox, so no delta and no snapshot shows it.
            theirs[number] = os.memfd_create("text", os.MFD_CLOEXEC)
            os.pwrite(theirs[number], text, 0)
        # Commands inherit this stdin. One that reads it meets its end at once, and does not wait for input that never
        # comes.
        theirs[0] = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            pid = anchor.spawn(environment, theirs)
            # Each call rewrites the command's text, so it stays open here.
            ours[session_texts.COMMAND_FD] = os.dup(theirs[session_texts.COMMAND_FD])
            shell = cls(name, session, pid, ours)
        except AnchorLostError:
            for fd in ours.values():
                os.close(fd)
            raise
        finally:
            for fd in theirs.values():
                os.close(fd)
        if session is not None:
            shell._restore_limits(session["limits"])
        return shell

    @classmethod
    def adopt(cls, remembered: Mapping[str, Any], ends: Mapping[int, int]) -> "LocalShell":
        """Take over a shell that was restored.

        Args:
            remembered: What `remember` returned before the checkpoint.
            ends: Our ends of its new pipes, by its own descriptor numbers.
        """
        # The command's text is anonymous memory of the shell. Opened through /proc it is the same memory.
        command = os.open(f"/proc/{remembered['pid']}/fd/{session_texts.COMMAND_FD}", os.O_RDWR | os.O_CLOEXEC)
        ours = {**ends, session_texts.COMMAND_FD: command}
        shell = cls(remembered["name"], remembered["session"], remembered["pid"], ours)
        shell.baseline, shell.jobs = remembered["baseline"], tuple(remembered["jobs"])
        shell.runs, shell.knowledge = remembered["runs"], bytes.fromhex(remembered.get("knowledge", ""))
        shell.born = remembered.get("born", [])
        return shell

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of an idle shell, with the names of the pipes that lead to it."""
        facts = {name: getattr(self, name) for name in ("name", "session", "pid", "baseline", "jobs", "runs")}
        facts |= {"knowledge": self.knowledge.hex(), "born": self.born}
        return {**facts, "pipes": {str(number): name for number, name in self._pipe_names().items()}}

    def _pipe_names(self) -> dict[int, str]:
        """Return the kernel's names of the pipes that lead to the shell, by its own descriptor numbers."""
        ours = {1: self.out.fd, 2: self.err.fd, session_texts.GO_FD: self._go, session_texts.DUMP_FD: self.dump_fd}
        # Both ends of a pipe have the same name `pipe:[inode]` (proc_pid_fd(5)), so our end tells what the shell has
        # open.
        return {number: os.readlink(f"/proc/self/fd/{fd}") for number, fd in ours.items()}  # noqa: PTH115

    def _restore_limits(self, limits: Mapping[str, list[int]]) -> None:
        for name, (soft, hard) in limits.items():
            # The session may be of another kernel, or of a privileged start, whose limits cannot be set here.
            with contextlib.suppress(OSError, ValueError):
                resource.prlimit(self.pid, getattr(resource, name), (soft, hard))

    def _orders(self, command: bytes) -> tuple[bytes, bytes]:
        return orders(self.session, command)

    def _parse_dump(self, dump: bytes) -> tuple[int, ShellSession, Jobs]:
        status, session, jobs = session_texts.parse_dump(dump)
        # The kernel tells limits more reliably than `ulimit -a`, whose words differ between bash versions.
        session["limits"] = self._changed_limits()
        return status, session, jobs

    def _changed_limits(self) -> dict[str, list[int]]:
        changed = {}
        for name, number in _LIMITS:
            with contextlib.suppress(OSError, ValueError):
                # Compared with this process's own limits, with which the shell was born.
                now = resource.prlimit(self.pid, number)
                if now != _own_limit(number):
                    changed[name] = list(now)
        return changed

    def stands_at(self, folder: str) -> bool:
        """Return whether a name leads to the directory that the idle shell is in."""
        try:
            return os.path.samestat(os.stat(f"/proc/{self.pid}/cwd"), os.stat(folder.encode("latin-1")))  # noqa: PTH116
        except OSError:
            return False

    def is_as_new(self) -> bool:
        """Return whether its open descriptors are those of a shell that waits for its first command."""
        return open_descriptors(self.pid) == self._known

    def close(self) -> None:
        """Close our ends of its pipes. The shell itself is not killed."""
        for fd in self._ends:
            os.close(fd)
        self._ends.clear()


class LocalShells(Shells):
    """All shells of a local sandbox, and the anchor that starts them.

    Attributes:
        anchor: The anchor; None until the first shell is started, and after the agent has killed it.
    """

    def __init__(
        self,
        environment: dict[str, str],
        workdir: str,
        sessions: dict[str, ShellSession],
        pristine: ShellSession | None,
    ) -> None:
        super().__init__(environment, workdir, sessions, pristine)
        self.anchor: Anchor | None = None
        self._ended: dict[int, int] = {}

    @property
    def program(self) -> str:
        """The path of the shell's program."""
        return BASH

    @property
    def anchor_pids(self) -> set[int]:
        """The anchor's process, if there is one."""
        return set() if self.anchor is None else {self.anchor.pid}

    def reap(self) -> None:
        """Collect processes that ended as children of pid 1, because their anchor was gone."""
        # The kernel gives orphans to pid 1, which has to wait for them (wait(2)). Their codes are kept for `status_of`.
        self._ended |= processes.reap()

    def kill_except(self, spared: set[processes.Process], first: int | None = None) -> None:
        """Kill all processes but the spared ones; see `processes.kill_except`."""
        self._ended |= processes.kill_except(spared, first=first)

    def status(self, shell: Shell) -> int:
        """Return how a shell ended, which it has or is about to."""
        return self.status_of(shell.pid)

    def status_of(self, pid: int) -> int:
        """Return how a process that the anchor has started ended, which it has or is about to."""
        if self.anchor is not None:
            try:
                return self.anchor.wait(pid)
            except AnchorLostError:
                self._drop_anchor()
        # Without its parent it became a child of pid 1, which has collected it.
        return self._ended.get(pid, KILLED)

    def end(self) -> None:
        """Kill all shells and the anchor, because none may hold files of layers that are about to change."""
        # The shells before the anchor: its children would become children of pid 1 otherwise.
        for shell in self:
            self.kill(shell)
        self._drop_anchor()

    def adopt(self, anchor: Anchor, shells: list[LocalShell]) -> None:
        """Take over what a checkpoint brought back."""
        self.anchor = anchor
        for shell in shells:
            self._shells[shell.name] = shell
            self.born = shell.born

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of the anchor and of all shells."""
        assert self.anchor is not None
        return {"anchor": self.anchor.remember(), "shells": [shell.remember() for shell in self]}

    def launch(self, environment: dict[str, str], fds: dict[int, int], program: str) -> int:
        """Start a program under the anchor; see `Anchor.spawn`.

        Raises:
            ShellStartError: No process can be started, or bash is gone.
        """
        return self._under_the_anchor(lambda anchor: anchor.spawn(environment, fds, program))

    def _start(self, name: str, session: ShellSession | None) -> Shell:
        # A session that is not new brings its own variables in its script.
        script = restore_script(session, self.workdir, self.pristine)
        environment = self.environment if session is None else {}
        return self._under_the_anchor(lambda anchor: LocalShell.start(anchor, name, session, script, environment))

    def _under_the_anchor(self, start: Callable[[Anchor], StartedT]) -> StartedT:
        try:
            return start(self._ready_anchor())
        except AnchorLostError:
            # The agent may have killed the anchor at any time, even just now. A second loss has another cause.
            self._drop_anchor()
        try:
            return start(self._ready_anchor())
        except AnchorLostError as error:
            if _runs():
                raise ShellStartError(f"{BASH} does not start in this sandbox: {error}") from error
            # A recorded answer: how the attempts failed depends on moments, and must not be part of its text.
            raise ShellStartError(f"{BASH} does not start in this sandbox", broken=True) from error

    def _ready_anchor(self) -> Anchor:
        if self.anchor is None:
            try:
                self.anchor = Anchor.start()
            except OSError as error:
                raise ShellStartError(f"no process can be started in this sandbox: {error.strerror}") from error
        return self.anchor

    def _drop_anchor(self) -> None:
        if self.anchor is not None:
            self.anchor.close()
            self.anchor = None


@functools.cache
def _own_limit(number: int) -> tuple[int, int]:
    # They do not change any more when shells are started.
    return resource.getrlimit(number)


def new_pipes() -> tuple[dict[int, int], dict[int, int]]:
    """Return our ends and a shell's ends of its pipes, by the shell's own descriptor numbers."""
    ours, theirs = {}, {}
    for number in (1, 2, session_texts.DUMP_FD):
        ours[number], theirs[number] = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours[number], False)
        # A command that becomes another user may open /dev/stdout, which is this pipe, again.
        os.fchmod(theirs[number], 0o666)
    # Blocking at our end is harmless: a line is far shorter than the pipe, and the shell has read the last one.
    theirs[session_texts.GO_FD], ours[session_texts.GO_FD] = os.pipe2(os.O_CLOEXEC)
    return ours, theirs


def _runs() -> bool:
    """Return whether the sandbox's bash can be executed. It is asked only after a failure."""
    pid = os.fork()
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
