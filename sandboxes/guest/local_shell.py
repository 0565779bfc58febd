"""A shell of a local sandbox: a bash that the anchor starts, over pipes."""

import contextlib
import functools
import os
import resource
import signal
from collections.abc import Callable, Mapping
from typing import Any

from sandboxes.guest.anchors.anchor import Anchor
from sandboxes.guest.anchors.native_anchor import NativeAnchor
from sandboxes.guest.anchors.shell_kit import TEXTS, ShellKit, new_pipes, new_text, write_texts
from sandboxes.guest.anchors.starter import AnchorLostError
from sandboxes.guest.anchors.template import ShellTemplate
from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.bash.restore import orders
from sandboxes.guest.process_io import death_of
from sandboxes.guest.shell import Shell, is_in_proc_of
from sandboxes.linux import processes
from sandboxes.linux.descriptors import close_all
from sandboxes.linux.processes import has_descriptors
from sandboxes.shell_text import Jobs, ShellSession

_LIMITS = tuple(
    (name, getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
)
"""All resource limits of this kernel. RLIMIT_OFILE is another name of RLIMIT_NOFILE."""


class LocalShell(Shell):
    """A bash that is a child of the anchor.

    Attributes:
        kit: What it was started on, which the anchor may lend again; None if its descriptors are its own.
        template: What forks the bash that runs the next command; None if the shell's own bash does. While `forked` is
            not set, `pid` is the template's.
        forked: Whether the bash is a fork of the template.
    """

    def __init__(self, name: str, session: ShellSession | None, pid: int, ends: Mapping[int, int]) -> None:
        """Take over a bash that runs; see `Shell`."""
        super().__init__(name, session, pid, death_of(pid), ends)
        self.kit: ShellKit | None = None
        self.template: ShellTemplate | None = None
        self.forked = False
        # Kept together, so that `close` cannot forget one.
        self._ends = [*ends.values(), self.death]
        # The kernel's names of what an idle shell has open. Whatever else it has open, a command has opened.
        self._known = {0: "/dev/null", **dict.fromkeys(TEXTS, "/memfd:text (deleted)"), **self._pipe_names()}

    @classmethod
    def start(
        cls, anchor: Anchor, name: str, session: ShellSession | None, script: bytes, environment: dict[str, str],
        *, template: bool,
    ) -> "LocalShell":  # fmt: skip
        """Start a bash that becomes a session. It is ready when its first dump has come.

        Args:
            anchor: Starts it.
            name: The session's name.
            session: The session; None for a new one.
            script: What it sources to become that session.
            environment: Its variables, before it has sourced the script.
            template: Whether it is to be a template, if the anchor can start one on its kit.

        Raises:
            AnchorLostError: The anchor is gone.
        """
        # Anonymous pipes have no name in the file system. The agent can still reach them through /proc, so the form of
        # a dump is checked (`parse_dump`).
        kit = anchor.kit
        if kit is not None and not kit.lent:
            return cls.begin(anchor, kit, name, session, script, environment, template=template)()
        return cls._start_on_own(anchor, name, session, script, environment)

    @classmethod
    def begin(
        cls, anchor: Anchor, kit: ShellKit, name: str, session: ShellSession | None, script: bytes,
        environment: dict[str, str], *, template: bool,
    ) -> Callable[[], "LocalShell"]:  # fmt: skip
        """Have the anchor start a bash on its kit, and do not wait for it.

        Args:
            anchor: Starts it. It may be asked for nothing else meanwhile.
            kit: The anchor's kit, which is not lent.
            name: The session's name.
            session: The session; None for a new one.
            script: What it sources to become that session.
            environment: Its variables, before it has sourced the script.
            template: Whether it is to be a template, if the anchor can start one.

        Returns:
            A function that waits for the bash, and returns it as a shell or raises `AnchorLostError`.

        Raises:
            AnchorLostError: The anchor is gone.
        """
        ours = kit.lend(script)
        template = template and anchor.forks

        def started() -> "LocalShell":
            try:
                pid = anchor.started()
                found = ShellTemplate(pid, kit, session) if template and ShellTemplate.is_one(kit) else None
                shell = cls(name, session, pid, ours)
            except AnchorLostError:
                close_all(ours.values())
                raise
            shell.kit, shell.template = kit, found
            return shell

        try:
            anchor.request_shell(environment, template=template)
        except AnchorLostError:
            close_all(ours.values())
            raise
        return started

    @classmethod
    def _start_on_own(
        cls, anchor: Anchor, name: str, session: ShellSession | None, script: bytes, environment: dict[str, str]
    ) -> "LocalShell":
        ours, theirs = new_pipes()
        theirs |= {number: new_text() for number in TEXTS}
        write_texts(theirs, script)
        # Commands inherit this stdin. One that reads it meets its end at once, and does not wait for input that never
        # comes.
        theirs[0] = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            pid = anchor.start_on(environment, theirs)
            # Each call rewrites the command's text, so it stays open here.
            ours[session_texts.COMMAND_FD] = os.dup(theirs[session_texts.COMMAND_FD])
            return cls(name, session, pid, ours)
        except AnchorLostError:
            close_all(ours.values())
            raise
        finally:
            close_all(theirs.values())

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
        ours = {1: self.out.fd, 2: self.err.fd, session_texts.GO_FD: self.go_fd, session_texts.DUMP_FD: self.dump_fd}
        # Both ends of a pipe have the same name `pipe:[inode]` (proc_pid_fd(5)), so our end tells what the shell has
        # open.
        return {number: os.readlink(f"/proc/self/fd/{fd}") for number, fd in ours.items()}  # noqa: PTH115

    def restore_limits(self) -> None:
        """Give the shell its session's resource limits."""
        for name, (soft, hard) in ({} if self.session is None else self.session["limits"]).items():
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
        if is_in_proc_of(self.pid, folder):
            return False
        try:
            return os.path.samestat(os.stat(f"/proc/{self.pid}/cwd"), os.stat(folder.encode("latin-1")))  # noqa: PTH116
        except OSError:
            return False

    def is_as_new(self) -> bool:
        """Return whether its open descriptors are those of a shell that waits for its first command."""
        # No process can open one in a template.
        return self.waits_as_template or has_descriptors(self.pid, self._known)

    # -- with a template ---------------------------------------------------------------------------------------------

    @property
    def waits_as_template(self) -> bool:
        """Whether its process is a template, and no bash was forked for the next command."""
        return self.template is not None and not self.forked

    def fork(self, anchor: NativeAnchor) -> None:
        """Have the template fork the bash for the next command.

        Args:
            anchor: The template's parent.

        Raises:
            AnchorLostError: The template or the anchor is gone, or the session's directory is.
        """
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
        """Take over another process, and a descriptor that is readable once it has ended."""
        os.close(self.death)
        self.pid, self.death, self._ends[-1] = pid, death, death

    def fold(self) -> bool:
        """Go back to the template, before a command; the fork has ended. Return whether there is one that can fork."""
        if self.template is None or self.template.session is not self.session or not self.template.is_ready:
            return False
        super().close()
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
        super().close()
        self.drop_template()
        close_all(self._ends)
        self._ends.clear()


@functools.cache
def _own_limits() -> bytes:
    """Return the resource limits of this process, with which each shell begins."""
    return processes.limits(os.getpid())


@functools.cache
def _own_limit(number: int) -> tuple[int, int]:
    # They do not change any more when shells are started.
    return resource.getrlimit(number)
