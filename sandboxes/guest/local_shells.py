"""The shells of a local sandbox: children of the anchor, started and collected by it."""

import contextlib
import select
from collections.abc import Iterator, Sequence
from typing import Any

from sandboxes.guest.anchored_shells import MAX_KILL_S, AnchoredShells
from sandboxes.guest.anchors.anchor import Anchor, ShellStartError
from sandboxes.guest.anchors.native_anchor import NativeAnchor
from sandboxes.guest.anchors.starter import AnchorLostError
from sandboxes.guest.anchors.template import ShellTemplate, can_stand_for
from sandboxes.guest.bash.restore import NO_LOOKUP, restore_script
from sandboxes.guest.bash.session import KEPT
from sandboxes.guest.local_shell import LocalShell
from sandboxes.guest.shell import Shell
from sandboxes.guest.shell_pool import unless_broken
from sandboxes.linux import processes
from sandboxes.shell_text import ShellSession


class LocalShells(AnchoredShells):
    """All shells of a local sandbox: the kit that they are started on, and the template that stands for them."""

    _folded: LocalShell | None = None
    """A shell that waits as a template, after the fork of its last command has ended."""
    _templates = True
    """Whether new shells may be templates."""

    @property
    def anchor_pids(self) -> set[int]:
        """The processes of the anchor and of the template, if there are any."""
        return super().anchor_pids | {template.pid for template in self._living_templates()}

    def anchor_was_touched(self) -> bool:
        """Return whether a command may have changed the anchor or the template; see `AnchoredShells`."""
        touched = any(template.ready and template.was_touched for template in self._living_templates())
        return touched or super().anchor_was_touched()

    def _drop_anchor(self) -> None:
        # First: the pipes of a template go with the kit. A shell that waits as one ends with it.
        for shell in self:
            assert isinstance(shell, LocalShell)
            shell.drop_template()
        self._drop_folded()
        super()._drop_anchor()

    def _living_templates(self) -> Iterator[ShellTemplate]:
        shells = [*self._shells.values(), *([] if self._folded is None else [self._folded])]
        return (shell.template for shell in shells if isinstance(shell, LocalShell) and shell.template is not None)

    def forget(self, shell: Shell) -> None:
        """Forget a shell that has ended. What it left running may have its pipes, so no other shell gets them."""
        super().forget(shell)
        if self.anchor is not None and self._has_kit_of(shell):
            self._close_kit(self.anchor)

    # -- shells that wait as templates -------------------------------------------------------------------------------

    def ready(self, name: str) -> Shell:
        """Return a session's shell once its first dump has come, and once it can fork if it is a template.

        Raises:
            ShellStartError: The shell is gone, or broken.
        """
        shell = super().ready(name)
        if isinstance(shell, LocalShell) and shell.waits_as_template:
            assert shell.template is not None
            assert shell.baseline is not None
            with contextlib.suppress(AnchorLostError):
                shell.template.await_ready()
                # It is not where its session says, and a fork would go there.
                if KEPT not in shell.baseline:
                    return shell
            self._templates = False
            self._discard(shell)
            return super().ready(name)
        return shell

    def ready_all(self) -> None:
        """Wait for the first dumps of all shells, and have the template fork: each shell stands in its directory then.

        A call may move that, and the session goes along.
        """
        super().ready_all()
        for name in self.names:
            with unless_broken():
                self.for_command(name)

    def for_command(self, name: str) -> Shell:
        """Return a session's shell once it can be given a command; see `ready`.

        Raises:
            ShellStartError: The shell is gone, or broken.
        """
        for _ in range(2):
            shell = self.ready(name)
            if not (isinstance(shell, LocalShell) and shell.waits_as_template):
                return shell
            assert isinstance(self.anchor, NativeAnchor)
            with contextlib.suppress(AnchorLostError):
                shell.fork(self.anchor)
                return shell
            # The agent may have killed or stopped the template. Or the directory is gone: then the next start says so.
            self.kill(shell)
        # Whatever the reason is, a shell of its own works or says more.
        self._templates = False
        try:
            return self.ready(name)
        finally:
            self._templates = True

    def _may_be_template(self, session: ShellSession | None, script: bytes, environment: dict[str, str]) -> bool:
        """Return whether a shell that is about to be started may be a template."""
        return (
            self._templates
            and not self._shells
            and can_stand_for(session, script, environment)
            # A new anchor looks itself whether it is alone, and starts no templates if not.
            and (self.anchor is None or not processes.list_processes(self.idle_pids))
        )

    def drop_templates(self) -> None:
        """End the template: what its forks would be is not known any more. A shell that was forked stays."""
        for shell in self:
            assert isinstance(shell, LocalShell)
            if shell.waits_as_template:
                self._discard(shell)
            else:
                shell.drop_template()
        self._drop_folded()

    def _drop_folded(self) -> None:
        if (folded := self._folded) is not None:
            self._folded = None
            folded.close()
            if folded.kit is not None:
                folded.kit.lent = False

    def _fold(self, shell: Shell) -> bool:
        """Keep a shell's template for the next shell of its session, in whose place it is; return whether there is one.

        A bash that it has forked is ended.
        """
        if not isinstance(shell, LocalShell) or shell.template is None or shell.kit is None:
            return False
        if shell.forked:
            self._end([shell])
        if not shell.kit.is_as_made() or not shell.fold():
            return False
        del self._shells[shell.name]
        self._folded = shell
        return True

    def _unfold(self, name: str, session: ShellSession | None) -> LocalShell | None:
        """Return the shell that waits as a session's template; None without one. Another session's template ends."""
        folded, anchor = self._folded, self.anchor
        if folded is not None and folded.name == name and folded.session is session and not self._shells:
            assert folded.template is not None
            if anchor is not None and anchor.kit is folded.kit and folded.template.is_ready:
                self._folded = None
                return folded
        self._drop_folded()
        return None

    # -- replacing ---------------------------------------------------------------------------------------------------

    def _replace(self, shell: Shell) -> None:
        if not (isinstance(shell, LocalShell) and shell.forked and self._fold(shell)):
            self._discard(shell)

    def _discard(self, shell: Shell) -> None:
        self._end([shell])
        super().forget(shell)
        if (anchor := self.anchor) is None:
            return
        kit = anchor.kit
        if kit is not None and self._has_kit_of(shell):
            kit.lent = False
        if kit is None or not (kit.lent or kit.is_as_made()):
            # A command has changed the pipes, or the anchor has none to lend. It stays if it has other children.
            if self._shells:
                self._close_kit(anchor)
            else:
                self._drop_anchor()

    def _has_kit_of(self, shell: Shell) -> bool:
        assert isinstance(shell, LocalShell)
        return self.anchor is not None and shell.kit is not None and shell.kit is self.anchor.kit

    def _close_kit(self, anchor: Anchor) -> None:
        try:
            anchor.close_kit()
        except AnchorLostError:
            self._drop_anchor()

    def begin_checkpoint(self) -> bool:
        """Get the shells ready for a dump of the anchor's processes; return whether there still is an anchor.

        What is in a pipe would be lost, because CRIU does not see our end of it: a first dump, and the kit.
        """
        self.ready_all()
        if self.anchor is not None:
            self._close_kit(self.anchor)
        return self.anchor is not None

    def halt(self) -> None:
        """Have the kernel end all shells, without a wait: from now on they run nothing. `end` has to follow."""
        # A template runs no command, and may stay.
        for shell in self:
            if not shell.waits_as_template:
                shell.send_kill()

    def end(self) -> None:
        """Kill all shells, because none may hold files of layers that are about to change, and the anchor if it may.

        A template holds none, so it stays.
        """
        # The shells before the anchor: its children would become children of pid 1 otherwise.
        shells = [shell for shell in self if not self._fold(shell)]
        self._end(shells)
        for shell in shells:
            super().forget(shell)
        if (anchor := self.anchor) is None:
            return
        if (kit := anchor.kit) is not None:
            kit.lent = self._folded is not None
        if not (anchor.stays and kit is not None and kit.is_as_made() and not self.anchor_was_touched()):
            self._drop_anchor()

    @staticmethod
    def _end(shells: Sequence[Shell]) -> None:
        """Kill shells whose exit status is not needed, and wait until they have ended; their parent collects them."""
        for shell in shells:
            shell.send_kill()
        for shell in shells:
            select.select([shell.death], [], [], MAX_KILL_S)

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

    def _origin(self, session: ShellSession | None) -> tuple[bytes, dict[str, str]]:
        """Return the script by which a bash becomes a session, and the variables that it has before."""
        # A session that is not new brings its own variables in its script.
        return restore_script(session, self.workdir, self.pristine), self.environment if session is None else NO_LOOKUP

    def begin(self, name: str) -> None:
        """Have a session's shell started while this process does other things, and before any other is asked for.

        `renew` takes it over. If it cannot be started, `renew` finds out why.
        """
        session = self.sessions.get(name)
        with contextlib.suppress(ShellStartError, AnchorLostError):
            origin = self._origin(session)
            template = self._may_be_template(session, *origin)
            anchor = self._ready_anchor()
            assert anchor.kit is not None, "a new anchor has one"
            self._begun[name] = LocalShell.begin(anchor, anchor.kit, name, session, *origin, template=template)

    def _start(self, name: str, session: ShellSession | None) -> Shell:
        if (begun := self._begun.pop(name, None)) is not None:
            try:
                return begun()
            except AnchorLostError:
                self._drop_anchor()
        if (folded := self._unfold(name, session)) is not None:
            return folded
        # Two shells need no template: which of them had one would depend on what happened before.
        self.drop_templates()
        script, environment = self._origin(session)
        template = self._may_be_template(session, script, environment)
        if template and self.anchor is not None and self.anchor.kit is None:
            # Only a shell on a kit is a template, and a new anchor has one.
            self._drop_anchor()
        return self._under_the_anchor(
            lambda anchor: LocalShell.start(anchor, name, session, script, environment, template=template)
        )
