"""What outlives a call, and so is part of the state: processes, what shells hold, System V objects, untaken output."""

import time
from collections.abc import Callable
from typing import Any

from sandboxes.guest.background import AllLeft
from sandboxes.guest.shell_pool import Shells
from sandboxes.linux import processes
from sandboxes.linux.processes import Process

_KINDS = {
    "descriptors": "the shell holds open descriptors",
    "ipc": "System V IPC objects exist",
    "jobs": "the shell has jobs",
}


class Alive:
    """That of one sandbox. living: returns all its processes, ours too. `now`: equal where the same things live."""

    def __init__(self, shells: Shells, left: AllLeft, living: Callable[[], set[Process]]) -> None:
        self._shells, self._left, self._living = shells, left, living
        self._settled = 0
        self.now: frozenset[Any] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.now)

    @property
    def processes(self) -> list[Process]:
        """Those of the agent's that live."""
        return [(entry[0], entry[1]) for entry in self.now if isinstance(entry[0], int)]

    @property
    def has_ipc_objects(self) -> bool:
        """Whether there are System V objects, which no checkpoint holds."""
        return any(kind == "ipc" for kind, *_ in self.now)

    @property
    def who(self) -> str:
        """What lives, in words: five of it at most."""
        return "; ".join(sorted({_KINDS.get(str(kind), f"process {kind} lives") for kind, *_ in self.now})[:5])

    def settle(self, *, patient: bool = True) -> None:
        """Find out what outlives the call, with some grace for what is just about to end."""
        self._settled += 1
        left = self._outliving() if patient else self._others()
        # Each call may move what descriptors point at, or write to shared memory: these are never what they were.
        held = {("descriptors", shell.name, shell.runs) for shell in self._shells.holding()}
        objects = processes.ipc_objects()
        now: set[Any] = left | held | ({("ipc", objects, self._settled)} if objects else set()) | self._left.state
        if now:
            # These shells are not replaced after the call: what they know of their children lives on with them.
            now |= {("jobs", shell.name, *shell.jobs) for shell in self._shells if shell.jobs}
        self.now = frozenset(now)

    def _outliving(self) -> set[Process]:
        grace, pauses_s = processes.Grace(), iter(processes.PAUSES_S)
        pause_s = 0.0
        while True:
            left = self._others()
            unknown = left - self.now
            if unknown and self._shells.arriving:
                # A shell on its way may have children that are not the agent's.
                self._shells.ready_all()
                continue
            if not unknown or grace.expired(unknown):
                return left
            pause_s = next(pauses_s, pause_s)
            time.sleep(pause_s)

    def _others(self) -> set[Process]:
        found, ours = self._living(), self._shells.idle_pids
        return {process for process in found if process[0] not in ours}
