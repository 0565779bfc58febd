"""All shells of a sandbox: started when they are needed, replaced after each call that leaves nothing running."""

# Theory of operation.
#
# A session is what its last dump says. So a shell can be lost at any time without losing its session: the next one is
# restored from the dump. Only beside survivors is a shell kept, because it may have jobs.

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence

from sandboxes.guest.anchored_processes import MAX_KILL_S, READY_S, AnchoredProcesses
from sandboxes.guest.anchors.anchor import Anchor, ShellStartError
from sandboxes.guest.anchors.native_anchor import NativeAnchor
from sandboxes.guest.anchors.starter import AnchorLostError
from sandboxes.guest.anchors.template import ShellTemplate, can_stand_for
from sandboxes.guest.bash.restore import NO_LOOKUP, came_back, needs_trial, restore_script, taken_on_later
from sandboxes.guest.bash.session import KEPT, UNREADABLE, MalformedDumpError
from sandboxes.guest.shell import Output, Shell
from sandboxes.guest.shell_start import begin, start
from sandboxes.guest.users import ROOT, User
from sandboxes.linux import live_state, processes
from sandboxes.linux.live_state import inherited
from sandboxes.linux.spawn import BASH
from sandboxes.shell_text import ShellSession

_SIGNALLED = 128
"""The smallest exit code of a shell that a signal has ended."""


