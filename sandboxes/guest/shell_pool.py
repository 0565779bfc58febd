"""All shells of a sandbox: started when they are needed, replaced after each call that leaves nothing running."""

# Theory of operation.
#
# A session is what its last dump says. So a shell can be lost at any time without losing its session: the next one is
# restored from the dump. Only beside survivors is a shell kept, because it may have jobs.

import contextlib
import select
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from sandboxes.guest.anchor import ShellStartError
from sandboxes.guest.bash_session import MalformedDumpError
from sandboxes.guest.shell import Output, Shell
from sandboxes.shell_text import ShellSession

READY_S = 10.0
"""How long a shell may take to its first dump. It takes milliseconds on an idle machine. The value is an estimate."""
KILLED = 137
"""The exit code of a shell whose end is unknown: 128 + 9, as for a SIGKILL."""


class Shells(ABC):
    """The shells of one sandbox.

    Attributes:
        environment: The variables of new sessions.
        workdir: The directory of new sessions.
        sessions: The sessions that differ from a new one, by name.
        pristine: A new shell's session; None until one has started.
    """

    def __init__(
        self,
        environment: dict[str, str],
        workdir: str,
        sessions: dict[str, ShellSession],
        pristine: ShellSession | None,
    ) -> None:
        self.environment, self.workdir = environment, workdir
        self.sessions, self.pristine = sessions, pristine
        self._shells: dict[str, Shell] = {}

    def __iter__(self) -> Iterator[Shell]:
        return iter(list(self._shells.values()))

    # -- by kind of sandbox ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def program(self) -> str:
        """The path of the shell's program."""

    @property
    @abstractmethod
    def anchor_pids(self) -> set[int]:
        """The processes that start the shells."""

    @abstractmethod
    def reap(self) -> None:
        """Collect processes that ended as children of the supervisor."""

    @abstractmethod
    def status(self, shell: Shell) -> int:
        """Return how a shell ended, which it has or is about to."""

    @abstractmethod
    def status_of(self, pid: int) -> int:
        """Return how a process ended that was started as the shells are; it has or is about to."""

    @abstractmethod
    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of all shells and of what started them."""

    @abstractmethod
    def _start(self, name: str) -> Shell:
        """Start a session's shell."""

    # -- one shell ---------------------------------------------------------------------------------------------------

    def ready(self, name: str) -> Shell:
        """Return a session's shell once its first dump has come; start it if there is none.

        Raises:
            ShellStartError: The shell is gone, or broken.
        """
        shell = self._shells.get(name)
        if shell is not None and shell.ended:
            self.kill(shell)
            shell = None
        if shell is None:
            shell = self._shells[name] = self._start(name)
        if shell.baseline is None:
            self._await_first_dump(shell)
        return shell

    def take_dump(self, shell: Shell) -> tuple[int, bool]:
        """Return the exit status in a call's dump, and whether the session differs from before the call.

        Raises:
            MalformedDumpError: A command has interfered with the dump.
        """
        code, now = shell.finish_dump()
        # Compared with the restored shell's own first dump, not with the session that it was restored from: bash may
        # print the same thing differently the second time.
        changed = now != shell.baseline
        if changed:
            # A session that equals a new one is not stored: merely naming a session changes no state.
            shell.session = None if now == self.pristine else now
            shell.baseline = now
            if shell.session is None:
                self.sessions.pop(shell.name, None)
            else:
                self.sessions[shell.name] = now
        return code, changed

    def kill(self, shell: Shell) -> None:
        """Kill a shell, and forget it."""
        if not shell.ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(shell.death, signal.SIGKILL)
        # Asking for the status collects the process: otherwise it would stay a zombie.
        self.status(shell)
        self.forget(shell)

    def forget(self, shell: Shell) -> None:
        """Forget a shell that has ended."""
        shell.close()
        if self._shells.get(shell.name) is shell:
            del self._shells[shell.name]

    def _await_first_dump(self, shell: Shell) -> None:
        poll = select.poll()
        poll.register(shell.dump_fd, select.POLLIN)
        # A shell that cannot start dies without a dump.
        poll.register(shell.death, select.POLLIN)
        deadline = time.monotonic() + READY_S
        with contextlib.suppress(MalformedDumpError):
            while time.monotonic() < deadline:
                events = {fd for fd, _ in poll.poll(READY_S * 1000)}
                if shell.dump_fd in events and shell.read_dump():
                    _, shell.baseline = shell.finish_dump()
                    if shell.session is None:
                        # The first shell defines what a session without changes looks like.
                        self.pristine = shell.baseline
                    else:
                        # A restored shell takes these on together with its command: see `bash_session.orders`.
                        shell.baseline |= {kind: shell.session[kind] for kind in ("traps", "options")}
                    return
                if shell.death in events:
                    break
        shell.err.drain(4096)
        reason = bytes(shell.err.kept).decode(errors="replace").strip() or "it gives no answer"
        self.kill(shell)
        raise ShellStartError(f"{self.program} does not start in this sandbox: {reason}")

    # -- all shells --------------------------------------------------------------------------------------------------

    @property
    def outputs(self) -> dict[int, Output]:
        """The output streams of all shells, by descriptor."""
        return {output.fd: output for shell in self for output in (shell.out, shell.err)}

    @property
    def idle_pids(self) -> set[int]:
        """The processes that are ours and not the agent's."""
        return {shell.pid for shell in self} | self.anchor_pids

    def holding(self) -> list[Shell]:
        """Return the idle shells that hold more descriptors than when they were new."""
        holding = []
        for shell in self:
            # A shell that is still starting has run nothing yet.
            if shell.baseline is None or not shell.holds_more():
                continue
            if shell.ended:
                # Another process has killed it. Its session is the one in its last dump.
                self.kill(shell)
            else:
                holding.append(shell)
        return holding

    def ready_all(self) -> None:
        """Wait for the first dumps of all shells: in a checkpoint, what is still in a pipe to us would be lost."""
        for name in list(self._shells):
            with contextlib.suppress(ShellStartError):
                self.ready(name)

    def renew(self, names: list[str]) -> None:
        """Replace shells by fresh ones that are restored from their dumps.

        So what a dump leaves out never crosses calls, in a live sandbox as little as in a restored one.
        """
        for name in names:
            if name in self._shells:
                self.kill(self._shells[name])
            with contextlib.suppress(ShellStartError):
                self._shells[name] = self._start(name)
