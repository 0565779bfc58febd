"""What one entry of a directory is, as hashes: its kind, owner, mode, attributes, flags and content."""

# Theory of operation.
#
# A regular file is hashed in pieces. A piece of zeros counts for nothing, so a hole and written zeros are the same
# content, as they are to every program that reads them. Holes are skipped without reading: a sparse file of a terabyte
# costs what is written in it.
#
# Attributes are compared under the names that programs in the sandbox see. overlayfs keeps attributes of its own beside
# them (`user.overlay.opaque`). It stores an attribute of that prefix that a program sets under an escaped name,
# `user.overlay.overlay.…` (overlayfs.rst, "Nesting overlayfs mounts").

import errno
import hashlib
import os
import stat
from typing import NamedTuple

from sandboxes.linux.descriptors import Opened, open_unnoticed
from sandboxes.linux.file_flags import flags_of

HASH_BYTES = 16
"""The length of the hashes here: 128 bits, of SHA-256. Finding two contents with one hash takes 2**64 attempts."""

PIECE_BYTES = 1 << 20
"""The pieces in which a file is hashed. Smaller ones cost more calls, larger ones memory; 1 MiB is read in 0.1 ms."""

_ZEROS = bytes(PIECE_BYTES)

_TIMES_NS = range(-(1 << 63), 1 << 63)
"""The times that are stored in 64 bits: 1677 to 2262. File systems such as XFS and Btrfs keep seconds in 64 bits."""

_OPENED = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class Facts(NamedTuple):
    """Hashes of one entry."""

    what: bytes  # A hash of all that programs see of it, without its name and its time.
    content: bytes  # A hash of its content alone; empty for an entry without content.


def modified_ns(status: os.stat_result) -> int:
    """Return the modification time for comparisons, in 64 bits; a hash stands for one before 1677 or after 2262."""
    time_ns = status.st_mtime_ns
    if time_ns in _TIMES_NS:
        return time_ns
    return int.from_bytes(hashlib.blake2b(str(time_ns).encode(), digest_size=8).digest(), "little", signed=True)


def of_entry(name: str, status: os.stat_result, folder: int, marks: str, shared: str = "") -> Facts:
    """Return the hashes of an entry that is no directory. `marks` is the prefix of overlayfs' own attributes there."""
    # `shared` is the path that stands for its inode if there are several: writing to one path changes all.
    if stat.S_ISREG(status.st_mode):
        with Opened(open_unnoticed(name, _OPENED, within=folder)) as fd:
            inside, flags, attributes = _file_content(fd, status.st_size), flags_of(fd), _attributes(fd, marks)
    else:
        # A FIFO or a link cannot be opened for this, and there is no form of the call with a directory.
        inside, flags = content(name, status, folder), 0
        attributes = _attributes(f"/proc/self/fd/{folder}/{name}", marks)
    return Facts(_what(status, attributes, flags, (shared, inside)), inside)


def of_folder(status: os.stat_result, folder: int, marks: str, *, owned: bool = True) -> bytes:
    """Return the hash of a directory, without its entries, and without its owner unless `owned`; see `of_entry`."""
    return _what(status, _attributes(folder, marks), flags_of(folder), (), owned=owned)


def content(name: str, status: os.stat_result, folder: int) -> bytes:
    """Return the hash of an entry's content, or of a link's target; empty for an entry without content."""
    if stat.S_ISLNK(status.st_mode):
        return _hash(os.fsencode(os.readlink(name, dir_fd=folder)))
    if not stat.S_ISREG(status.st_mode):
        return b""
    with Opened(open_unnoticed(name, _OPENED, within=folder)) as fd:
        return _file_content(fd, status.st_size)


def _what(
    status: os.stat_result,
    attributes: list[tuple[str, bytes]],
    flags: int,
    more: tuple[object, ...],
    *,
    owned: bool = True,
) -> bytes:
    device = status.st_rdev if stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode) else 0
    owner = (status.st_uid, status.st_gid) if owned else ()
    return _hash(repr((status.st_mode, owner, device, attributes, flags, more)).encode())


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:HASH_BYTES]


def _file_content(fd: int, size: int) -> bytes:
    if size < PIECE_BYTES:
        # Nearly all files end here. One byte more than the size tells whether it has grown meanwhile.
        data = os.pread(fd, size + 1, 0)
        if len(data) <= size:
            return _hash(data)
    size, at = os.fstat(fd).st_size, 0
    whole = ContentHash(size)
    while (at := _next_data(fd, at, size)) < size:
        data = os.pread(fd, PIECE_BYTES, at)
        if not data:
            break
        whole.update(at, data)
        at += PIECE_BYTES
    return whole.digest()


class ContentHash:
    """The hash of a regular file's content, computed from its pieces; `content` returns the same."""

    def __init__(self, size: int) -> None:
        self._size, self._whole = size, hashlib.sha256()

    def update(self, at: int, data: bytes) -> None:
        """Add a piece: `PIECE_BYTES` (the last may be shorter) at a rising multiple of that. Gaps are zeros."""
        # hashlib gives up the interpreter's lock for large pieces, so other threads go on.
        if self._size < PIECE_BYTES:
            self._whole.update(data)
        elif data != _ZEROS[: len(data)]:
            self._whole.update(at.to_bytes(8, "little") + len(data).to_bytes(4, "little"))
            self._whole.update(data)

    def digest(self) -> bytes:
        """Return the hash, after the last piece. Call it once."""
        if self._size >= PIECE_BYTES:
            self._whole.update(self._size.to_bytes(8, "little") + b"size")
        return self._whole.digest()[:HASH_BYTES]


def _next_data(fd: int, at: int, size: int) -> int:
    """Return the beginning of the first piece at or after an offset that may hold data; the size if there is none."""
    try:
        start = os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        # ENXIO: only a hole follows. Other errors: this file system cannot tell, so everything is read.
        return size if error.errno == errno.ENXIO else at
    # Pieces begin at multiples of their size, wherever the holes of this file system begin.
    return start - start % PIECE_BYTES


def _attributes(target: int | str, marks: str) -> list[tuple[str, bytes]]:
    follow = isinstance(target, int)
    try:
        names = os.listxattr(target, follow_symlinks=follow)
    except OSError as error:
        if error.errno in {errno.ENOTSUP, errno.ENOENT}:
            return []
        raise
    attributes = []
    for name in names:
        seen = name
        if marks and name.startswith(marks):
            if not name.startswith(f"{marks}overlay."):
                continue
            seen = marks + name.removeprefix(f"{marks}overlay.")
        try:
            attributes.append((seen, os.getxattr(target, name, follow_symlinks=follow)))
        except OSError:
            # Removed meanwhile, or listed by the kernel but not readable here: its name counts all the same.
            attributes.append((seen, b""))
    return sorted(attributes)
