"""Second copies of a database file.

Theory of operation. A fork must cost the same for a large database as for a small one. So it is a second name (hard
link) of the same file. All changes go to a write-ahead log beside it, never into the shared file, as long as no
checkpoint moves the log into the database. Automatic checkpoints are off, and `hold` prevents the one of the last
connection's close, with a lock that it needs.
"""

import fcntl
import os
import shutil
import struct
import tempfile
from pathlib import Path

_FICLONE = 0x40049409
"""The ioctl for a reflink (`linux/fs.h`)."""
_F_OFD_SETLK = 37
"""The fcntl command for a lock that belongs to an open file description (`fcntl.h`)."""
_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510
"""Start and length of the bytes that every open SQLite connection locks, shared (SQLite source, `os.h`)."""


def clone(source: Path, target: Path) -> None:
    """Create `target` as a second copy of `source`, which must never be written: see `hold`."""
    try:
        os.link(source, target)
    except OSError:
        # File systems limit the links to one file (ext4: 65,000), and some have none.
        best_copy(source, target)


def can_link(folder: Path) -> bool:
    """Return whether files in a directory can have second names, by trying it."""
    with tempfile.NamedTemporaryFile(prefix="forkpoint-check-", dir=folder) as trial:
        second = Path(f"{trial.name}-2")
        try:
            os.link(trial.name, second)
        except OSError:
            return False
        second.unlink()
    return True


def best_copy(source: Path, target: Path, *, length: int | None = None) -> None:
    """Create `target` as an independent file, by reflink if possible, with the first `length` bytes (None: all)."""
    with source.open("rb") as from_file, target.open("xb") as to_file:
        try:
            # On XFS and btrfs, the two share their blocks until one of them is written.
            fcntl.ioctl(to_file.fileno(), _FICLONE, from_file.fileno())
        except OSError:
            shutil.copyfileobj(from_file, to_file, 1 << 20)
        if length is not None:
            to_file.truncate(length)


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
