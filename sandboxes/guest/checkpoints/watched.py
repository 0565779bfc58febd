"""Directories that processes watch (inotify(7)), by path: CRIU asks for them, since overlayfs cannot be asked."""

# Theory of operation.
#
# A watch is on an inode, and the kernel shows its number and its device only. CRIU looks for these at paths that it is
# given (`--irmap-scan-path`). So the processes' working and home directories are searched first, and then what is below
# the root, each level before the next. What is not found in time is not dumped: CRIU says so.
#
# This happens before CRIU stops the processes. Nothing relies on it: CRIU compares the inode of a path itself.

import contextlib
import os
from collections.abc import Iterator

MAX_WATCHED = 500
"""Most directories that are told to CRIU. It looks through all that is below the first ones for the others."""
_MAX_SEARCHED = 20_000
"""Most directories that are searched, some 10 us each."""
_MAX_ENVIRONMENT_BYTES = 1 << 16

Inode = tuple[int, int]
"""A device and the number of an inode on it."""


def watched_directories() -> list[str]:
    """Return the paths of the directories that processes of this sandbox watch; none if these are too many."""
    wanted, homes = set[Inode](), list[str]()
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - pathlib is not loaded in pid 1
        with contextlib.suppress(OSError):
            if watches := _watches(pid):
                wanted |= watches
                homes += _homes(pid)
    if not wanted or len(wanted) > MAX_WATCHED:
        return []
    found = dict(_found(wanted, [*homes, "/"]))
    # The deepest first, because CRIU looks below each path for the next ones. It knows the root by itself.
    return sorted(set(found.values()) - {"/"}, key=len, reverse=True)


def _watches(pid: str) -> set[Inode]:
    watches = set[Inode]()
    for number in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - pathlib is not loaded in pid 1
        if os.readlink(f"/proc/{pid}/fd/{number}") != "anon_inode:inotify":  # noqa: PTH115
            continue
        with open(f"/proc/{pid}/fdinfo/{number}") as file:  # noqa: PTH123
            for line in file:
                # inotify wd:1 ino:9e7e sdev:800013 mask:800afce ... (proc_pid_fdinfo(5))
                parts = dict(part.split(":", 1) for part in line.split() if part.count(":") == 1)
                if line.startswith("inotify"):
                    device = int(parts["sdev"], 16)
                    watches.add((os.makedev(device >> 20, device & 0xFFFFF), int(parts["ino"], 16)))
    return watches


def _homes(pid: str) -> list[str]:
    path = os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115
    homes = [path]
    with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
        variables = file.read(_MAX_ENVIRONMENT_BYTES).split(b"\0")
    homes += [os.fsdecode(value[5:]) for value in variables if value.startswith(b"HOME=/")]
    return homes


def _found(wanted: set[Inode], beginnings: list[str]) -> Iterator[tuple[Inode, str]]:
    missing, devices, seen = set(wanted), {device for device, _ in wanted}, set[Inode]()
    queue = [os.path.normpath(path) for path in beginnings]
    for searched, path in enumerate(queue):
        if not missing or searched >= _MAX_SEARCHED:
            return
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            inode = (status.st_dev, status.st_ino)
            if inode in seen:
                continue
            seen.add(inode)
            if inode in missing:
                missing.discard(inode)
                yield inode, path
            if path == "/" or status.st_dev in devices:
                with os.scandir(path) as entries:
                    queue += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
