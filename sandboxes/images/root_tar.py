"""Unpacking of a root file system from a tarball, or from the layers of an image, which are taken for hostile.

The filters of `tarfile` have had holes (CVE-2025-4517 and others, closed in Python 3.11.13), and this code may run as
root. So nothing here takes a path: each member is made in a directory that the kernel has opened as if the target were
the root of the file system (openat2(2), RESOLVE_IN_ROOT). A link in the archive leads to the target at most.

A layer hides names of the layers below with *whiteouts* (OCI image specification, "Layer Filesystem Changeset"):
`.wh.NAME` hides one name, and `.wh..wh..opq` all of its directory. They never hide what the same layer brings, in
whatever order its members come. So a layer is read twice: first its whiteouts, then everything else.
"""

import bz2
import errno
import gzip
import importlib
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self, cast

from sandboxes.host.defaults import RESERVE_BYTES
from sandboxes.host.tar_stream import TarStream
from sandboxes.images.config import ImageError
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened, write_out
from sandboxes.linux.file_copy import MARKS
from sandboxes.linux.files import remove_entry
from sandboxes.rights import held

MAX_ENTRIES = 5_000_000
"""Limits the members of all tars of a root. The root file systems of large images have some hundred thousand."""

WHITEOUT = ".wh."
"""Precedes the names that a layer hides."""

_OPAQUE = ".wh..wh..opq"
ATTRIBUTE = "SCHILY.xattr."
"""Precedes the names of extended attributes in pax headers, as tar, Docker and containerd write them."""

