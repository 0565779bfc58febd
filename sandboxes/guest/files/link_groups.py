"""Hard links over frozen layers: once one name of a file was written or removed, all its names are in the upper layer.

Theory of operation. Overlayfs with an index shows the names of one lower file as one file, also after a write. But only
the name that was written is in the upper directory then, and the index is lost when that becomes a layer: the other
names would show the old file again. So after each call the other names are copied up too, as links of the same file.
Which they are, a walk through what lies below says. It is made only after a call that touched such a file.
"""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from sandboxes.guest.files.delta import DeltaRoots
from sandboxes.linux import trees
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.file_copy import is_opaque

# Overlayfs keeps the count of names in an attribute `user.*`, which only regular files can have (xattr(7)). So with an
# index, other files with several names can be neither removed nor written below: such states are not frozen, and over a
# base that has such files there is no index.

_File = tuple[int, int]
"""The device and the inode of a file of the lower layers."""


def copy_up_names(roots: DeltaRoots, top: int, changed: Iterable[str], known: Mapping[str, bytes]) -> bool:
    """Copy up the other names of lower files of which one name was written or removed; return whether any was."""
    # `top` is the sandbox's root as its processes see it, and `known` has all paths of the upper directory.
    wanted: dict[_File, int] = {}
    around = set[str]()
    for path in changed:
        for status in _hidden(roots, path):
            wanted[status.st_dev, status.st_ino] = status.st_nlink
            around.update(accumulate(path.split("/"), "{}/{}".format))
    copied = False
    for path in _names(roots.lower, wanted, around):
        if path not in known:
            copied |= _copy_up(top, path)
    return copied


def only_regular(folder: int) -> bool:
    """Return whether only regular files have several names in a directory of layers."""
    for inside in trees.folders(folder):
        for entry in inside.entries:
            regular = entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
            if not regular and entry.stat(follow_symlinks=False).st_nlink > 1:
                return False
    return True


def _hidden(roots: DeltaRoots, path: str) -> Iterator[os.stat_result]:
    """Yield the lower files with several names of which a path of the upper directory hides one."""
    folder, _, name = path.rpartition("/")
    within = trees.open_below(roots.lower, folder)
    if within is None:
        return
    with Opened(within), contextlib.suppress(FileNotFoundError):
        status = os.stat(name or ".", dir_fd=within, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            if status.st_nlink > 1:
                yield status
        elif name and _hides(roots.upper, path) and (below := trees.open_below(within, name)) is not None:
            with Opened(below):
                yield from (entry.stat for entry in _files(below) if entry.stat.st_nlink > 1)


def _hides(upper: int, path: str) -> bool:
    """Return whether nothing of a lower directory shows through what the upper directory has at its path."""
    folder = trees.open_below(upper, path)
    if folder is None:
        return True
    with Opened(folder):
        return is_opaque(folder)


class _Name(NamedTuple):
    path: str
    stat: os.stat_result


def _files(top: int) -> Iterator[_Name]:
    for folder in trees.folders(top):
        for entry in folder.entries:
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                yield _Name(folder.path + entry.name, status)


def _names(lower: int, wanted: dict[_File, int], around: Iterable[str]) -> Iterator[str]:
    """Yield the paths of lower files, given how many each has, and directories that may have some of them."""
    left, found = sum(wanted.values()), set[str]()
    # From the innermost outwards: names of one file are mostly near each other.
    for place in (*sorted(around, key=lambda path: -path.count("/")), "") if wanted else ():
        folder = trees.open_below(lower, place)
        if folder is None:
            continue
        with Opened(folder):
            for inside, status in _files(folder):
                path = f"{place}/{inside}" if place else inside
                if (status.st_dev, status.st_ino) in wanted and path not in found:
                    found.add(path)
                    yield path
                    left -= 1
                    if not left:
                        return


def _copy_up(top: int, path: str) -> bool:
    folder, _, name = path.rpartition("/")
    within = trees.open_below(top, folder)
    if within is None:
        return False
    # A process of the agent's may remove or replace it at any time. By a descriptor of the name, so that no link is
    # followed and no FIFO waited for.
    with (
        Opened(within), contextlib.suppress(FileNotFoundError),
        Opened(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)) as file,
    ):  # fmt: skip
        status = os.fstat(file)
        # A mount of ours may lie over this directory.
        if not stat.S_ISREG(status.st_mode) or os.fstat(within).st_dev != os.fstat(top).st_dev:
            return False
        os.chmod(f"/proc/self/fd/{file}", stat.S_IMODE(status.st_mode))  # noqa: PTH101
        return True
    return False
