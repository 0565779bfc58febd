"""Files that were deleted while a process holds them: they take room on the disk, and no directory shows them."""

import os
import stat
from collections.abc import Iterable, Iterator

from sandboxes.linux.descriptors import memory_device
from sandboxes.linux.user_counts import under_way

MAX_DESCRIPTORS = 20_000
"""The most descriptors that one look reads, in 0.2 s. A sandbox may have some ten million: 512 threads share 65,536.
While pid 1 looks at them it watches neither time nor disk. A hundred threads with a hundred open files each are
below."""


class TooManyDescriptorsError(Exception):
    """Processes have more descriptors than one look reads."""


def size_bytes(pids: Iterable[int]) -> int:
    """Return the bytes on disk of the deleted files that processes have open."""
    # Threads count by themselves, because each may have descriptors of its own (clone(2), CLONE_FILES).
    found = {}
    for path in _descriptors(pids):
        try:
            status = os.stat(path)  # noqa: PTH116 - pathlib is not loaded in pid 1
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and status.st_dev != memory_device():
            found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def are_hidden(pids: Iterable[int]) -> bool:
    """Return whether processes may hold deleted files in a way whose size cannot be seen."""
    # They map them, have them under way in a socket, do not show their descriptors (PR_SET_DUMPABLE), or have too many.
    pids = list(pids)
    try:
        return any(map(_maps_deleted, pids)) or any(map(_carries_descriptors, _descriptors(pids, strictly=True)))
    except (PermissionError, TooManyDescriptorsError):
        return True


def _descriptors(pids: Iterable[int], *, strictly: bool = False) -> Iterator[str]:
    """Yield the descriptors of all threads; if `strictly`, a process that hides them raises `PermissionError`."""
    count = 0
    for pid in pids:
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
                folder = f"/proc/{pid}/task/{thread}/fd"
                names = os.listdir(folder)  # noqa: PTH208
                count += len(names)
                if count > MAX_DESCRIPTORS:
                    raise TooManyDescriptorsError
                yield from (f"{folder}/{name}" for name in names)
        except PermissionError:
            if strictly:
                raise
        except OSError:
            continue


def _maps_deleted(pid: int) -> bool:
    """Return whether a process maps a deleted file; `PermissionError` if it does not show what it maps."""
    memory = b"%02x:%02x" % (os.major(memory_device()), os.minor(memory_device()))
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:  # noqa: PTH123
            rows = (line.split(maxsplit=5) for line in file if line.endswith(b" (deleted)\n"))
            return any(row[3] != memory for row in rows)
    except (FileNotFoundError, ProcessLookupError):
        return False


def _carries_descriptors(path: str) -> bool:
    try:
        return os.readlink(path).startswith("socket:") and bool(under_way(path.replace("/fd/", "/fdinfo/")))  # noqa: PTH115
    except (FileNotFoundError, ProcessLookupError):
        return False
