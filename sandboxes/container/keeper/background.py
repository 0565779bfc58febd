"""Background processes of a container. Their streams are FIFOs in a directory of the box."""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sandboxes.container.keeper.cgroup_processes import ContainerProcesses
from sandboxes.container.keeper.file_kit import RIGHTS
from sandboxes.guest.background import BackgroundProcess, pending_outputs
from sandboxes.guest.process_io import death_of
from sandboxes.linux.descriptors import close_all

NAMES = {0: "go", 1: "out", 2: "err"}
"""The FIFOs of a process, by its stream numbers."""

# Without O_NONBLOCK these opens would wait for a process at the other end (fifo(7)), which may have closed its stream.
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
        """Return what a checkpoint stores about the process; a restore finds its FIFOs by their directory."""
        return {**super().remember(), "inner": self._inner, "folder": self._folder.name}

    def close(self) -> None:
        """Close the keeper's descriptors, and remove the directory."""
        # The process keeps its open FIFOs after the names are gone; its next write then meets a FIFO without a reader,
        # and gets SIGPIPE (pipe(7)).
        super().close()
        remove(self._folder)


def remove(folder: Path) -> None:
    """Remove a process's directory. Processes that have the FIFOs open keep them."""
    for path in folder.glob("*"):
        path.unlink()
    # A directory that is not empty stays until the box is removed with its container.
    with contextlib.suppress(OSError):
        folder.rmdir()


class PendingRestore:
    """A background process that CRIU is about to restore: its FIFOs exist again under the names that it had open."""

    def __init__(self, stored: dict[str, Any], box: Path) -> None:
        """Make the FIFOs.

        Args:
            stored: What `ContainerBackgroundProcess.remember` returned.
            box: The container's box.
        """
        self._stored, self._folder = stored, box / stored["folder"]
        self._folder.mkdir(mode=0o755)
        for name in NAMES.values():
            os.mkfifo(self._folder / name)
            # The process may run as any user of the image, and the umask applies to mkfifo but not to chmod.
            (self._folder / name).chmod(0o666)
        # Open at both ends, so that CRIU's opens do not block.
        self._held = {number: os.open(self._folder / name, RIGHTS) for number, name in NAMES.items()}

    def adopted(self, members: ContainerProcesses, status: Callable[[int], int]) -> ContainerBackgroundProcess:
        """Return the process after CRIU has restored it."""
        ends = {}
        for number in self._stored["places"]:
            # `_held` still has both ends open, so no open waits, and none fails for want of another end (fifo(7)).
            # Closing it below puts a stream that the process had closed at its end.
            with contextlib.suppress(OSError):
                ends[number] = os.open(self._folder / NAMES[number], _WRITES if number == 0 else _READS)
        close_all(self._held.values())
        # The inner pid is the only number that a restore keeps; the pid on this machine is another one.
        inner = self._stored["inner"]
        pid = members.find(inner) or 0
        # A process that ended in between has no descriptor. An event that is readable at once makes it count as ended.
        death = death_of(pid) if pid else os.eventfd(1, os.EFD_CLOEXEC)
        process = ContainerBackgroundProcess(
            self._stored["told"], ends, death, pid, lambda: status(inner), inner=inner, folder=self._folder
        )
        # Output that was read but not polled before the checkpoint comes from the stored text, not from the FIFO.
        process.recall(self._stored)
        return process
