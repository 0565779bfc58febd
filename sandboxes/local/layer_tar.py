"""A layer as a canonical tar: equal layers give equal bytes. A tar from elsewhere is taken for hostile.

    rows           the table of what the layer changes of the root state (`guest.files.row_table`)
    diff           its directory, then everything below it in the order of names, each directory before its entries

Owners are numbers. Whiteouts are character devices 0/0. Paths that share a file are hard links to the first of them.
Modification times in ns and extended attributes in base64 are pax headers of our own.

Unpacking trusts no member: it checks name, order, kind, size and attributes before it writes (`_Writer`). A member's
directory must have come before it as a directory, so no member can be written through a link.
"""

import base64
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from sandboxes.errors import NotFreezableError
from sandboxes.guest.files import row_table
from sandboxes.guest.files.scan import USER_MARKS
from sandboxes.linux.file_copy import is_mark, is_whiteout
from sandboxes.linux.file_flags import flags_of
from sandboxes.linux.trees import MAX_DEPTH, MAX_PATH_BYTES
from sandboxes.local.layer_merge import OPAQUE
from sandboxes.portability import NotPortableError

MAX_ENTRIES = 1_000_000
"""Limits the members of a tar, each of which takes memory until the end of unpacking."""

_MAX_HEADER_BYTES = 4 << 20
"""Limits one pax header. `tarfile` reads a header into memory; attributes of a file take at most 64 KiB each."""

_MAX_ROWS_BYTES = 256 << 20
"""Limits the table of rows, which is read into memory; a row takes some hundred bytes."""

_PIECE = 1 << 20
"""Bytes of a file's content that are read and yielded together."""

_MAX_DEPTH = MAX_DEPTH + 1
"""Limits the depth of directories; `diff` is one more level than a sandbox sees."""

_MAX_HOLE_BYTES = 1 << 30
"""Limits the holes of all sparse files of a layer together. A tar has them as zeros, and a sandbox can make files with
terabytes of holes in no time. Databases that reserve their files, such as LMDB, have some hundred megabytes."""

_TIME, _ATTRIBUTE = "FORKPOINT.mtime_ns", "FORKPOINT.xattr."
"""Names of our pax headers."""

_HEADERS = {"path", "linkpath", "size", "uid", "gid", "hdrcharset", _TIME}
_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE, stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}  # fmt: skip


def pack(layer: Path, table: bytes) -> Iterator[bytes]:
    """Yield the tar of a layer. Blocking; the memory that it takes grows with the layer's hard links only.

    Args:
        layer: The layer's directory, in whose `diff` nothing changes.
        table: The table of its rows.

    Raises:
        NotFreezableError: The layer has a socket or a device in it, or is too deep.
        OSError: The layer was deleted, or cannot be read.
    """
    info = tarfile.TarInfo("rows")
    info.size, info.mode = len(table), 0o644
    yield _head(info)
    yield _padded(table)
    links: dict[int, str] = {}
    hole_bytes = 0
    for name in _names(layer, "diff"):
        status = (layer / name).lstat()
        if stat.S_ISREG(status.st_mode):
            hole_bytes += max(0, status.st_size - status.st_blocks * 512)
        if hole_bytes > _MAX_HOLE_BYTES:
            raise NotFreezableError(f"its sparse files have holes of more than {_MAX_HOLE_BYTES >> 20} MB")
        yield from _entry(layer, name, status, links)
    # Two blocks of zeros end an archive (POSIX, pax).
    yield bytes(2 * tarfile.BLOCKSIZE)


def _names(root: Path, top: str) -> Iterator[str]:
    """Yield the paths of a directory and everything below it, in canonical order, without recursion."""
    waiting = [(top, True)]
    while waiting:
        name, is_folder = waiting.pop()
        # Checked when packing as well: a file that this module writes must be readable by it.
        if _is_too_deep(name):
            raise NotFreezableError(f"{name.removeprefix('diff')} is too deep to be exported")
        yield name
        if is_folder:
            with os.scandir(root / name) as entries:
                below = [(f"{name}/{entry.name}", entry.is_dir(follow_symlinks=False)) for entry in entries]
            # The last entry is popped first, so the stack is filled backwards.
            waiting.extend(sorted(below, reverse=True))


def _is_too_deep(name: str) -> bool:
    return name.count("/") > _MAX_DEPTH or len(os.fsencode(name)) > MAX_PATH_BYTES + 255


