"""Copies of single entries of an overlay's upper directory: content with its holes, modes, owners, attributes, times.

Everything is named by a directory's descriptor and a name in it, so that no link leads a copy elsewhere. Owners come
before modes and attributes, because chown(2) clears set-user-id bits and file capabilities. Times come last.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path

from sandboxes.linux.descriptors import Opened, open_unnoticed
from sandboxes.linux.file_flags import copy_flags

_CHUNK = 16 << 20
"""Bytes that one copy_file_range or pread takes, which bounds the memory of a fallback to pread."""

_SMALL = 128 << 10
"""Files up to this size are read and written in one call each: with more calls, small files dominate a restore."""

MARKS = "user.overlay."
"""The prefix of overlayfs' own attributes, in mounts with `userxattr` as sandboxes have them. All but `OPAQUE` name the
inode that a file was copied up from."""
OPAQUE = f"{MARKS}opaque"
"""The attribute of a directory that hides the entries of lower layers."""


def is_whiteout(status: os.stat_result) -> bool:
    """Return whether a file is a whiteout, which hides a name of lower layers (overlayfs.rst)."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def is_opaque(folder: int | Path) -> bool:
    """Return whether a directory of an upper, or of a layer, hides the entries of the layers below; see `is_mark`."""
    try:
        return os.getxattr(folder, OPAQUE) == b"y"
    except OSError:
        return False


def is_mark(attribute: str) -> bool:
    """Return whether an attribute is overlayfs' own; a program's is `user.overlay.overlay.…`."""
    return attribute.startswith(MARKS) and not attribute.startswith(f"{MARKS}overlay.")


def copy_entry(name: str, status: os.stat_result, source: int, target: int) -> None:
    """Copy an entry that is no directory to the same free name elsewhere, without attributes of overlayfs' own."""
    if stat.S_ISREG(status.st_mode):
        _copy_file(name, status, source, target)
        return
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    else:
        # Only whiteouts, FIFOs and sockets come here: sandboxes lack the capability MKNOD.
        os.mknod(name, status.st_mode, status.st_rdev, dir_fd=target)
        if is_whiteout(status):
            # Its time alone: a layer's manifest has it.
            os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False)
            return
    copy_facts(name, status, source, target)


def _copy_file(name: str, status: os.stat_result, source: int, target: int) -> None:
    """Copy a regular file with as few system calls as possible: a restore spends most of its time here."""
    with (
        Opened(open_unnoticed(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, within=source)) as reading,
        # O_EXCL never opens what is there already, a symlink included (open(2)).
        Opened(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)) as writing,
    ):
        # A file with fewer blocks than bytes has holes, which a plain read would fill.
        if status.st_size <= _SMALL and status.st_blocks * 512 >= status.st_size:
            # A regular file is read and written in one piece up to this size; the sandbox's processes stand still or do
            # not exist yet.
            os.write(writing, os.read(reading, _SMALL + 1))
        else:
            copy_content(reading, writing, status.st_size)
        # Also root's: in a directory with the set-group-ID bit a new file has the directory's group.
        os.fchown(writing, status.st_uid, status.st_gid)
        os.fchmod(writing, stat.S_IMODE(status.st_mode))
        for attribute in os.listxattr(reading):
            if not is_mark(attribute):
                os.setxattr(writing, attribute, os.getxattr(reading, attribute))
        copy_flags(reading, writing)
        os.utime(writing, ns=(status.st_atime_ns, status.st_mtime_ns))


def copy_content(reading: int, writing: int, size: int) -> None:
    """Copy the data of a file and keep its holes, which take no disk. Reflinks share blocks where there are any."""
    at = 0
    while at < size:
        try:
            start = os.lseek(reading, at, os.SEEK_DATA)
        except OSError as error:
            # ENXIO: there is no data after this offset, only a hole up to the end.
            if error.errno != errno.ENXIO:
                raise
            break
        # Each file has a virtual hole at its end, so this finds one always (lseek(2)).
        end = os.lseek(reading, start, os.SEEK_HOLE)
        at = start
        while at < end:
            copied = _copy_range(reading, writing, at, min(end - at, _CHUNK))
            # The file became shorter meanwhile. ftruncate below restores the length that the status had.
            if not copied:
                break
            at += copied
    # A hole at the end has no data to write, so the size is set explicitly.
    os.ftruncate(writing, size)


def _copy_range(reading: int, writing: int, at: int, count: int) -> int:
    try:
        return os.copy_file_range(reading, writing, count, at, at)
    except OSError as error:
        # Source and target may be different file systems, or ones that cannot copy in the kernel.
        if error.errno not in {errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}:
            raise
    return os.pwrite(writing, os.pread(reading, count, at), at)


def copy_facts(name: str, status: os.stat_result, source: int, target: int) -> None:
    """Give a copy the owner, mode, attributes and times of the original; for the arguments see `copy_entry`."""
    os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        # Linux has no chmod without following links; this is no link.
        os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=target)
    # There are no *at() forms of these calls in Python. The path through the descriptor names the same directory,
    # whatever its parents are renamed to.
    _copy_attributes(f"/proc/self/fd/{source}/{name}", f"/proc/self/fd/{target}/{name}")
    os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _copy_attributes(source: str, target: str) -> None:
    # The target may have attributes of the image's directory that the source had removed.
    names = [name for name in os.listxattr(source, follow_symlinks=False) if not is_mark(name)]
    for name in set(os.listxattr(target, follow_symlinks=False)) - set(names):
        if not is_mark(name):
            # The kernel lists some attributes that it makes up itself and that cannot be removed.
            with contextlib.suppress(OSError):
                os.removexattr(target, name, follow_symlinks=False)
    for name in names:
        os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
