"""All sessions' shells of a container, held from outside."""

from typing import Any

from sandboxes.container import posix_session as posix
from sandboxes.container.anchor import ContainerAnchor
from sandboxes.container.boot_scripts import SHELL_TEXTS
from sandboxes.container.cgroup_processes import Household
from sandboxes.container.shell import ContainerShell, read_limits, restore_script
from sandboxes.guest import bash_session as sessions
from sandboxes.guest.anchor import ShellStartError
from sandboxes.guest.shell import Shell
from sandboxes.guest.shell_pool import KILLED, Shells
from sandboxes.ipc.state_messages import BeginSandbox


class ContainerShells(Shells):
    """Those of one container. Of no session until `begin`. inherited: the names of variables they are born with."""

    def __init__(self, anchor: ContainerAnchor, house: Household, inherited: set[str]) -> None:
        super().__init__({}, "/", {}, None)
        self._anchor, self._house, self._inherited = anchor, house, inherited

    def begin(self, order: BeginSandbox, environment: dict[str, str]) -> None:
        """Take on a sandbox's sessions.

        Args:
            order: The sandbox.
            environment: The variables of new sessions.
        """
        self.environment, self.workdir = environment, order.workdir
        self.sessions, self.pristine = order.sessions, order.pristine

    @property
    def anchor_pids(self) -> set[int]:
        """See `Shells.anchor_pids`; pid 1 is among them."""
        return {self._house.pid, *self._anchor.pids}

    @property
    def bash(self) -> bool:
        """Whether they are bash; otherwise they are what the image has as `/bin/sh`."""
        return self._anchor.bash

    @property
    def program(self) -> str:
        """See `Shells.program`."""
        return "/bin/bash" if self.bash else "/bin/sh"

    def restore_script(self, name: str) -> bytes:
        """Return what a fresh shell sources to be session name, for who asks for no dump."""
        session, given = self.sessions.get(name), (self.workdir, self.environment, self._inherited)
        return restore_script(session, *given, bash=self.bash, ready=":")

    def reap(self) -> None:
        """See `Shells.reap`: those that end here are the anchor's children."""

    def status(self, shell: Shell) -> int:
        """See `Shells.status`."""
        assert isinstance(shell, ContainerShell)
        return self.status_of(shell.inner)

    def status_of(self, pid: int) -> int:
        """Return how a process ended that the anchor has started; pid: what the container calls it."""
        return self._anchor.status(pid, otherwise=KILLED)

    def prepare_again(self, told: list[dict[str, Any]]) -> list[ContainerShell]:
        """Make what shells that will be restored have open, under the names that they know."""
        return [ContainerShell.prepare_again(one, self._anchor.box, bash=self.bash) for one in told]

    def adopt_prepared(self, shells: list[ContainerShell], told: list[dict[str, Any]]) -> None:
        """Take over those that came back."""
        for shell, one in zip(shells, told, strict=True):
            shell.came_back(one, self._house.find(one["inner"]) or 0)
            self._shells[shell.name] = shell

    def remember(self) -> dict[str, Any]:
        """See `Shells.remember`."""
        return {"anchor": self._anchor.remember(), "shells": [shell.remember() for shell in self]}

    def _start(self, name: str) -> Shell:
        self._anchor.look_after()
        session, folder = self.sessions.get(name), self._anchor.new_folder()
        script = restore_script(
            session, self.workdir, self.environment, self._inherited, bash=self.bash, ready=posix.ready(folder.name)
        )
        loop = sessions.LOOP if self.bash else posix.loop(folder.name)
        texts = dict(zip(SHELL_TEXTS, (script, loop.encode(), b""), strict=True))
        shell = ContainerShell(name, session, folder, texts, bash=self.bash)
        try:
            pid, inner = self._anchor.start(folder.name)
        except ShellStartError:
            shell.close()
            raise
        shell.started(pid, inner, read_limits(self._anchor.pid))
        return shell