class Shells(AnchoredProcesses):
    """The shells of one sandbox, the kit that they are started on, and the template that stands for them."""

    def __init__(
        self,
        environment: dict[str, str],
        workdir: str,
        sessions: dict[str, ShellSession],
        pristine: ShellSession | None,
        user: User = ROOT,
        tail_bytes: int = 0,
    ) -> None:
        super().__init__(user)
        self.tail_bytes = tail_bytes  # How much of what is kept of a command's longer output are its last bytes.
        # `environment`, `workdir`: the variables and the directory of new sessions.
        self.environment, self.workdir = environment, workdir
        # `sessions`: the sessions that differ from a new one, by name.
        # `pristine`: a new shell's session; None until one has started.
        self.sessions, self.pristine = sessions, pristine
        self.born: list[str] = []  # What the first shell passed on to its children (`live_state.inherited`).
        self._shells: dict[str, Shell] = {}
        # Shells that the anchor was asked for, by session. Each function waits for one.
        self._begun: dict[str, Callable[[], Shell]] = {}
        # A shell that waits as a template, after the fork of its last command has ended.
        self._folded: Shell | None = None
        # Whether new shells may be templates.
        self._templates = True

    def __iter__(self) -> Iterator[Shell]:
        return iter(list(self._shells.values()))

    # -- one shell -----------------------------------------------------------------------------------------------------

    def ready(self, name: str) -> Shell:
        """Return a session's shell once its first dump has come, and once it can fork if it is a template."""
        shell = self._with_dump(name)
        if shell.waits_as_template:
            assert shell.template is not None
            assert shell.baseline is not None
            with contextlib.suppress(AnchorLostError):
                shell.template.await_ready()
                # It is not where its session says, and a fork would go there.
                if KEPT not in shell.baseline:
                    return shell
            self._templates = False
            self._discard(shell)
            return self._with_dump(name)
        return shell

    def _with_dump(self, name: str) -> Shell:
        shell = self._shells.get(name)
        if shell is not None and shell.ended:
            self.kill(shell)
            shell = None
        if shell is None:
            shell = self._shells[name] = self._start(name, self.sessions.get(name))
        if shell.baseline is None:
            self._await_first_dump(shell)
        return shell

    def for_command(self, name: str) -> Shell:
        """Return a session's shell once it can be given a command; see `ready`."""
        for _ in range(2):
            shell = self.ready(name)
            if not shell.waits_as_template:
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

    def take_dump(self, shell: Shell) -> tuple[int, bool]:
        """Return the exit status in a call's dump, and whether the session differs from before the call."""
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
        status = self.status_of(shell.pid)
        self.forget(shell)
        return status

    def forget(self, shell: Shell) -> None:
        """Forget a shell that has ended. What it left running may have its pipes, so no other shell gets them."""
        self._close(shell)
        if self.anchor is not None and self._has_kit_of(shell):
            self._close_kit(self.anchor)

    def _close(self, shell: Shell) -> None:
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
        raise ShellStartError(f"{BASH} does not start in this sandbox: {reason}", broken=broken)

    def _is_broken(self, name: str) -> bool:
        try:
            trial = self._start(name, None)
            self._await_first_dump(trial)
        except ShellStartError as error:
            return error.broken
        self.kill(trial)
        return False

    # -- starting ------------------------------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """Have a session's shell started while this process does other things; `renew` takes it over."""
        session = self.sessions.get(name)
        with contextlib.suppress(ShellStartError, AnchorLostError):
            origin = self._origin(session)
            template = self._may_be_template(name, session, *origin)
            anchor = self._ready_anchor()
            assert anchor.kit is not None, "a new anchor has one"
            self._begun[name] = begin(anchor, anchor.kit, name, session, *origin, template=template)

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
        template = self._may_be_template(name, session, script, environment)
        if template and self.anchor is not None and self.anchor.kit is None:
            # Only a shell on a kit is a template, and a new anchor has one.
            self._drop_anchor()
        return self._under_the_anchor(
            lambda anchor: start(anchor, name, session, script, environment, template=template)
        )

    def _origin(self, session: ShellSession | None) -> tuple[bytes, dict[str, str]]:
        # A session that is not new brings its own variables in its script.
        return restore_script(session, self.workdir, self.pristine), self.environment if session is None else NO_LOOKUP

    def _may_be_template(
        self, name: str, session: ShellSession | None, script: bytes, environment: dict[str, str]
    ) -> bool:
        return (
            self._templates
            and not self._shells
            # The start of the other session's shell would end the template, and a call could move its directory then.
            and self.sessions.keys() <= {name}
            and can_stand_for(session, script, environment)
            # A new anchor looks itself whether it is alone, and starts no templates if not.
            and (self.anchor is None or not processes.list_processes(self.idle_pids))
        )

    # -- the template, and the anchor ----------------------------------------------------------------------------------

    @property
    def anchor_pids(self) -> set[int]:
        """The processes of the anchor and of the template, if there are any."""
        return super().anchor_pids | {template.pid for template in self._living_templates()}

    def anchor_was_touched(self) -> bool:
        """Return whether a command may have changed the anchor or the template; see `AnchoredProcesses`."""
        touched = any(template.ready and template.was_touched for template in self._living_templates())
        return touched or super().anchor_was_touched()

    def _drop_anchor(self) -> None:
        # First: the pipes of a template go with the kit. A shell that waits as one ends with it.
        for shell in self:
            shell.drop_template()
        self._drop_folded()
        super()._drop_anchor()

    def _living_templates(self) -> Iterator[ShellTemplate]:
        shells = [*self._shells.values(), *([] if self._folded is None else [self._folded])]
        return (shell.template for shell in shells if shell.template is not None)

    def drop_templates(self) -> None:
        """End the template: what its forks would be is not known any more. A shell that was forked stays."""
        for shell in self:
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
        """Keep a shell's template for the next shell of its session; return whether there is one. Its fork ends."""
        if shell.template is None or shell.kit is None:
            return False
        if shell.forked:
            self._end([shell])
        if not shell.kit.is_as_made() or not shell.fold():
            return False
        del self._shells[shell.name]
        self._folded = shell
        return True

    def _unfold(self, name: str, session: ShellSession | None) -> Shell | None:
        """Return the shell that waits as a session's template; None without one. Another session's template ends."""
        folded, anchor = self._folded, self.anchor
        if folded is not None and folded.name == name and folded.session is session and not self._shells:
            assert folded.template is not None
            if anchor is not None and anchor.kit is folded.kit and folded.template.is_ready:
                self._folded = None
                return folded
        self._drop_folded()
        return None

    # -- all shells ----------------------------------------------------------------------------------------------------

    @property
    def outputs(self) -> dict[int, Output]:
        """The output streams of all shells, by descriptor."""
        return {output.fd: output for shell in self for output in (shell.out, shell.err)}

    @property
    def idle_pids(self) -> set[int]:
        """The processes that are ours and not the agent's."""
        return {shell.pid for shell in self} | self.anchor_pids

    def end_idle(self, running: str | None) -> list[str]:
        """End all shells but that of one session; return the names of all sessions that had a shell."""
        names = list(self._shells)
        for shell in self:
            if shell.name != running:
                self._replace(shell)
        live_state.forget_writes()
        return names

    def ready_all(self) -> None:
        """Wait for the first dumps of all shells, and have the template fork: each shell is in its directory then."""
        # In one order: the pids of later processes depend on it.
        for name in {**self._shells, **self.sessions}:
            shell = self._shells.get(name)
            if shell is None or shell.baseline is None:
                with unless_broken():
                    self.ready(name)
        for name in list(self._shells):
            with unless_broken():
                self.for_command(name)

    def renew(self, names: list[str], *, templates: bool = True) -> None:
        """Replace shells by fresh ones that are restored from their dumps. Those may be templates only if wanted."""
        # So what a dump leaves out never crosses calls, in a live sandbox as little as in a restored one.
        before, self._templates = self._templates, self._templates and templates
        try:
            for name in names:
                if name in self._shells:
                    self._replace(self._shells[name])
                with contextlib.suppress(ShellStartError):
                    self._shells[name] = self._start(name, self.sessions.get(name))
        finally:
            self._templates = before

    def _replace(self, shell: Shell) -> None:
        if not (shell.forked and self._fold(shell)):
            self._discard(shell)

    def _discard(self, shell: Shell) -> None:
        self._end([shell])
        self._close(shell)
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
        return self.anchor is not None and shell.kit is not None and shell.kit is self.anchor.kit

    def _close_kit(self, anchor: Anchor) -> None:
        try:
            anchor.close_kit()
        except AnchorLostError:
            self._drop_anchor()

    # -- states --------------------------------------------------------------------------------------------------------

    def begin_checkpoint(self) -> bool:
        """Get the shells ready for a dump of the anchor's processes; return whether there still is an anchor."""
        # What is in a pipe would be lost, because CRIU does not see our end of it: a first dump, and the kit.
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
        """Kill all shells, and the anchor if need be: none may hold files of layers that are about to change."""
        # A template holds none, so it stays.

        # The shells before the anchor: its children would become children of pid 1 otherwise.
        shells = [shell for shell in self if not self._fold(shell)]
        self._end(shells)
        for shell in shells:
            self._close(shell)
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

    def adopt(self, anchor: Anchor, shells: list[Shell]) -> None:
        """Take over what a checkpoint brought back."""
        self.anchor = anchor
        for shell in shells:
            self._shells[shell.name] = shell
            self.born = shell.born


def folder_of(shells: Shells, name: str) -> str:
    """Return the directory in which the next command of an idle session runs."""
    session = shells.sessions.get(name) or shells.pristine
    return shells.workdir if session is None else os.fsdecode(session["cwd"].encode("latin-1"))


@contextlib.contextmanager
def unless_broken() -> Iterator[None]:
    """Let a call go on without a shell that a command has broken; a call to that shell gets the answer."""
    try:
        yield
    except ShellStartError as error:
        if not error.broken:
            raise
