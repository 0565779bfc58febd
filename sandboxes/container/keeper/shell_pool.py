"""The shells of a container's sessions, seen from its keeper: started by the anchor, restored by CRIU."""

from pathlib import Path
from typing import Any

from sandboxes.container.boot_scripts import SHELL_TEXTS
from sandboxes.container.keeper import posix_session as posix
from sandboxes.container.keeper.anchor import ContainerAnchor
from sandboxes.container.keeper.cgroup_processes import ContainerProcesses
from sandboxes.container.keeper.file_kit import NO_COMMAND, FileKit
from sandboxes.container.keeper.shell import ContainerShell, read_limits, restore_script
from sandboxes.guest.anchors.anchor import ShellStartError
from sandboxes.guest.bash import session as sessions
from sandboxes.guest.shell import Shell
from sandboxes.guest.shell_pool import KILLED, Shells
from sandboxes.ipc.state_messages import BeginSandbox
from sandboxes.shell_text import ShellSession


class ContainerShells(Shells):
    """The shells of one container. They have no session before `begin`."""

    def __init__(self, anchor: ContainerAnchor, members: ContainerProcesses, inherited: set[str]) -> None:
        """Start no shell.

        Args:
            anchor: What starts the shells.
            members: The container's processes.
            inherited: The names of the variables that a shell inherits from the anchor.
        """
        super().__init__({}, "/", {}, None)
        self._anchor, self._members, self._inherited = anchor, members, inherited
        # The kits of shells that were replaced, for the next ones.
        self._kits: list[FileKit] = []

    def begin(self, order: BeginSandbox, environment: dict[str, str]) -> None:
        """Take on a sandbox's sessions.

        Args:
            order: The sandbox.
            environment: The variables of new sessions.
        """
        # A keeper waits in a spare container before it knows its spec; this is where it learns it.
        self.environment, self.workdir = environment, order.workdir
        self.sessions, self.pristine = order.sessions, order.pristine

    @property
    def anchor_pids(self) -> set[int]:
        """The pids of the anchor, its init and pid 1."""
        return {self._members.pid, *self._anchor.pids}

    @property
    def bash(self) -> bool:
        """Whether the shells are bash; otherwise they are the image's /bin/sh."""
        return self._anchor.bash

    @property
    def program(self) -> str:
        """The path of the shell in the container."""
        return "/bin/bash" if self.bash else "/bin/sh"

    def restore_script(self, name: str) -> bytes:
        """Return the script that makes a fresh shell a session, for a shell that prints no dump."""
        session, given = self.sessions.get(name), (self.workdir, self.environment, self._inherited)
        return restore_script(session, *given, bash=self.bash, ready=":", pristine=self.pristine)

    def reap(self) -> None:
        """Do nothing: shells are children of the anchor, which reaps them."""

    def status(self, shell: Shell) -> int:
        """Return the exit status of a shell that has ended."""
        # The anchor knows its children by inner pids only.
        assert isinstance(shell, ContainerShell)
        return self.status_of(shell.inner)

    def status_of(self, pid: int) -> int:
        """Return the exit status of a process that the anchor started, by its inner pid."""
        return self._anchor.status(pid, otherwise=KILLED)

    def prepare_again(self, stored: list[dict[str, Any]]) -> list[ContainerShell]:
        """Make the files that the restored shells have open."""
        return [ContainerShell.prepare_again(shell, self._anchor.box, bash=self.bash) for shell in stored]

    def adopt_prepared(self, shells: list[ContainerShell], stored: list[dict[str, Any]]) -> None:
        """Adopt the shells that CRIU restored."""
        # `prepare_again` made them in the same order; strict, because a shell with another's session would be silently
        # wrong.
        for shell, entry in zip(shells, stored, strict=True):
            # 0 stands for a shell that is not there any more: it counts as ended, and the next call starts another.
            shell.came_back(entry, self._members.find(entry["inner"]) or 0)
            self._shells[shell.name] = shell
            self.born = shell.born

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint stores about the anchor and the shells."""
        return {"anchor": self._anchor.remember(), "shells": [shell.remember() for shell in self]}

    def _replace(self, shell: Shell) -> None:
        """End an idle shell, in whose place another one will be started; nothing that it started runs."""
        assert isinstance(shell, ContainerShell)
        if shell.ended:
            self.kill(shell)
            return
        shell.send_kill()
        # No response is awaited: the anchor waits for this shell before it starts the next one, and reports that.
        self._anchor.collect(shell.inner)
        self._kits.append(shell.give_kit())
        self.forget(shell)

    def _start(self, name: str, session: ShellSession | None) -> Shell:
        self._anchor.look_after()
        folder = self._anchor.new_folder()
        # The shell's whole past is in this script: a session is its dump (docs/decisions/0004-sessions-are-dumps.md).
        script = restore_script(
            session, self.workdir, self.environment, self._inherited,
            bash=self.bash, ready=posix.ready(folder.name), pristine=self.pristine,
        )  # fmt: skip
        loop = sessions.LOOP if self.bash else posix.loop(folder.name)
        texts = dict(zip(SHELL_TEXTS, (script, loop.encode(), NO_COMMAND), strict=True))
        # FIFOs and texts exist before the anchor gets its order, because the shell opens them at once.
        shell = ContainerShell(name, session, self._kit(folder, texts), bash=self.bash)
        try:
            pid, inner = self._anchor.start(folder.name)
        except ShellStartError as error:
            # The directory goes with it, so the next attempt gets a new number.
            shell.close()
            raise ShellStartError(str(error), broken=not self._anchor.has_shell()) from error
        shell.started(pid, inner, read_limits(self._anchor.pid))
        return shell

    def _kit(self, folder: Path, texts: dict[str, bytes]) -> FileKit:
        """Return a kit with these texts: of a shell that was replaced if there is one, and else a new one."""
        while self._kits:
            kit = self._kits.pop()
            if kit.is_as_made():
                kit.serve_next(folder, texts)
                return kit
            kit.close()
        return FileKit(folder, texts)
