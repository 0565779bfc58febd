"""Unpacking of a root file system from a tarball, which is taken for hostile.

The filters of `tarfile` have had holes (CVE-2025-4517 and others, closed in Python 3.11.13), and this code may run as
root. So nothing here takes a path: each member is made in a directory that the kernel has opened as if the target were
the root of the file system (openat2(2), RESOLVE_IN_ROOT). A link in the archive leads to the target at most.
"""

import os
import stat
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from lzma import LZMAError
from pathlib import Path
from typing import Any, cast

from sandboxes.host.defaults import RESERVE_BYTES
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.files import remove_entry

MAX_ENTRIES = 5_000_000
"""Limits the members of a tarball. The root file systems of large images have some hundred thousand."""

_MAX_HEADER_BYTES = 4 << 20
"""Limits what is read at once. `tarfile` reads a header with the size that the header itself claims."""

_IN_ROOT = kernel.open_how(os.O_RDONLY | os.O_DIRECTORY, kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_MAGICLINKS)


class RootTarError(Exception):
    """A file is no tarball of a root file system."""


def unpack(source: Path, target: Path) -> None:
    """Unpack a root file system without its device nodes, as `tar` would inside of the target. Blocking.

    Args:
        source: The tarball, compressed by gzip, bzip2 or xz, or not.
        target: An empty directory.

    Raises:
        RootTarError: The file is no tarball, or a member would leave the target.
        OSError: The machine cannot hold it.
    """
    top = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with tarfile.open(source) as archive:
            archive.fileobj = cast("Any", _TarReader(archive.fileobj))
            folders: list[tuple[str, tarfile.TarInfo]] = []
            count = 0
            while (member := archive.next()) is not None:
                # tarfile keeps every member otherwise.
                cast("Any", archive).members.clear()
                if (count := count + 1) > MAX_ENTRIES:
                    raise RootTarError(f"it has more than {MAX_ENTRIES} members")
                if (path := _add(top, member, archive)) is not None:
                    folders.append((path, member))
            # Inner directories first: an entry that is made changes its directory's time, and a mode may forbid it.
            for path, member in reversed(folders):
                # A later member may have replaced it by something else.
                with suppress(FileNotFoundError, NotADirectoryError), _folder(top, path) as folder:
                    _set_facts(folder, member)
        os.fchmod(top, 0o755)
        if all(path for path, _ in folders):
            # The archive does not say when its root was changed. The same on every machine: see `host_base`.
            os.utime(top, (0, 0))
    except (tarfile.TarError, EOFError, ValueError, RecursionError, OverflowError, zlib.error, LZMAError) as error:
        raise RootTarError(str(error) or type(error).__name__) from error
    finally:
        os.close(top)


class _TarReader:
    """The file below a `TarFile`; it refuses to read a header of gigabytes."""

    def __init__(self, file: Any) -> None:
        self.seek, self.tell, self.close, self._file = file.seek, file.tell, file.close, file

    def read(self, size: int) -> bytes:
        if size > _MAX_HEADER_BYTES:
            raise RootTarError("one of its headers is too large")
        return cast("bytes", self._file.read(size))


def _add(top: int, member: tarfile.TarInfo, archive: tarfile.TarFile) -> str | None:
    """Make one member; return its path if it is a directory, whose attributes are set at the end."""
    parts = [part for part in member.name.split("/") if part not in {"", "."}]
    if ".." in parts:
        raise RootTarError(f"{member.name!r} leads out of it")
    # A sandbox has its own /dev. A device node of the archive would give access to a device of the host.
    if member.isdev() and not member.isfifo():
        return None
    if member.isdir():
        with _folder(top, "/".join(parts), make=True):
            return "/".join(parts)
    if not parts:
        raise RootTarError("its root is not a directory")
    with _folder(top, "/".join(parts[:-1]), make=True) as folder:
        # What an earlier member has left there, a link in particular, must not be written through.
        remove_entry(parts[-1], folder)
        _make(top, folder, parts[-1], member, archive)
    return None


def _make(top: int, folder: int, name: str, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
    if member.issym():
        os.symlink(member.linkname, name, dir_fd=folder)
        _own(name, member, folder)
    elif member.islnk():
        parts = [part for part in member.linkname.split("/") if part not in {"", "."}]
        if not parts or ".." in parts:
            raise RootTarError(f"{member.name!r} is a link that leads out of it")
        with _folder(top, "/".join(parts[:-1])) as other:
            os.link(parts[-1], name, src_dir_fd=other, dst_dir_fd=folder, follow_symlinks=False)
    elif member.isfifo():
        os.mkfifo(name, dir_fd=folder)
        _own(name, member, folder)
    elif member.isreg():
        with os.fdopen(_new_file(name, folder), "wb") as file:
            content = archive.extractfile(member)
            assert content is not None
            while piece := content.read(1 << 20):
                disk = os.fstatvfs(folder)
                if disk.f_bavail * disk.f_frsize < RESERVE_BYTES:
                    raise OSError(28, "the disk is nearly full")
                file.write(piece)
            file.flush()
            _set_facts(file.fileno(), member)
    else:
        raise RootTarError(f"{member.name!r} is of a kind that no root file system has")


def _new_file(name: str, folder: int) -> int:
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)


@contextmanager
def _folder(top: int, path: str, *, make: bool = False) -> Iterator[int]:
    """Open a directory below the target as a process with that root would, links included."""
    try:
        fd = kernel.openat2(top, os.fsencode(path) or b".", _IN_ROOT)
    except (FileNotFoundError, NotADirectoryError):
        if not make or not path:
            raise
        above, _, name = path.rpartition("/")
        with _folder(top, above, make=True) as parent:
            remove_entry(name, parent)
            os.mkdir(name, 0o755, dir_fd=parent)
        fd = kernel.openat2(top, os.fsencode(path), _IN_ROOT)
    with Opened(fd):
        yield fd


def _own(name: str, member: tarfile.TarInfo, folder: int) -> None:
    if os.geteuid() == 0:
        os.chown(name, member.uid, member.gid, dir_fd=folder, follow_symlinks=False)
    os.utime(name, (member.mtime, member.mtime), dir_fd=folder, follow_symlinks=False)


def _set_facts(fd: int, member: tarfile.TarInfo) -> None:
    # Owner first, because chown clears set-user-id bits (chown(2)).
    if os.geteuid() == 0:
        os.fchown(fd, member.uid, member.gid)
    os.fchmod(fd, stat.S_IMODE(member.mode))
    os.utime(fd, (member.mtime, member.mtime))
