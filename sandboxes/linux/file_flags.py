"""Flags of files, which `chattr` sets and `lsattr` shows (ioctl_iflags(2))."""

import array
import contextlib
import fcntl
import os

from sandboxes.linux.descriptors import Opened

_GET, _SET = 0x80086601, 0x40086602
"""FS_IOC_GETFLAGS and FS_IOC_SETFLAGS (linux/fs.h)."""

_SETTABLE = 0x6283_C4FF
"""The flags that a user can set (FS_FL_USER_MODIFIABLE in linux/fs.h), without those that the file system sets."""
_TOP_OF_HIERARCHIES = 0x0002_0000
"""FS_TOPDIR_FL: what is below one entry of the directory has nothing to do with what is below another."""


def flags_of(fd: int) -> int:
    """Return the flags that a program has set on a file or directory; 0 where the file system has none."""
    value = array.array("L", [0])
    try:
        fcntl.ioctl(fd, _GET, value)
    except OSError:
        return 0
    return value[0] & _SETTABLE


def copy_flags(source: int, target: int) -> None:
    """Give a copy the flags of the original, as far as its file system has them."""
    flags = flags_of(source)
    if flags != flags_of(target):
        with contextlib.suppress(OSError):
            fcntl.ioctl(target, _SET, array.array("L", [flags]))


def spread_below(folder: str) -> None:
    """Have ext4 put each new directory in a directory into a block group of its own (chattr(1), `T`)."""
    # Without a journal, ext4 passes over each inode of a block group that was deleted in the last minute whenever it
    # makes a file there (`recently_deleted` in fs/ext4/ialloc.c). Other file systems ignore or refuse the flag.
    with Opened(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd, contextlib.suppress(OSError):
        fcntl.ioctl(fd, _SET, array.array("L", [flags_of(fd) | _TOP_OF_HIERARCHIES]))
