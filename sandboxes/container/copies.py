"""Copies of a container's upper directory: what differs from the image, kept as one directory, and laid over again.

A copy holds what `docker commit` would: content, modes, owners, extended attributes, whiteouts; and times, and hard
links as such. Sources and targets are walked by descriptors, so no symlink of the agent's is ever followed.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping

OPAQUE = "trusted.overlay.opaque"
MARKS = "trusted.overlay."
_SPECIAL = frozenset(["proc", "dev", "sys"])
"""Top folders over which a container has mounts: nothing below them is of its files."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 16 << 20
_SMALL = 128 << 10

Links = dict[str, str]
"""path -> the path that holds the same file; both are in the copy's original."""


class Copy:
    """Copies an upper directory into an empty one.

    earlier: for a path, that file in another copy if it is known to be the same: it is linked instead of copied.
    After `take`: `links` the hard links found, `added_bytes` what the copy takes on disk.
    """

    def __init__(self, earlier: Callable[[str], str | None]) -> None:
        self.links: Links = {}
        self.added_bytes = 0
        self._earlier = earlier
        self._seen: dict[int, str] = {}

    def take(self, source: int, target: int, prefix: str = "") -> None:
        """Copy the directory source into target; 0.1 ms a file."""
        for entry in _entries(source):
            path = prefix + entry.name
            status = entry.stat(follow_symlinks=False)
            if not prefix and entry.name in _SPECIAL:
                continue
            if stat.S_ISDIR(status.st_mode):
                os.mkdir(entry.name, 0o700, dir_fd=target)
                with _opened(entry.name, source) as inner, _opened(entry.name, target) as copy:
                    self.take(inner, copy, path + "/")
                    _copy_marks(inner, copy)
                    _copy_facts(entry.name, status, source, target)
                continue
            if status.st_nlink > 1 and not _whiteout(status):
                if status.st_ino in self._seen:
                    self.links[path] = self._seen[status.st_ino]
                    continue
                self._seen[status.st_ino] = path
            self._leaf(entry.name, path, status, source, target)

    def _leaf(self, name: str, path: str, status: os.stat_result, source: int, target: int) -> None:
        known = self._earlier(path) if stat.S_ISREG(status.st_mode) else None
        if known is not None:
            with contextlib.suppress(OSError):
                os.link(known, name, dst_dir_fd=target, follow_symlinks=False)
                return
        _make(name, status, source, target)
        self.added_bytes += status.st_blocks * 512


def lay_over(source: int, target: int, links: Mapping[str, str]) -> None:
    """Make a container's root, target, what it was when source was copied. Nothing of the agent's may run there yet."""
    _lay(source, target, "")
    for path, first in links.items():
        _remove(path, target)
        os.link(first, path, src_dir_fd=target, dst_dir_fd=target, follow_symlinks=False)
        # Linking and unlinking have touched the folder since its time was set.
        folder = path.rpartition("/")[0] or "."
        status = os.stat(folder, dir_fd=source, follow_symlinks=False)
        os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _lay(source: int, target: int, prefix: str, *, fresh: bool = False) -> None:
    """fresh: there is nothing in target yet that could be in the way."""
    for entry in _entries(source):
        if not prefix and entry.name in _SPECIAL:
            continue
        status = entry.stat(follow_symlinks=False)
        if _whiteout(status):
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
    if below is not None and (not stat.S_ISDIR(below.st_mode) or is_opaque(inner)):
        _remove(name, target)
        below = None
    if below is None:
        os.mkdir(name, 0o700, dir_fd=target)
    with _opened(name, target) as copy:
        _lay(inner, copy, f"{prefix}{name}/", fresh=below is None)
        _copy_facts(name, status, source, target)


def is_opaque(folder: int) -> bool:
    """Whether a directory of an upper hides all that lies below it."""
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
        os.mknod(name, status.st_mode, status.st_rdev, dir_fd=target)
        if _whiteout(status):
            return
    _copy_facts(name, status, source, target)


def _make_file(name: str, status: os.stat_result, source: int, target: int) -> None:
    """Copy a file with as few system calls as it can be done with: this is what a restore spends its time on."""
    reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)
    try:
        writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
        try:
            if status.st_size <= _SMALL and status.st_blocks * 512 >= status.st_size:
                os.write(writing, os.read(reading, _SMALL + 1))
            else:
                _copy_content(reading, writing, status.st_size)
            if status.st_uid or status.st_gid:
                os.fchown(writing, status.st_uid, status.st_gid)
            # After the owner: changing that clears set-user-id bits.
            os.fchmod(writing, stat.S_IMODE(status.st_mode))
            for attribute in os.listxattr(reading):
                if not attribute.startswith(MARKS):
                    os.setxattr(writing, attribute, os.getxattr(reading, attribute))
            os.utime(writing, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _copy_content(reading: int, writing: int, size: int) -> None:
    """Copy data and leave holes; shares blocks where the file system can."""
    at = 0
    while at < size:
        try:
            start = os.lseek(reading, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break
        end = os.lseek(reading, start, os.SEEK_HOLE)
        at = start
        while at < end:
            copied = _copy_range(reading, writing, at, min(end - at, _CHUNK))
            if not copied:
                break
            at += copied
    os.ftruncate(writing, size)


def _copy_range(reading: int, writing: int, at: int, count: int) -> int:
    try:
        return os.copy_file_range(reading, writing, count, at, at)
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}:
            raise
    return os.pwrite(writing, os.pread(reading, count, at), at)


def _copy_facts(name: str, status: os.stat_result, source: int, target: int) -> None:
    os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        # After the owner: changing that clears set-user-id bits. O_NOFOLLOW has no equal here, but it is no link.
        os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=target)
    _copy_attributes(f"/proc/self/fd/{source}/{name}", f"/proc/self/fd/{target}/{name}")
    os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _copy_attributes(source: str, target: str) -> None:
    names = [name for name in os.listxattr(source, follow_symlinks=False) if not name.startswith(MARKS)]
    for name in set(os.listxattr(target, follow_symlinks=False)) - set(names):
        if not name.startswith(MARKS):
            os.removexattr(target, name, follow_symlinks=False)
    for name in names:
        os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)


def _copy_marks(source: int, target: int) -> None:
    if is_opaque(source):
        os.setxattr(target, OPAQUE, b"y")


def _remove(name: str, folder: int) -> None:
    status = _status(name, folder)
    if status is None:
        return
    if stat.S_ISDIR(status.st_mode):
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
    fd = os.open(name, _FOLDER, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)