_SPARE_BYTES = 1 << 30
"""A tar may have so many bytes more than the disk has free: what is removed while it is unpacked makes room."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_IN_ROOT, _PLAIN = (
    kernel.open_how(os.O_RDONLY | os.O_DIRECTORY, more | kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_MAGICLINKS)
    for more in (0, kernel.RESOLVE_NO_SYMLINKS)
)


class _Facts(NamedTuple):
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    # The same on every machine: see `host_base`.
    mtime: float = 0
    attributes: tuple[tuple[str, bytes], ...] = ()


def unpack(source: Path, target: Path) -> None:
    """Unpack a root file system, as `tar` would, without device nodes into an empty directory. Blocking."""
    with RootWriter(target, attributes=False) as writer, source.open("rb") as file:
        writer.add(file)
        writer.finish()


class RootWriter:
    """Makes the members of tars below one directory, one tar over the other."""

    def __init__(self, target: Path, *, attributes: bool) -> None:
        """Begin in an empty directory, in which files get the tars' capabilities and `user.*` attributes, if wanted."""
        self._top = os.open(target, _FOLDER)
        self._attributes = attributes
        self._count = 0
        # What the directories will be at the end, by inode, with their paths below the target. A directory keeps its
        # number, while a member may name it by way of a link that a later one replaces.
        self._folders: dict[int, tuple[str, _Facts]] = {}
        self._note(self._top, _Facts())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._top)

    def hide(self, layer: BinaryIO) -> str:
        """Remove what the whiteouts of a layer hide; return the SHA-256 of the decompressed layer, in hexadecimal."""
        with _tar_stream(layer, self._top) as stream:
            for member in self._members(stream):
                *above, name = _parts(member.name) or [""]
                if not name.startswith(WHITEOUT):
                    continue
                with suppress(FileNotFoundError, NotADirectoryError), self._folder("/".join(above)) as folder:
                    if name == _OPAQUE:
                        for hidden in os.listdir(folder):  # noqa: PTH208 - of a descriptor
                            remove_entry(hidden, folder)
                    # Other names of this kind are aufs' own notes.
                    elif not name.startswith(WHITEOUT * 2):
                        hidden = name.removeprefix(WHITEOUT)
                        if hidden in {"", ".", ".."}:
                            raise ImageError(f"{member.name!r} hides no name")
                        remove_entry(hidden, folder)
            return stream.finish()[0]

    def add(self, tar: BinaryIO, *, is_layer: bool = False) -> str:
        """Make the members of a tar but a layer's whiteouts (`hide`); return the SHA-256 of the decompressed tar."""
        with _tar_stream(tar, self._top) as stream:
            for member in self._members(stream):
                if not (is_layer and member.name.rstrip("/").rpartition("/")[2].startswith(WHITEOUT)):
                    self._add(member, stream)
            return stream.finish()[0]

    def finish(self) -> None:
        """Give all directories their attributes, which forbid changes or would be changed by them."""
        # Inner directories first: a mode may forbid to open what is below.
        for inode, (path, facts) in reversed(self._folders.items()):
            try:
                fd = kernel.openat2(self._top, os.fsencode(path) or b".", _PLAIN)
            except OSError as error:
                # A later member may have replaced it by something else.
                if error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                    raise
                continue
            with Opened(fd), tar_errors():
                if os.fstat(fd).st_ino == inode:
                    _set_facts(fd, facts)
        os.fchmod(self._top, 0o755)

    def _members(self, stream: TarStream) -> Iterator[tarfile.TarInfo]:
        with tarfile.open(
            fileobj=cast("Any", stream), mode="r:", encoding="utf-8", errors="surrogateescape"
        ) as archive:
            while (member := archive.next()) is not None:
                # tarfile keeps every member otherwise.
                cast("Any", archive).members.clear()
                if (count := self._count + 1) > MAX_ENTRIES:
                    raise ImageError(f"it has more than {MAX_ENTRIES} members")
                self._count = count
                yield member

    def _add(self, member: tarfile.TarInfo, stream: TarStream) -> None:
        parts = _parts(member.name)
        # A sandbox has its own /dev. A device node of the archive would give access to a device of the host.
        if member.isdev() and not member.isfifo():
            return
        if not parts:
            if not member.isdir():
                raise ImageError("its root is not a directory")
            self._note(self._top, self._facts(member))
            return
        with self._folder("/".join(parts[:-1]), make=True) as folder:
            if member.isdir():
                with _made_folder(parts[-1], folder) as made:
                    self._note(made, self._facts(member))
                return
            # What an earlier member has left there, a link in particular, must not be written through.
            remove_entry(parts[-1], folder)
            self._make(folder, parts[-1], member, stream)

    def _make(self, folder: int, name: str, member: tarfile.TarInfo, stream: TarStream) -> None:
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=folder)
            _own(name, member, folder)
        elif member.islnk():
            parts = _parts(member.linkname)
            if not parts:
                raise ImageError(f"{member.name!r} is a link to the root")
            with self._folder("/".join(parts[:-1])) as other:
                os.link(parts[-1], name, src_dir_fd=other, dst_dir_fd=folder, follow_symlinks=False)
        elif member.isfifo():
            os.mkfifo(name, dir_fd=folder)
            _own(name, member, folder)
        elif member.isreg():
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "wb", buffering=0) as file:
                _fill(file, member, stream)
                _set_facts(file.fileno(), self._facts(member))
        else:
            raise ImageError(f"{member.name!r} is of a kind that no root file system has")

    @contextmanager
    def _folder(self, path: str, *, make: bool = False) -> Iterator[int]:
        """Open a directory below the target as a process with that root would, links included."""
        try:
            fd = kernel.openat2(self._top, os.fsencode(path) or b".", _IN_ROOT)
        except (FileNotFoundError, NotADirectoryError):
            if not make or not path:
                raise
            above, _, name = path.rpartition("/")
            with self._folder(above, make=True) as parent, _made_folder(name, parent) as made:
                self._note(made, _Facts())
            fd = kernel.openat2(self._top, os.fsencode(path), _IN_ROOT)
        with Opened(fd):
            yield fd

    def _note(self, folder: int, facts: _Facts) -> None:
        path = _path_of(folder).removeprefix(_path_of(self._top)).lstrip("/")
        self._folders[os.fstat(folder).st_ino] = path, facts

    def _facts(self, member: tarfile.TarInfo) -> _Facts:
        attributes = {
            name: text.encode("utf-8", "surrogateescape")
            for key, text in (member.pax_headers.items() if self._attributes else ())
            if key.startswith(ATTRIBUTE) and is_kept(name := key.removeprefix(ATTRIBUTE))
        }
        mode = stat.S_IMODE(member.mode)
        return _Facts(mode, member.uid, member.gid, member.mtime, tuple(sorted(attributes.items())))


