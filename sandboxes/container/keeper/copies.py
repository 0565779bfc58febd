"""Copies of a container's upper directory, which holds what differs from the image.

`Copy.take` writes a copy at a freeze; `lay_over` puts it over a fresh container at a restore. A copy holds what
`docker commit` would keep: content, modes, owners, extended attributes and whiteouts. It also keeps times and hard
links. Four rules hold throughout; each stands at the line that keeps it.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping

OPAQUE = "trusted.overlay.opaque"
"""The attribute of a directory that hides everything below it in the image."""

MARKS = "trusted.overlay."
"""The prefix of all attributes that overlayfs uses for itself."""

_SPECIAL = frozenset(["proc", "dev", "sys"])
"""Top-level directories over which a container has mounts: nothing below them belongs to its files."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 16 << 20
"""Bytes that one copy_file_range or pread takes, which bounds the memory of a fallback to pread."""

_SMALL = 128 << 10
"""Files up to this size are read and written in one call each: with more calls, small files dominate a restore."""

Links = dict[str, str]
"""Paths of further hard links, each with the path under which the copy has the file."""


class Copy:
    """Copies an upper directory into an empty one.

    Attributes:
        links: The hard links in the original, known after `take`.
        added_bytes: The bytes on disk of files that no earlier copy has, known after `take`.
    """

    def __init__(self, earlier: Callable[[str], str | None]) -> None:
        """Start with nothing copied.

        Args:
            earlier: Returns the path of an unchanged file in an earlier copy; None if there is none.
        """
        self.links: Links = {}
        self.added_bytes = 0
        self._earlier = earlier
        self._seen: dict[int, str] = {}

    def take(self, source: int, target: int, prefix: str = "") -> None:
        """Copy the directory `source` into `target`, both descriptors; 0.1 ms a file."""
        # The listing is complete and closed before anything is copied, so a level of the recursion holds two
        # descriptors only.
        for entry in _entries(source):
            path = prefix + entry.name
            status = entry.stat(follow_symlinks=False)
            if not prefix and entry.name in _SPECIAL:
                continue
            if stat.S_ISDIR(status.st_mode):
                # Private until `_copy_facts` sets the mode: the content of a directory with mode 0700 must not be
                # readable for a moment.
                os.mkdir(entry.name, 0o700, dir_fd=target)
                with _opened(entry.name, source) as inner, _opened(entry.name, target) as copy:
                    self.take(inner, copy, path + "/")
                    _copy_marks(inner, copy)
                    _copy_facts(entry.name, status, source, target)
                continue
            # The first path of an inode holds the file, every further one becomes an entry of `links`. Whiteouts may
            # share one inode too (overlayfs does that), but each is made separately.
            if status.st_nlink > 1 and not _whiteout(status):
                if status.st_ino in self._seen:
                    self.links[path] = self._seen[status.st_ino]
                    continue
                # Inode numbers suffice as keys, because an upper directory lies on one file system.
                self._seen[status.st_ino] = path
            self._leaf(entry.name, path, status, source, target)

    def _leaf(self, name: str, path: str, status: os.stat_result, source: int, target: int) -> None:
        # Rule 4: a file that an earlier copy already has is hard-linked to it, so a copy costs what changed since.
        known = self._earlier(path) if stat.S_ISREG(status.st_mode) else None
        if known is not None:
            # Linking fails when the earlier copy was collected meanwhile, or its file has the maximum of links.
            with contextlib.suppress(OSError):
                # A hard link shares all that an inode has: content, mode, owner and times. So it is only right for a
                # file whose signature is unchanged.
                os.link(known, name, dst_dir_fd=target, follow_symlinks=False)
                return
        _make(name, status, source, target)
        # st_blocks counts units of 512 bytes, whatever the file system's block size is (stat(2)). Holes take none.
        self.added_bytes += status.st_blocks * 512


def lay_over(source: int, target: int, links: Mapping[str, str]) -> None:
    """Bring a container's root to the state in which a copy was taken. No process of the agent may run there yet.

    Args:
        source: A descriptor of the copy.
        target: A descriptor of the container's root.
        links: The copy's hard links.
    """
    _lay(source, target, "")
    for path, first in links.items():
        # `_lay` has not made this path, but the image may have a file here.
        _remove(path, target)
        os.link(first, path, src_dir_fd=target, dst_dir_fd=target, follow_symlinks=False)
        # Linking and unlinking changed the directory's time after it was set.
        folder = path.rpartition("/")[0] or "."
        status = os.stat(folder, dir_fd=source, follow_symlinks=False)
        os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _lay(source: int, target: int, prefix: str, *, fresh: bool = False) -> None:
    """Lay one directory over another.

    Args:
        source: The copy's directory.
        target: The container's directory.
        prefix: Their path with a trailing slash; empty for the root.
        fresh: Whether the target was just made, so that nothing can be in the way.
    """
    for entry in _entries(source):
        if not prefix and entry.name in _SPECIAL:
            continue
        status = entry.stat(follow_symlinks=False)
        if _whiteout(status):
            # A whiteout of the copy removes the name through the container's overlay, which makes a whiteout of its own
            # in the upper directory.
            _remove(entry.name, target)
        elif stat.S_ISDIR(status.st_mode):
            with _opened(entry.name, source) as inner:
                _lay_folder(entry.name, status, (inner, source), target, prefix)
        else:
            if not fresh:
                _remove(entry.name, target)
            _make(entry.name, status, source, target)


