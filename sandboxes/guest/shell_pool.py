"""All shells of a sandbox: started when they are needed, replaced after each call that leaves nothing running."""

# Theory of operation.
#
# A session is what its last dump says. So a shell can be lost at any time without losing its session: the next one is
# restored from the dump. Only beside survivors is a shell kept, because it may have jobs.

import contextlib
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.bash.restore import came_back, needs_trial, taken_on_later
from sandboxes.guest.bash.session import KEPT, UNREADABLE, MalformedDumpError
from sandboxes.guest.shell import Output, Shell
from sandboxes.linux import live_state
from sandboxes.linux.live_state import inherited
from sandboxes.shell_text import ShellSession

READY_S = 10.0
"""How long a shell may take to its first dump. It takes milliseconds on an idle machine. The value is an estimate."""
_SIGNALLED = 128
"""The smallest exit code of a shell that a signal has ended."""


def known(status: int | None) -> int:
    """Return the exit code of a process.

    Raises:
        ShellStartError: It is not known, so the call has no result.
    """
    if status is None:
        raise ShellStartError("the process that had collected an exit code was killed before it reported the code")
    return status


class Shells(ABC):
    """The shells of one sandbox.

    Attributes:
        environment: The variables of new sessions.
        workdir: The directory of new sessions.
        sessions: The sessions that differ from a new one, by name.
        pristine: A new shell's session; None until one has started.
        born: What the first shell passed on to its children (`live_state.inherited`).
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
        self.born: list[str] = []
        self._shells: dict[str, Shell] = {}
        self._noted: dict[Shell, object] = {}

    def __iter__(self) -> Iterator[Shell]:
        return iter(list(self._shells.values()))

    @property
    def names(self) -> set[str]:
        """The sessions that have a shell."""
        return set(self._shells)

    # -- by kind of sandbox ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def program(self) -> str:
        """The path of the shell's program."""

    @property
    @abstractmethod
    def anchor_pids(self) -> set[int]:
        """The processes that start the shells."""

    @property
    def hidden_pids(self) -> set[int]:
        """Those of `anchor_pids` into which no process of the sandbox can look: their descriptors stay closed to it."""
        return set()

    @abstractmethod
    def reap(self) -> None:
        """Collect processes that ended as children of the supervisor."""

    @abstractmethod
    def status(self, shell: Shell) -> int | None:
        """Return how a shell ended, which it has or is about to; None as in `status_of`."""

    @abstractmethod
    def status_of(self, pid: int) -> int | None:
        """Return how a process ended that was started as the shells are; it has or is about to.

        None if the process that had collected it was killed before it reported the code.
        """

    @abstractmethod
    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of all shells and of what started them."""

    @abstractmethod
    def _start(self, name: str, session: ShellSession | None) -> Shell:
        """Start a shell that becomes a session; None for a new one."""

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
            shell = self._shells[name] = self._start(name, self.sessions.get(name))
        if shell.baseline is None:
            self._await_first_dump(shell)
        return shell

    def begin_first(self, name: str) -> str | None:
        """Start a session's shell; return why it does not start if a command, or the base, has broken it.

        Raises:
            ShellStartError: The failure is ours or the machine's.
        """
        try:
            self.ready(name)
        except ShellStartError as error:
            if not error.broken:
                raise
            return str(error)
        return None

    def take_dump(self, shell: Shell) -> tuple[int, bool]:
        """Return the exit status in a call's dump, and whether the session differs from before the call.

        Raises:
            MalformedDumpError: A command has interfered with the dump.
        """
        code, now = shell.finish_dump()
        # Compared with the restored shell's own first dump, not with the session that it was restored from: bash may
        # print the same thing differently the second time.
        before = shell.baseline
        changed = now != before
        if changed:
            assert before is not None
            unsure = before.get(KEPT) == UNREADABLE or needs_trial(before, now)
            if KEPT not in now and unsure and not self._comes_back(shell.name, now):
                now[KEPT] = UNREADABLE
            # A session that equals a new one is not stored: merely naming a session changes no state.
            shell.session = None if now == self.pristine else now
            shell.baseline = now
            if shell.session is None:
                self.sessions.pop(shell.name, None)
            else:
                self.sessions[shell.name] = now
        return code, changed

    def _comes_back(self, name: str, session: ShellSession) -> bool:
        """Return whether a fresh shell can take on a session. It takes as long as a start, some milliseconds."""
        trial = self._start(name, session)
        try:
            self._await_first_dump(trial)
        except ShellStartError:
            return False
        assert trial.baseline is not None
        self.kill(trial)
        return came_back(session, trial.baseline)

    def kill(self, shell: Shell) -> int | None:
        """Kill a shell, and forget it; return how it ended, if that is known."""
        if not shell.ended:
            shell.send_kill()
        # Asking for the status collects the process: otherwise it would stay a zombie.
        status = self.status(shell)
        self.forget(shell)
        return status

    def _replace(self, shell: Shell) -> None:
        """End an idle shell, in whose place another one will be started; nothing that it started runs."""
        self.kill(shell)

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
                    shell.restore_limits()
                    _, shell.baseline = shell.finish_dump()
                    # Of the first one: a command may have changed what starts the shells, and so all later ones.
                    shell.born = self.born = self.born or inherited(shell.pid)
                    if shell.session is None:
                        # The first shell defines what a session without changes looks like.
                        self.pristine = shell.baseline
                    else:
                        # A restored shell takes these on together with its command: see `bash.restore.orders`.
                        shell.baseline = taken_on_later(shell.session, shell.baseline)
                    return
                if shell.death in events:
                    break
        ended = shell.ended
        for output in (shell.out, shell.err):
            output.drain(4096)
        reason = bytes(shell.out.data + shell.err.data).decode(errors="replace").strip() or "it gives no answer"
        status = self.kill(shell)
        # A new shell's script is so short that only the sandbox can be the cause; a signal is a lack of memory.
        broken = (
            ended
            and status is not None
            and status < _SIGNALLED
            and (shell.session is None or self._is_broken(shell.name))
        )
        raise ShellStartError(f"{self.program} does not start in this sandbox: {reason}", broken=broken)

    def _is_broken(self, name: str) -> bool:
        """Return whether not even a new session's shell starts."""
        try:
            trial = self._start(name, None)
            self._await_first_dump(trial)
        except ShellStartError as error:
            return error.broken
        self.kill(trial)
        return False

    # -- all shells --------------------------------------------------------------------------------------------------

    @property
    def outputs(self) -> dict[int, Output]:
        """The output streams of all shells, by descriptor."""
        return {output.fd: output for shell in self for output in (shell.out, shell.err)}

    @property
    def idle_pids(self) -> set[int]:
        """The processes that are ours and not the agent's."""
        return {shell.pid for shell in self} | self.anchor_pids

    def note(self, running: str | None, *, stays: bool) -> None:
        """Note, before a call, what it may change of shells that later calls use.

        That are their pipes and, of shells that the call does not use, their limits, how often each was given a CPU,
        and writes to its files in /proc. The look after the last call serves, if nothing has run since then.

        Args:
            running: The session that the call's command runs in; None if there is none.
            stays: Whether something survives, so that the shells go on after the call and may run between calls.
        """
        known, self._noted = {} if stays else self._noted, {}
        for shell in self:
            if shell.name != running:
                # Beside survivors `LiveState` has it reported.
                if not stays:
                    shell.watch()
                self._noted[shell] = known.get(shell) or shell.at_rest()
            elif stays:
                self._noted[shell] = shell.pipes

    def touched(self, running: str | None) -> bool:
        """Return whether a call has changed something that was noted before it. 0.06 ms for each shell."""
        noted, self._noted = self._noted, {}
        for shell in self:
            if shell in noted:
                self._noted[shell] = shell.pipes if shell.name == running else shell.facts()
        # The session's own shell may have ended with its call, which later calls do not see.
        gone = any(shell not in self._noted and shell.name != running for shell in noted)
        changed = any(noted[shell] != now for shell, now in self._noted.items())
        return gone or changed or (bool(noted) and live_state.was_written())

    def end_idle(self, running: str | None) -> list[str]:
        """End all shells but that of one session; return the names of all sessions that had a shell."""
        names = list(self._shells)
        for shell in self:
            if shell.name != running:
                self._replace(shell)
        live_state.forget_writes()
        return names

    def ready_all(self) -> None:
        """Wait for the first dumps of all shells.

        In a checkpoint, what is still in a pipe to us would be lost. And a call must not move the directory of a
        session whose shell has not reached it yet.
        """
        for name in {*self._shells, *self.sessions}:
            shell = self._shells.get(name)
            if shell is None or shell.baseline is None:
                with unless_broken():
                    self.ready(name)

    def renew(self, names: list[str]) -> None:
        """Replace shells by fresh ones that are restored from their dumps.

        So what a dump leaves out never crosses calls, in a live sandbox as little as in a restored one.
        """
        for name in names:
            if name in self._shells:
                self._replace(self._shells[name])
            with contextlib.suppress(ShellStartError):
                self._shells[name] = self._start(name, self.sessions.get(name))


@contextlib.contextmanager
def unless_broken() -> Iterator[None]:
    """Let a call go on without a shell that a command has broken; a call to that shell gets the answer."""
    try:
        yield
    except ShellStartError as error:
        if not error.broken:
            raise
