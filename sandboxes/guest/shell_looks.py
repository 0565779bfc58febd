"""Looks at shells that later calls use: whether a call has changed one of them."""

from typing import TYPE_CHECKING

from sandboxes.guest.shells import Shells
from sandboxes.linux import live_state

if TYPE_CHECKING:
    from sandboxes.guest.shell import Shell


class ShellLooks:
    """The looks at the shells of one sandbox, before and after each call."""

    def __init__(self, shells: Shells) -> None:
        self._shells = shells
        self._noted: dict[Shell, object] = {}

    def note(self, running: str | None, *, stays: bool) -> None:
        """Note, before a call, what it may change of shells that later calls use."""
        # That are their pipes and, of shells that the call does not use, their limits, how often each was given a CPU,
        # and writes to its files in /proc. The look after the last call serves, if nothing has run since then. If
        # something survives (`stays`), the shells go on after the call and may run between calls.
        known, self._noted = {} if stays else self._noted, {}
        for shell in self._shells:
            if shell.name != running:
                # Beside survivors `LiveState` has it reported.
                if not stays:
                    shell.watch()
                self._noted[shell] = known.get(shell) or shell.at_rest()
            elif stays:
                self._noted[shell] = shell.pipes

    def touched(self, running: str | None) -> bool:
        """Return whether a call has changed something that was noted before it."""
        noted, self._noted = self._noted, {}
        for shell in self._shells:
            if shell in noted:
                self._noted[shell] = shell.pipes if shell.name == running else shell.facts()
        # The session's own shell may have ended with its call, which later calls do not see.
        gone = any(shell not in self._noted and shell.name != running for shell in noted)
        changed = any(noted[shell] != now for shell, now in self._noted.items())
        return gone or changed or (bool(noted) and live_state.was_written())