def _entry(root: Path, name: str, status: os.stat_result, links: dict[int, str]) -> Iterator[bytes]:
    """Yield one member of the tar; links: the first path of each inode with several."""
    path = root / name
    info = tarfile.TarInfo(name)
    # Whiteouts share inodes in overlayfs, so this comes before the search for hard links.
    if is_whiteout(status):
        info.type = tarfile.CHRTYPE
    elif (kind := _TYPES.get(stat.S_IFMT(status.st_mode))) is None:
        raise NotFreezableError(f"{name.removeprefix('diff')} is a socket or a device, which cannot be exported")
    else:
        info.type = kind
        if kind != tarfile.DIRTYPE and status.st_nlink > 1:
            # Inode numbers suffice, because a layer lies on one file system.
            first = links.setdefault(status.st_ino, name)
            if first != name:
                info.type, info.linkname = tarfile.LNKTYPE, first
                yield _head(info)
                return
    info.mode, info.uid, info.gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    # The plain field has whole seconds and no negative ones; the pax header of our own has the exact time.
    info.mtime = max(0, status.st_mtime_ns // 10**9)
    info.pax_headers = {_TIME: str(status.st_mtime_ns), **_attributes(path)}
    if info.type == tarfile.SYMTYPE:
        # Path.readlink would normalize "./d/" to "d".
        info.linkname = os.readlink(path)  # noqa: PTH115
    _require_no_flags(path, info)
    if info.type != tarfile.REGTYPE:
        yield _head(info)
        return
    info.size = status.st_size
    yield _head(info)
    with path.open("rb") as file:
        remaining = status.st_size
        while remaining:
            data = file.read(min(_PIECE, remaining))
            if not data:
                # The head has announced the size, so the archive cannot be continued.
                raise OSError(f"{path} became shorter while it was read")
            remaining -= len(data)
            yield data
    yield bytes(-status.st_size % tarfile.BLOCKSIZE)


def _require_no_flags(path: Path, info: tarfile.TarInfo) -> None:
    if info.type in (tarfile.REGTYPE, tarfile.DIRTYPE):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if flags_of(fd):
                raise NotFreezableError(f"{info.name.removeprefix('diff')} has flags of chattr: it cannot be exported")
        finally:
            os.close(fd)


def _head(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % tarfile.BLOCKSIZE)


def _attributes(path: Path) -> dict[str, str]:
    """Return the pax headers of a file's attributes."""
    attributes = {}
    for name in sorted(os.listxattr(path, follow_symlinks=False)):
        if _is_portable(name):
            value = os.getxattr(path, name, follow_symlinks=False)
            attributes[_ATTRIBUTE + name] = base64.b64encode(value).decode()
    return attributes


def _is_portable(name: str) -> bool:
    """Return whether an attribute belongs to the file, not to the machine (security labels) or to overlayfs."""
    if is_mark(name, USER_MARKS) or name.startswith("trusted."):
        return name == OPAQUE
    return name.startswith(("user.", "system.posix_acl_")) or name == "security.capability"


class _BoundedReader:
    """A file for `tarfile`, which refuses a header that claims gigabytes instead of reading it into memory."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int) -> bytes:
        # tarfile reads a header with the size that the header itself claims.
        if size > _MAX_HEADER_BYTES:
            raise NotPortableError("one of its headers is too large")
        return self._file.read(size)


def unpack(data: BinaryIO, target: Path) -> bytes:
    """Write a layer from its tar. Blocking. Nothing is written outside of the target.

    Args:
        data: The tar, at its beginning.
        target: A directory with an empty `diff`.

    Returns:
        The table of the layer's rows.

    Raises:
        NotPortableError: The data is no tar of a layer.
        OSError: The machine cannot hold it.
    """
    try:
        bounded = cast("Any", _BoundedReader(data))
        with tarfile.open(fileobj=bounded, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            table = _table(archive, archive.next())
            writer = _Writer(target)
            # One member at a time, in the order of the archive: `_Writer` relies on directories before their entries.
            while (member := archive.next()) is not None:
                writer.add(member, archive)
                # tarfile keeps every member; a million of them would take a gigabyte.
                cast("Any", archive).members.clear()
            writer.finish()
            return table
    except (tarfile.TarError, ValueError, KeyError, TypeError, OverflowError, RecursionError, EOFError) as error:
        # NotPortableError may be one of the listed kinds, and has its own text already.
        if isinstance(error, NotPortableError):
            raise
        raise NotPortableError(f"it is no tar of a layer: {error}") from error


def _table(archive: tarfile.TarFile, member: tarfile.TarInfo | None) -> bytes:
    # The first member, with its size checked before it is read.
    if member is None or member.name != "rows" or not member.isreg() or member.size > _MAX_ROWS_BYTES:
        raise NotPortableError("it does not begin with a table of rows")
    table = b"".join(_content(archive, member))
    try:
        row_table.check(table)
    except row_table.MalformedTableError as error:
        raise NotPortableError(f"its table of rows cannot be read: {error}") from error
    return table


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    """Yield the content of a member in pieces."""
    file, remaining = archive.extractfile(member), member.size
    if remaining < 0:
        raise NotPortableError(f"{member.name!r} has a negative size")
    while remaining:
        piece = b"" if file is None else file.read(min(_PIECE, remaining))
        if not piece:
            raise NotPortableError(f"{member.name!r} is truncated")
        remaining -= len(piece)
        yield piece


class _Writer:
    """Writes the members of a tar, in their order, after checking each."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._folders: dict[str, tarfile.TarInfo] = {}
        self._files: set[str] = set()

    def add(self, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        """Check and write one member; see `unpack` for the errors."""
        name = member.name
        self._check(member)
        path = self._target / name
        if member.isdir():
            if name != "diff":
                path.mkdir(mode=0o700)
            self._folders[name] = member
            return
        if member.islnk():
            # Only paths that this writer has made, so a link cannot lead to a file of the host.
            if member.linkname not in self._files:
                raise NotPortableError(f"{name!r} is a hard link to a file that did not come before it")
            os.link(self._target / member.linkname, path, follow_symlinks=False)
            self._files.add(name)
            return
        self._make(member, path, archive)
        self._files.add(name)
        _set_attributes(path, member)

    def _check(self, member: tarfile.TarInfo) -> None:
        """Refuse a member whose path, depth or attributes no layer has, or that comes twice."""
        name = member.name
        folder, _, last = name.rpartition("/")
        # `_folders` has only directories that were made here. So no parent of a member is a symlink.
        if name != "diff" and (folder not in self._folders or last in ("", ".", "..")):
            raise NotPortableError(f"{name!r} leads out of the layer, or its directory did not come before it")
        if name in self._folders or name in self._files:
            raise NotPortableError(f"{name!r} is in it twice")
        # Counted while writing: the archive's own claims about its size are not trusted.
        if len(self._folders) + len(self._files) >= MAX_ENTRIES or _is_too_deep(name):
            raise NotPortableError(f"it has more than {MAX_ENTRIES} files, or directories {_MAX_DEPTH} deep")
        attributes = [key for key in member.pax_headers if key not in _HEADERS]
        if not all(key.startswith(_ATTRIBUTE) and _is_portable(key.removeprefix(_ATTRIBUTE)) for key in attributes):
            raise NotPortableError(f"{name!r} has attributes that cannot be imported")

    def _make(self, member: tarfile.TarInfo, path: Path, archive: tarfile.TarFile) -> None:
        if member.type == tarfile.REGTYPE:
            # "x" is O_EXCL: it opens nothing that exists, not even a dangling link (open(2)).
            with path.open("xb") as file:
                for piece in _content(archive, member):
                    file.write(piece)
        elif member.issym():
            path.symlink_to(member.linkname)
        elif member.isfifo():
            os.mkfifo(path)
        # A device with any other number would give access to hardware of this machine.
        elif member.ischr() and (member.devmajor, member.devminor) == (0, 0):
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
        else:
            raise NotPortableError(f"{member.name!r} is a device, or of a kind that no layer has")

    def finish(self) -> None:
        """Set the attributes of directories, the inner ones first: adding an entry changes a directory's time."""
        if "diff" not in self._folders:
            raise NotPortableError("it has no diff")
        # dicts keep the order of insertion, so the reverse order has inner directories first.
        for name, member in reversed(self._folders.items()):
            _set_attributes(self._target / name, member)


def _set_attributes(path: Path, member: tarfile.TarInfo) -> None:
    # Owner first, because chown clears set-user-id bits and file capabilities (chown(2), capabilities(7)).
    os.chown(path, member.uid, member.gid, follow_symlinks=False)
    if not member.issym():
        path.chmod(stat.S_IMODE(member.mode))
    for key, value in member.pax_headers.items():
        if key.startswith(_ATTRIBUTE):
            os.setxattr(path, key[len(_ATTRIBUTE) :], base64.b64decode(value, validate=True), follow_symlinks=False)
    moment = int(member.pax_headers[_TIME])
    os.utime(path, ns=(moment, moment), follow_symlinks=False)