def is_kept(attribute: str) -> bool:
    """Return whether files of a root have an extended attribute of their image; capabilities need root's rights."""
    if attribute == "security.capability":
        return held.over_files()
    # The mounts of sandboxes interpret the prefix of overlayfs.
    return attribute.startswith("user.") and not attribute.startswith(MARKS)


def require_room(file: int) -> None:
    """Raise ENOSPC if the disk of a file has less free than the reserve."""
    disk = os.fstatvfs(file)
    if disk.f_bavail * disk.f_frsize < RESERVE_BYTES:
        raise OSError(errno.ENOSPC, "the disk is nearly full")


@contextmanager
def tar_errors() -> Iterator[None]:
    """Turn all that a damaged or hostile tar raises into `ImageError`; errors of the machine stay `OSError`."""
    try:
        yield
    except (
        tarfile.TarError, EOFError, ValueError, TypeError, RecursionError, OverflowError, zlib.error, lzma.LZMAError,
    ) as error:  # fmt: skip
        raise ImageError(str(error) or type(error).__name__) from error


class _Limited:
    """A tar that ends with an error before it could be larger than the disk: zeros compress without end."""

    def __init__(self, data: BinaryIO, limit_bytes: int) -> None:
        self._data, self._left = data, limit_bytes

    def read(self, size: int) -> bytes:
        data = self._data.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise OSError(errno.ENOSPC, "the disk has no room for it")
        return data


@contextmanager
def _tar_stream(file: BinaryIO, folder: int) -> Iterator[TarStream]:
    disk = os.fstatvfs(folder)
    limit_bytes = disk.f_bavail * disk.f_frsize + _SPARE_BYTES
    with tar_errors(), TarStream(cast("BinaryIO", _Limited(_decompressed(file), limit_bytes))) as stream:
        yield stream


def _decompressed(file: BinaryIO) -> BinaryIO:
    begin = file.read(6)
    file.seek(0)
    if begin.startswith(b"\x1f\x8b"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=file))
    if begin.startswith(b"BZh"):
        return cast("BinaryIO", bz2.BZ2File(file))
    if begin.startswith((b"\xfd7zXZ\0", b"\x5d\0\0")):
        return cast("BinaryIO", lzma.LZMAFile(file))
    if begin.startswith(b"\x28\xb5\x2f\xfd"):
        for module in ("compression.zstd", "backports.zstd"):
            with suppress(ImportError):
                return cast("BinaryIO", importlib.import_module(module).ZstdFile(file))
        raise ImageError("it is compressed with zstd, which needs Python 3.14, or `pip install backports.zstd`")
    return file


def _parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in {"", "."}]
    if ".." in parts:
        raise ImageError(f"{path!r} leads out of it")
    return parts


def _fill(file: FileIO, member: tarfile.TarInfo, stream: TarStream) -> None:
    # A sparse file has only its data in the archive: pairs of offset and size.
    sparse = cast("Any", member).sparse
    for at, size in sparse or [(0, member.size)]:
        file.seek(at)
        for piece in stream.content(size):
            require_room(file.fileno())
            write_out(file.fileno(), piece)
    if sparse:
        file.truncate(member.size)


def _made_folder(name: str, folder: int) -> Opened:
    try:
        is_folder = stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        is_folder = False
    if not is_folder:
        remove_entry(name, folder)
        os.mkdir(name, 0o755, dir_fd=folder)
    return Opened(os.open(name, _FOLDER, dir_fd=folder))


def _path_of(folder: int) -> str:
    return os.readlink(f"/proc/self/fd/{folder}")  # noqa: PTH115


def _own(name: str, member: tarfile.TarInfo, folder: int) -> None:
    if held.over_files():
        os.chown(name, member.uid, member.gid, dir_fd=folder, follow_symlinks=False)
    os.utime(name, (member.mtime, member.mtime), dir_fd=folder, follow_symlinks=False)


def _set_facts(fd: int, facts: _Facts) -> None:
    # Owner first, because chown clears set-user-id bits and capabilities (chown(2)).
    if held.over_files():
        os.fchown(fd, facts.uid, facts.gid)
    os.fchmod(fd, facts.mode)
    for name, value in facts.attributes:
        os.setxattr(fd, name, value)
    os.utime(fd, (facts.mtime, facts.mtime))
