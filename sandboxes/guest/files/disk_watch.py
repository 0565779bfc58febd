"""The watch over a sandbox's disk use: whether it has written too much, or the disk has too little room."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable

from sandboxes.guest.files import deleted_files, delta
from sandboxes.guest.files.deleted_files import TooManyDescriptorsError
from sandboxes.linux.trees import MAX_DEPTH, MAX_PATH_BYTES, TreeTooDeepError

WATCH_S = 0.1
"""The longest interval between two looks at disk use and at servers during a call."""


def free_bytes(folder: int) -> int:
    """Return the free bytes of the disk that a directory is on."""
    return free_of(folder)[0]


def free_of(folder: int | str) -> tuple[int, int]:
    """Return the free bytes of a disk, and the free inodes as the bytes that they count for."""
    # f_bavail leaves out the blocks that are reserved for root (statvfs(3)), so "free" means the same for every user.
    disk = os.statvfs(folder)
    # A file system without a fixed number of inodes, such as btrfs, reports zero.
    inodes = disk.f_favail if disk.f_files else disk.f_bavail
    return disk.f_bavail * disk.f_frsize, inodes * delta.ENTRY_BYTES


def limit_note(ending: str, disk_bytes: int) -> bytes:
    """Return the line that tells the agent which limit, as a watch returned it, has ended its call (pure)."""
    if ending == "depth":
        text = f"the sandbox may nest directories {MAX_DEPTH} deep, with paths of {MAX_PATH_BYTES} bytes: remove them"
    elif ending == "disk":
        smallest = delta.ENTRY_BYTES >> 10
        text = f"killed: the sandbox may hold {disk_bytes >> 20} MB of new files, each of {smallest} kB at least"
    elif ending == "pids":
        text = "killed: the sandbox may run no more processes and threads at once (limits.pids)"
    else:
        return b""
    return f"\n[forkpoint: {text}]\n".encode()


class DiskWatch:
    """Says whether a sandbox has used too much disk. It lives as long as the sandbox, so that no growth is missed."""

    def __init__(self, upper: int, limit: int, reserve: int) -> None:
        """Watch a sandbox that may have `limit` bytes of new files; see `delta.ENTRY_BYTES` for small files."""
        # With fewer free bytes on the disk than the reserve, or inodes for them, failures are the machine's.
        # `below_bytes`: what the sandbox has written into layers already.
        # `held_bytes`: what else it held after its last call.
        self.upper, self.below_bytes, self.held_bytes = upper, 0, 0
        # The free bytes of the disk when the files could be measured for the last time; None if they can be measured.
        # Until the agent has removed what is nested too deeply, all that the disk has lost since counts.
        self.unmeasured_free: int | None = None
        self._limit, self._reserve, self._step = limit, reserve, min(limit // 8, 16 << 20)
        # Free space is one cheap system call; a walk of the upper directory is not. Other writers on the same disk only
        # make it measure earlier.
        self._free, self._looked = free_of(upper), time.monotonic()
        # What was free at the last look that could not measure; None if the last one could.
        self._tried: tuple[int, int] | None = None

    def over(self, pids: Callable[[], Iterable[int]]) -> str | None:
        """Return a reason if the sandbox has used too much disk. Called often, it looks now and then.

        It measures the files, and the deleted ones that processes hold, only when the disk's free space or inodes have
        fallen enough for them to have grown over the limit. The reasons are "disk" over the limit, "depth" if
        directories are nested too deeply to be measured, and "host" if the reserve is touched, or the disk lost more
        than the limit beside too many descriptors.
        """
        if time.monotonic() - self._looked < WATCH_S / 2:
            return None
        self._looked, now = time.monotonic(), free_of(self.upper)
        reason = self._reason(now, pids)
        if reason in ("disk", "depth"):
            self._free = now
        return reason

    def _reason(self, now: tuple[int, int], pids: Callable[[], Iterable[int]]) -> str | None:
        if min(now) < self._reserve:
            return "host"
        if not self._has_fallen(self._free, now):
            # What others free must not hide what this sandbox takes.
            self._free = max(self._free[0], now[0]), max(self._free[1], now[1])
            return None
        exceeded = max(self._free[0] - now[0], self._free[1] - now[1]) > self._limit
        if self._tried is not None and not exceeded and not self._has_fallen(self._tried, now):
            return None
        try:
            reason = self._measured(now, pids)
        except TooManyDescriptorsError:
            # Others may have written it as well, so it is no answer of the call's. What was free before is kept.
            self._tried = now
            return "host" if exceeded else None
        self._tried = None
        if reason is None:
            self._free = now
        return reason

    def _has_fallen(self, before: tuple[int, int], now: tuple[int, int]) -> bool:
        return max(before[0] - now[0], before[1] - now[1]) >= self._step

    def _measured(self, now: tuple[int, int], pids: Callable[[], Iterable[int]]) -> str | None:
        """Return "disk", "depth" or None, by the files."""
        # `TooManyDescriptorsError` says that those that are not deleted are within the limit, and the others are not
        # known.
        if self.unmeasured_free is not None:
            return "disk" if self.below_bytes + self.unmeasured_free - now[0] > self._limit else None
        deleted: int | None = None
        with contextlib.suppress(TooManyDescriptorsError):
            deleted = deleted_files.size_bytes(pids())
        # A call that removes what an earlier one has written too much is not ended because others write to the disk.
        held = self.below_bytes + self.held_bytes
        most = self._limit if held <= self._limit else held + self._step
        try:
            room = most - self.below_bytes - (deleted or 0)
            over = room < 0 or delta.size_bytes(self.upper, room) > room
        except TreeTooDeepError:
            return "depth"
        if deleted is None and not over:
            raise TooManyDescriptorsError
        return "disk" if over else None
