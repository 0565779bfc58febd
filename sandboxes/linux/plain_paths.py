"""Paths without links, which stay the file or directory that they were when they were checked."""

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from sandboxes.linux.descriptors import Opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# With O_NOFOLLOW a link is opened itself (open(2), O_PATH), and nothing can be opened below it.
_PLAIN = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def plain_descriptor(path: str) -> int:
    """Return a descriptor (O_PATH) of a real path whose every part is a directory or a file and no link."""
    # A link that another process puts into the path later, even after a check of the path, is an `OSError` here.
    fd = os.open("/", _PLAIN)
    try:
        for part in filter(None, path.split("/")):
            inner = os.open(part, _PLAIN, dir_fd=fd)
            os.close(fd)
            fd = inner
        _require_plain(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def open_plain(path: "str | Path") -> "Iterator[Path]":
    """Open a path without links (`plain_descriptor`); yield a path below `/proc/self/fd` that stays the file."""
    from pathlib import Path  # noqa: PLC0415 - pathlib is not loaded in the launcher

    with Opened(plain_descriptor(str(path))) as fd:
        yield Path(f"/proc/self/fd/{fd}")


def _require_plain(fd: int, path: str) -> None:
    kind = os.fstat(fd).st_mode
    # A FIFO would block its reader, and a device may do anything when it is opened.
    if not (stat.S_ISDIR(kind) or stat.S_ISREG(kind)):
        raise OSError(errno.EINVAL, "it is a link or a special file, and no file or directory", path)