def _lay_folder(name: str, status: os.stat_result, sources: tuple[int, int], target: int, prefix: str) -> None:
    inner, source = sources
    below = _status(name, target)
    # The copy's directory replaces what the image has there if that is no directory, or if it was made opaque.
    # Removing through the overlay and making the directory again makes overlayfs set its own opaque mark.
    if below is not None and (not stat.S_ISDIR(below.st_mode) or is_opaque(inner)):
        _remove(name, target)
        below = None
    if below is None:
        os.mkdir(name, 0o700, dir_fd=target)
    with _opened(name, target) as copy:
        _lay(inner, copy, f"{prefix}{name}/", fresh=below is None)
        _copy_facts(name, status, source, target)


def is_opaque(folder: int) -> bool:
    """Return whether a directory of an upper hides everything below it in the image."""
    try:
        return os.getxattr(folder, OPAQUE) == b"y"
    except OSError:
        return False


def _make(name: str, status: os.stat_result, source: int, target: int) -> None:
    if stat.S_ISREG(status.st_mode):
        _make_file(name, status, source, target)
        return
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    else:
        # Only whiteouts, FIFOs and sockets come here in practice: the container lacks the capability MKNOD
        # (`daemon.CAPABILITIES`).
        os.mknod(name, status.st_mode, status.st_rdev, dir_fd=target)
        if _whiteout(status):
            return
    _copy_facts(name, status, source, target)


def _make_file(name: str, status: os.stat_result, source: int, target: int) -> None:
    """Copy a regular file with as few system calls as possible: a restore spends most of its time here."""
    reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)
    try:
        # O_EXCL never opens what is there already, a symlink included (open(2)).
        writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
        try:
            # A file with fewer blocks than bytes has holes, which a plain read would fill.
            if status.st_size <= _SMALL and status.st_blocks * 512 >= status.st_size:
                # A regular file is read and written in one piece up to this size; the container's processes stand still
                # or do not exist yet.
                os.write(writing, os.read(reading, _SMALL + 1))
            else:
                _copy_content(reading, writing, status.st_size)
            if status.st_uid or status.st_gid:
                os.fchown(writing, status.st_uid, status.st_gid)
            # After fchown, which clears set-user-id bits.
            os.fchmod(writing, stat.S_IMODE(status.st_mode))
            # After fchown too: a change of owner makes the kernel remove `security.capability` (Linux, fs/open.c,
            # chown_common).
            for attribute in os.listxattr(reading):
                if not attribute.startswith(MARKS):
                    os.setxattr(writing, attribute, os.getxattr(reading, attribute))
            os.utime(writing, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _copy_content(reading: int, writing: int, size: int) -> None:
    """Copy the data and keep the holes. File systems with reflinks share the blocks instead of copying them."""
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


def _copy_facts(name: str, status: os.stat_result, source: int, target: int) -> None:
    # Rule 2: owner before mode, because chown(2) clears set-user-id bits. Times come last: making an entry changes its
    # directory's time.
    os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        # After chown, which clears set-user-id bits. Linux has no chmod without following links; this is no link.
        os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=target)
    # There are no *at() forms of these calls in Python. The path through the descriptor names the same directory,
    # whatever its parents are renamed to.
    _copy_attributes(f"/proc/self/fd/{source}/{name}", f"/proc/self/fd/{target}/{name}")
    os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _copy_attributes(source: str, target: str) -> None:
    # The target may have attributes of the image's directory that the source had removed.
    # Rule 3: marks of overlayfs (`trusted.overlay.*`) refer to inodes of the original, so they are not copied. The one
    # exception is the opaque mark (`_copy_marks`).
    names = [name for name in os.listxattr(source, follow_symlinks=False) if not name.startswith(MARKS)]
    for name in set(os.listxattr(target, follow_symlinks=False)) - set(names):
        if not name.startswith(MARKS):
            os.removexattr(target, name, follow_symlinks=False)
    for name in names:
        os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)


def _copy_marks(source: int, target: int) -> None:
    if is_opaque(source):
        # Only root of the first user namespace can set `trusted.` attributes (xattr(7)), so no agent can forge the
        # mark.
        os.setxattr(target, OPAQUE, b"y")


def _remove(name: str, folder: int) -> None:
    status = _status(name, folder)
    if status is None:
        return
    if stat.S_ISDIR(status.st_mode):
        # With dir_fd, rmtree opens each directory relative to its parent and follows no link.
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def _status(name: str, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _entries(folder: int) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


@contextlib.contextmanager
def _opened(name: str, folder: int) -> Iterator[int]:
    # Rule 1: every directory is opened relative to its parent's descriptor, without following links (O_NOFOLLOW). A
    # symlink that an agent made can therefore never lead a copy to files of the host.
    fd = os.open(name, _FOLDER, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)
