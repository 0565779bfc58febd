"""Second copies of a database file: the three methods, and which of them a directory supports.

Theory of operation. A fork must cost the same for a large database as for a small one:

1. *Reflink* (XFS, btrfs): the file system shares the blocks until one of the two files is written.
2. *Link*: the fork is a second name (hard link) of the same file. All changes go to a write-ahead log beside it, never
   into the shared file, as long as no checkpoint moves the log into the database. Automatic checkpoints are off, and
   `hold` prevents the one of the last connection's close, with a lock that it needs.
3. *Copy*: all bytes are copied. This works everywhere.
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
"""The ioctl for a reflink (`linux/fs.h`)."""
_F_OFD_SETLK = 37
"""The fcntl command for a lock that belongs to an open file description (`fcntl.h`)."""
_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510
"""Start and length of the bytes that every open SQLite connection locks, shared (SQLite source, `os.h`)."""


class Method(Enum):
    """A method to make a second copy of a file."""

    REFLINK = "reflink"
    LINK = "WAL fork"
    COPY = "copy"


def clone(method: Method, source: Path, target: Path) -> None:
    """Create `target` as a second copy of `source`. A linked copy must never be written: see `hold`."""
    match method:
        case Method.REFLINK:
            _reflink(source, target)
        case Method.LINK:
            os.link(source, target)
        case Method.COPY:
            shutil.copyfile(source, target)


def best_copy(source: Path, target: Path, *, length: int | None = None) -> None:
    """Create `target` as an independent file, by reflink if possible, with the first `length` bytes (None: all)."""
    try:
        _reflink(source, target)
    except OSError:
        shutil.copyfile(source, target)
    if length is not None:
        os.truncate(target, length)


def hold(path: Path) -> int:
    """Keep SQLite from writing a log into the database at `path`, until the returned descriptor is closed."""
    # SQLite does that when the last connection closes, with an exclusive lock. A shared lock on the same bytes rules it
    # out, and works against this process too, because it belongs to the open file.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, _SHARED_FIRST, _SHARED_SIZE, 0)
    try:
        fcntl.fcntl(fd, _F_OFD_SETLK, lock)
    except OSError:
        os.close(fd)
        raise
    return fd


def choose(folder: Path) -> Method:
    """Return the fastest method that works between files in `folder`, by trying them."""
    with tempfile.TemporaryDirectory(prefix="forkpoint-check-", dir=folder) as trial:
        source = Path(trial) / "source"
        source.write_bytes(b"\0" * 4096)
        for method in (Method.REFLINK, Method.LINK):
            try:
                clone(method, source, Path(trial) / method.name)
            except OSError:
                continue
            return method
    return Method.COPY


def measure(folder: Path, method: Method, size_bytes: int) -> float:
    """Return the seconds that a method takes for one file in `folder`, as the median of five."""
    with tempfile.TemporaryDirectory(prefix="forkpoint-check-", dir=folder) as trial:
        source = Path(trial) / "source"
        source.write_bytes(os.urandom(1 << 20) * (size_bytes >> 20))
        durations = []
        for number in range(5):
            began = time.perf_counter()
            clone(method, source, Path(trial) / f"{number}")
            durations.append(time.perf_counter() - began)
    return sorted(durations)[2]


def _reflink(source: Path, target: Path) -> None:
    with source.open("rb") as from_file, target.open("xb") as to_file:
        try:
            fcntl.ioctl(to_file.fileno(), _FICLONE, from_file.fileno())
        except OSError:
            target.unlink()
            raise
