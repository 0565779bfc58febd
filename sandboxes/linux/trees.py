"""Walks through directory trees of the agent's making: without recursion, without links, and with a bounded depth.

Theory of operation. An agent can nest directories without end: a recursive function, a descriptor for each level, and a
path all run out. So a walk keeps a list of paths. It opens each directory by its path from the top, and the kernel
refuses a path that leads through a link (openat2(2), RESOLVE_NO_SYMLINKS). A directory that lies too deep ends the walk
with an error.
"""

import errno
import os
from collections.abc import Iterator
from typing import NamedTuple

from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened, open_unnoticed

MAX_DEPTH = 256
"""The most levels of nested directories. Real trees have less than 60: the deepest are those of JavaScript packages.
Python's recursion fails at about 1,000, and tar programs of other languages at similar depths."""

MAX_PATH_BYTES = 3_072
"""The longest path of a directory below the top. The kernel takes 4,096 bytes (path_resolution(7)). The rest is for the
name of a file, 255 bytes, and for the path of the data directory."""

TOO_DEEP = f"directories are nested more than {MAX_DEPTH} deep, or their paths are longer than {MAX_PATH_BYTES} bytes"
"""Why a tree is not walked."""

_HOW, _UNNOTICED = (
    kernel.open_how(
        os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | more,
        kernel.RESOLVE_NO_MAGICLINKS | kernel.RESOLVE_NO_SYMLINKS | kernel.RESOLVE_BENEATH,
    )
    for more in (0, os.O_NOATIME)
)


class TreeTooDeepError(Exception):
    """A tree has directories that are nested too deeply, or paths that are too long."""


class Folder(NamedTuple):
    """A directory of a walk, which closes its descriptor."""

    path: str  # Its path below the top, with a slash at the end; empty for the top itself.
    fd: int
    entries: list[os.DirEntry[str]]  # What is in it, in the order of names.


def open_below(top: int, path: str) -> int | None:
    """Return a descriptor of a directory below another one, by a path without links; None if there is none."""
    encoded = os.fsencode(path)
    if encoded.count(b"/") > MAX_DEPTH or len(encoded) > MAX_PATH_BYTES:
        raise TreeTooDeepError(TOO_DEEP)
    name = encoded.rstrip(b"/") or b"."
    try:
        # A path of one name has nothing but its end that could be a link. The plain call takes a third of the time.
        if b"/" not in name and name != b"..":
            return open_unnoticed(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, within=top)
        try:
            return kernel.openat2(top, name, _UNNOTICED)
        except PermissionError:
            return kernel.openat2(top, name, _HOW)
    # Running processes may have removed it, or have put a file or a link in its place.
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EXDEV}:
            return None
        raise


def list_entries(folder: int) -> list[os.DirEntry[str]]:
    """Return the entries of a directory in the order of names."""
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def folders(top: int) -> Iterator[Folder]:
    """Yield a directory, whatever it is renamed to, and all directories below it, each before those in it."""
    waiting = [""]
    while waiting:
        path = waiting.pop()
        fd = open_below(top, path)
        if fd is None:
            continue
        with Opened(fd):
            entries = list_entries(fd)
            # The last one is popped first. The names are kept, not the descriptors: a wide tree has many directories.
            waiting.extend(f"{path}{entry.name}/" for entry in reversed(entries) if _is_folder(entry))
            yield Folder(path, fd, entries)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
