"""Three ways to a second copy of a database file, and which of them a directory has.

reflink: the file system shares the blocks until one of the two is written (XFS, btrfs). link: the same file under a
second name, whose changes go to a log beside it, never into it. copy: all bytes.
"""

import fcntl
import os
import shutil
import struct
import tempfile
import time
from enum import Enum
from pathlib import Path

_FICLONE = 0x40049409
_F_OFD_SETLK = 37
_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510
"""The bytes that every SQLite connection locks, shared, while it has a database open (its file format's document)."""


class Method(Enum):
    REFLINK = "reflink"
    LINK = "WAL fork"
    COPY = "copy"


def place(method: Method, source: Path, target: Path) -> None:
    """Make target a second source. A link may never be written to: see `hold`.

    Raises:
        OSError: this file system has no such way, or no room.
    """
    match method:
        case Method.REFLINK:
            _reflink(source, target)
        case Method.LINK:
            os.link(source, target)
        case Method.COPY:
            shutil.copyfile(source, target)


def best_copy(source: Path, target: Path, *, length: int | None = None) -> None:
    """Make target a file of its own with source's content, or its first length bytes; by reflink where there is one."""
    try:
        _reflink(source, target)
    except OSError:
        shutil.copyfile(source, target)
    if length is not None:
        os.truncate(target, length)


def hold(path: Path) -> int:
    """Keep any connection from writing its log into the database at path while the descriptor returned is open.

    SQLite does so when the last connection closes, and only if it gets a lock that this one rules out. The lock goes
    with the open file, so that it also holds against this process.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, _SHARED_FIRST, _SHARED_SIZE, 0)
    try:
        fcntl.fcntl(fd, _F_OFD_SETLK, lock)
    except OSError:
        os.close(fd)
        raise
    return fd


def choose(folder: Path) -> Method:
    """Return the best way that works between files in folder. 1 ms."""
    with tempfile.TemporaryDirectory(prefix="forkpoint-check-", dir=folder) as trial:
        source = Path(trial) / "source"
        source.write_bytes(b"\0" * 4096)
        for method in (Method.REFLINK, Method.LINK):
            try:
                place(method, source, Path(trial) / method.name)
            except OSError:
                continue
            return method
    return Method.COPY


def measure(folder: Path, method: Method, size_bytes: int) -> float:
    """Return the seconds that method takes for a file of this size in folder, median of five."""
    with tempfile.TemporaryDirectory(prefix="forkpoint-check-", dir=folder) as trial:
        source = Path(trial) / "source"
        source.write_bytes(os.urandom(1 << 20) * (size_bytes >> 20))
        took = []
        for number in range(5):
            began = time.perf_counter()
            place(method, source, Path(trial) / f"{number}")
            took.append(time.perf_counter() - began)
    return sorted(took)[2]


def _reflink(source: Path, target: Path) -> None:
    with source.open("rb") as from_file, target.open("xb") as to_file:
        try:
            fcntl.ioctl(to_file.fileno(), _FICLONE, from_file.fileno())
        except OSError:
            target.unlink()
            raise
