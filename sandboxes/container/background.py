"""Processes that were left running in a container: their streams are FIFOs in a directory of the box, kept for them."""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sandboxes.container.cgroup_processes import Household
from sandboxes.container.shell import RIGHTS
from sandboxes.guest.background import BackgroundProcess, pending_outputs
from sandboxes.guest.process_io import death_of

NAMES = {0: "go", 1: "out", 2: "err"}
"""The FIFOs of a process, by the places that it has them at."""
_READS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_WRITES = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW


class ContainerBackgroundProcess(BackgroundProcess):
    """A background process whose streams are FIFOs in a directory of the box."""

    def __init__(
        self,
        description: Mapping[str, Any],
        ends: Mapping[int, int],
        death: int,
        pid: int,
        status: Callable[[], int],
        *,
        inner: int,
        folder: Path,
    ) -> None:
        """Take over a process that runs.

        Args:
            description: What it was started with.
            ends: Our ends of its streams, by stream number.
            death: A descriptor that is readable once it has ended.
            pid: Its process on this machine.
            status: Returns its exit code once it has ended.
            inner: Its process, as the container numbers it.
            folder: The directory of its FIFOs.
        """
        super().__init__(description, pending_outputs(ends), ends.get(0, -1), death, pid, status)
        self._inner, self._folder = inner, folder

    def remember(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep of it; its FIFOs are found by their directory."""
        return {**super().remember(), "inner": self._inner, "folder": self._folder.name}

    def close(self) -> None:
        """Close all descriptors of it, and remove its directory."""
        super().close()
        remove(self._folder)


def remove(folder: Path) -> None:
    """Remove a process's directory; whoever has its streams keeps them."""
    for path in folder.glob("*"):
        path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


class PendingRestore:
    """One that is on its way back from a checkpoint: the FIFOs that it knows are there for it to open again."""

    def __init__(self, told: dict[str, Any], box: Path) -> None:
        self._told, self._folder = told, box / told["folder"]
        self._folder.mkdir(mode=0o755)
        for name in NAMES.values():
            os.mkfifo(self._folder / name)
            (self._folder / name).chmod(0o666)
        # Open at both ends, so that nobody waits for another.
        self._held = {place: os.open(self._folder / name, RIGHTS) for place, name in NAMES.items()}

    def adopted(self, house: Household, status: Callable[[int], int]) -> ContainerBackgroundProcess:
        """Take it over, once it is back."""
        ends = {}
        for place in self._told["places"]:
            # Nobody reads what it has closed.
            with contextlib.suppress(OSError):
                ends[place] = os.open(self._folder / NAMES[place], _WRITES if place == 0 else _READS)
        for fd in self._held.values():
            os.close(fd)
        inner = self._told["inner"]
        pid = house.find(inner) or 0
        death = death_of(pid) if pid else os.eventfd(1, os.EFD_CLOEXEC)
        process = ContainerBackgroundProcess(
            self._told["told"], ends, death, pid, lambda: status(inner), inner=inner, folder=self._folder
        )
        process.recall(self._told)
        return process
