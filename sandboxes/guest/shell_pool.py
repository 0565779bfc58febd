"""All sessions' shells of a sandbox, and the anchor under which they live. Seen from pid 1."""

import contextlib
import select
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from sandboxes.guest.anchor import BASH, Anchor, AnchorLostError, ShellStartError
from sandboxes.guest.bash_session import MalformedDumpError
from sandboxes.guest.shell import Output, Shell
from sandboxes.linux import processes
from sandboxes.session_types import ShellSession

READY_S = 10.0
KILLED = 137
StartedT = TypeVar("StartedT")


class Shells:
    """Those of one sandbox. `sessions`: what each session is, by name; one that is as if nothing had happened is none.

    pristine: what a new shell says of itself, once known.
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
        self.anchor: Anchor | None = None
        self._ended: dict[int, int] = {}
        self._shells: dict[str, Shell] = {}

    def __iter__(self) -> Iterator[Shell]:
        return iter(list(self._shells.values()))

    @property
    def outputs(self) -> dict[int, Output]:
        """The streams of all, by descriptor."""
        return {output.fd: output for shell in self for output in (shell.out, shell.err)}

    @property
    def idle_pids(self) -> set[int]:
        """Processes that are ours and not the agent's."""
        return {shell.pid for shell in self} | self.anchor_pids

    @property
    def arriving(self) -> bool:
        """Whether one was started and has not said yet what it is."""
        return any(shell.baseline is None for shell in self)

    @property
    def program(self) -> str:
        """The path of the shell that they are."""
        return BASH

    @property
    def anchor_pids(self) -> set[int]:
        return set() if self.anchor is None else {self.anchor.pid}

    def reap(self) -> None:
        """Collect those that ended without an anchor to do so."""
        self._ended |= processes.reap()

    def kill_except(self, spared: set[processes.Process], first: int | None = None) -> None:
        """See `processes.kill_except`."""
        self._ended |= processes.kill_except(spared, first=first)

    # -- one shell ---------------------------------------------------------------------------------------------------

    def ready(self, name: str) -> Shell:
        """Return session name's shell when it has said what it is; start it where there is none.

        Raises:
            CannotStart: bash is gone, or broken.
        """
        shell = self._shells.get(name)
        if shell is not None and shell.ended:
            self.kill(shell)
            shell = None
        shell = shell or self._start(name)
        if shell.baseline is None:
            self._await_first_dump(shell)
        return shell

    def take_dump(self, shell: Shell) -> tuple[int, bool]:
        """Return the exit status that a call's dump tells, and whether the session is another now.

        Raises:
            MalformedDump: a command has interfered with it.
        """
        code, now = shell.finish_dump()
        # Compared with what the restored shell said of itself, not with what it was restored from: where bash
        # prints a thing differently the second time, nothing has changed.
        changed = now != shell.baseline
        if changed:
            # A session that is as if nothing had happened in it is none: naming one changes nothing.
            shell.session = None if now == self.pristine else now
            shell.baseline = now
            if shell.session is None:
                self.sessions.pop(shell.name, None)
            else:
                self.sessions[shell.name] = now
        return code, changed

    def status(self, shell: Shell) -> int:
        """Return how a shell ended, which it has or is about to."""
        return self.status_of(shell.pid)

    def status_of(self, pid: int) -> int:
        """Return how a process that was started under the anchor ended, which it has or is about to."""
        if self.anchor is not None:
            try:
                return self.anchor.wait(pid)
            except AnchorLostError:
                self._drop_anchor()
        return self._ended.get(pid, KILLED)

    def kill(self, shell: Shell) -> None:
        if not shell.ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(shell.death, signal.SIGKILL)
        self.status(shell)
        self.forget(shell)

    def forget(self, shell: Shell) -> None:
        """Let go of one that has ended."""
        shell.close()
        if self._shells.get(shell.name) is shell:
            del self._shells[shell.name]

    def holding(self) -> list[Shell]:
        """Return the idle shells that hold more than when they were new. One on its way has run nothing yet.

        One that another process has killed is let go of: its session is what its last dump said.
        """
        found = []
        for shell in self:
            if shell.baseline is None or not shell.holds_more():
                continue
            if shell.ended:
                self.kill(shell)
            else:
                found.append(shell)
        return found

    # -- all ---------------------------------------------------------------------------------------------------------

    def ready_all(self) -> None:
        """Have all say what they are: on its way to us that would be lost in a checkpoint."""
        for name in list(self._shells):
            with contextlib.suppress(ShellStartError):
                self.ready(name)

    def renew(self, names: list[str]) -> None:
        """Replace the shells of names by fresh ones restored from their dumps: a session is what its dump says."""
        for name in names:
            if name in self._shells:
                self.kill(self._shells[name])
            with contextlib.suppress(ShellStartError):
                self._start(name)

    def end(self) -> None:
        """Kill all, and the anchor: none may stand in layers that are about to change."""
        for shell in self:
            self.kill(shell)
        self._drop_anchor()

    def adopt(self, anchor: Anchor, shells: list[Shell]) -> None:
        """Take over what a checkpoint brought back."""
        self.anchor = anchor
        self._shells = {shell.name: shell for shell in shells}

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of this side of them."""
        assert self.anchor is not None
        return {"anchor": self.anchor.remember(), "shells": [shell.remember() for shell in self]}

    def launch(self, environment: dict[str, str], fds: dict[int, int], program: str) -> int:
        """Start a program under the anchor; see `Anchor.spawn`.

        Raises:
            CannotStart: no process can be started, or bash is gone.
        """
        return self._under_the_anchor(lambda anchor: anchor.spawn(environment, fds, program))

    def _start(self, name: str) -> Shell:
        session = self.sessions.get(name)
        shell = self._under_the_anchor(
            lambda anchor: Shell.start(anchor, name, session, environment=self.environment, workdir=self.workdir)
        )
        self._shells[name] = shell
        return shell

    def _under_the_anchor(self, start: Callable[[Anchor], StartedT]) -> StartedT:
        try:
            return start(self._ready_anchor())
        except AnchorLostError:
            # The agent's processes may have killed it; the next one is as good.
            self._drop_anchor()
        try:
            return start(self._ready_anchor())
        except AnchorLostError as error:
            raise ShellStartError(f"{BASH} does not start in this sandbox: {error}") from error

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

    def _await_first_dump(self, shell: Shell) -> None:
        poll = select.poll()
        poll.register(shell.dump_fd, select.POLLIN)
        poll.register(shell.death, select.POLLIN)
        deadline = time.monotonic() + READY_S
        with contextlib.suppress(MalformedDumpError):
            while time.monotonic() < deadline:
                events = {fd for fd, _ in poll.poll(READY_S * 1000)}
                if shell.dump_fd in events and shell.read_dump():
                    _, shell.baseline = shell.finish_dump()
                    if shell.session is None:
                        self.pristine = shell.baseline
                    else:
                        # These come with the command, not before: see `orders`.
                        shell.baseline |= {kind: shell.session[kind] for kind in ("traps", "options")}
                    return
                if shell.death in events:
                    break
        shell.err.drain(4096)
        reason = bytes(shell.err.kept).decode(errors="replace").strip() or "it gives no answer"
        self.kill(shell)
        raise ShellStartError(f"{self.program} does not start in this sandbox: {reason}")
