"""An upper directory of overlayfs as a canonical tar: equal ones give equal bytes. One from elsewhere is hostile.

    rows           the table of what the layer changes of the root state
    diff           the directory, then everything below it in the order of names, each directory before its entries

Owners are numbers. Whiteouts are character devices 0/0. Paths that share a file are hard links to the first of them.
Modification times in ns and extended attributes in base64 are pax headers of our own.

Unpacking trusts no member: it checks name, order, kind, size and attributes before it writes (`_LayerWriter`). A
member's directory must have come before it as a directory, so no member can be written through a link.
"""

import base64
import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from sandboxes.errors import NotFreezableError
from sandboxes.guest.files.facts import PIECE_BYTES, ContentHash
from sandboxes.host.tar_stream import TarStream
from sandboxes.linux.descriptors import Opened, open_unnoticed
from sandboxes.linux.file_copy import OPAQUE, is_mark, is_whiteout
from sandboxes.linux.file_flags import flags_of
from sandboxes.linux.trees import MAX_DEPTH, MAX_PATH_BYTES
from sandboxes.portability import NotPortableError

MAX_ENTRIES = 1_000_000
"""Limits the members of a tar, each of which takes memory until the end of unpacking."""

_MAX_HEAD_BYTES = 256 << 20
"""Limits the head, which is read into memory. It may be a table of rows, of which each takes some hundred bytes."""

_MAX_DEPTH = MAX_DEPTH + 1
"""Limits the depth of directories; `diff` is one more level than a sandbox sees."""

_MAX_HOLE_BYTES = 1 << 30
"""Limits the holes of all sparse files of a layer together. A tar has them as zeros, and a sandbox can make files with
terabytes of holes in no time. Databases that reserve their files, such as LMDB, have some hundred megabytes."""

_HEAD = "rows"
"""The name of the first member."""
_TIME, _ATTRIBUTE = "FORKPOINT.mtime_ns", "FORKPOINT.xattr."
"""Names of our pax headers."""

_MAX_TIME_S = 8**11 - 1
"""The latest time of the plain field, in the year 2242. A later one would get a pax header of `tarfile`'s own."""
_HEADERS = {"path", "linkpath", "size", "uid", "gid", "hdrcharset", _TIME}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE, stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}  # fmt: skip


def _is_files(name: str) -> bool:
    """Return whether an attribute belongs to the file, not to the machine (security labels) or to overlayfs."""
    if is_mark(name) or name.startswith("trusted."):
        return name == OPAQUE
    return name.startswith(("user.", "system.posix_acl_")) or name == "security.capability"


class Unpacked(NamedTuple):
    """What a tar held beside the files that were written."""

    head: bytes  # The content of its first member.
    links: dict[str, str]  # Each further path of a file, with the first one; both begin with `diff/`.
    sha256: str  # Of the tar, in hexadecimal.
    outline: str  # See the function `outline`.
    contents: dict[str, bytes]  # Hashes of regular files (`facts.ContentHash`), by their paths in the directory.


def pack(layer: Path, head: bytes, *, contents: bool = True) -> Iterator[bytes]:
    """Yield the tar of a directory. Blocking; the memory that it takes grows with the hard links only.

    Nothing may change in its `diff`. Raises NotFreezableError for a socket, a device or too deep a tree, and OSError if
    the directory was deleted or cannot be read.
    """
    info = tarfile.TarInfo(_HEAD)
    info.size, info.mode = len(head), 0o644
    yield _head(info)
    if contents:
        yield head
    yield bytes(-len(head) % tarfile.BLOCKSIZE)
    packer = _Packer(layer, contents=contents)
    for name in packer.names():
        yield from packer.entry(name)
    # Two blocks of zeros end an archive (POSIX, pax).
    yield bytes(2 * tarfile.BLOCKSIZE)


def outline(layer: Path, head: bytes) -> str:
    """Return the SHA-256, in hexadecimal, of the tar of a directory without the contents of its members. Blocking."""
    # A tar is canonical if it has the outline of the directory that was written from it: each member's size is in its
    # header, so the contents are at the same places, and they were just written.
    digest = hashlib.sha256()
    for piece in pack(layer, head, contents=False):
        digest.update(piece)
    return digest.hexdigest()


class _Packer:
    def __init__(self, layer: Path, *, contents: bool) -> None:
        self._layer, self._contents = layer, contents
        # The first path of each inode that has several. Inode numbers suffice, because `diff` is on one file system.
        self._first: dict[int, str] = {}
        self._hole_bytes = 0

    def names(self) -> Iterator[str]:
        waiting = [("diff", True)]
        while waiting:
            name, is_folder = waiting.pop()
            # Checked when packing as well: a file that this module writes must be readable by it.
            if _is_too_deep(name):
                raise NotFreezableError(f"{name.removeprefix('diff')} is too deep to be exported")
            yield name
            if is_folder:
                with Opened(open_unnoticed(str(self._layer / name), _FOLDER)) as folder, os.scandir(folder) as entries:
                    below = [(f"{name}/{entry.name}", entry.is_dir(follow_symlinks=False)) for entry in entries]
                # The last entry is popped first, so the stack is filled backwards.
                waiting.extend(sorted(below, reverse=True))

    def entry(self, name: str) -> Iterator[bytes]:
        path = self._layer / name
        status = path.lstat()
        info = tarfile.TarInfo(name)
        # Whiteouts share inodes in overlayfs, so this comes before the search for hard links.
        if is_whiteout(status):
            info.type = tarfile.CHRTYPE
        elif (kind := _TYPES.get(stat.S_IFMT(status.st_mode))) is None:
            raise NotFreezableError(f"{name.removeprefix('diff')} is a socket or a device, which cannot be exported")
        else:
            info.type = kind
            if kind != tarfile.DIRTYPE and status.st_nlink > 1:
                first = self._first.setdefault(status.st_ino, name)
                if first != name:
                    info.type, info.linkname = tarfile.LNKTYPE, first
                    yield _head(info)
                    return
        info.mode, info.uid, info.gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
        # The plain field has whole seconds of few digits; the pax header of our own has the exact time.
        info.mtime = min(max(0, status.st_mtime_ns // 10**9), _MAX_TIME_S)
        info.pax_headers = {_TIME: str(status.st_mtime_ns), **_attributes(path)}
        if info.type == tarfile.SYMTYPE:
            # Path.readlink would normalize "./d/" to "d".
            info.linkname = os.readlink(path)  # noqa: PTH115
        _require_no_flags(path, info)
        if info.type == tarfile.REGTYPE:
            self._count_holes(status)
            info.size = status.st_size
        yield _head(info)
        if info.type == tarfile.REGTYPE:
            if self._contents:
                yield from _file_content(path, info.size)
            yield bytes(-info.size % tarfile.BLOCKSIZE)

    def _count_holes(self, status: os.stat_result) -> None:
        self._hole_bytes += max(0, status.st_size - status.st_blocks * 512)
        if self._hole_bytes > _MAX_HOLE_BYTES:
            raise NotFreezableError(f"its sparse files have holes of more than {_MAX_HOLE_BYTES >> 20} MB")


def _attributes(path: Path) -> dict[str, str]:
    attributes = {}
    for name in sorted(os.listxattr(path, follow_symlinks=False)):
        if _is_files(name):
            value = os.getxattr(path, name, follow_symlinks=False)
            attributes[_ATTRIBUTE + name] = base64.b64encode(value).decode()
    return attributes


def _file_content(path: Path, size: int) -> Iterator[bytes]:
    with open(open_unnoticed(str(path), os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:  # noqa: PTH123
        remaining = size
        while remaining:
            data = file.read(min(PIECE_BYTES, remaining))
            if not data:
                # The head has announced the size, so the archive cannot be continued.
                raise OSError(f"{path} became shorter while it was read")
            remaining -= len(data)
            yield data


def _is_too_deep(name: str) -> bool:
    return name.count("/") > _MAX_DEPTH or len(os.fsencode(name)) > MAX_PATH_BYTES + 255


def _require_no_flags(path: Path, info: tarfile.TarInfo) -> None:
    if info.type in (tarfile.REGTYPE, tarfile.DIRTYPE):
        with Opened(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd:
            if flags_of(fd):
                raise NotFreezableError(f"{info.name.removeprefix('diff')} has flags of chattr: it cannot be exported")


def _head(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def unpack(data: BinaryIO, target: Path) -> Unpacked:
    """Write a directory from its tar, forward in one pass, and nothing outside of the target. Blocking.

    The target has an empty `diff`. Raises NotPortableError if the data is no tar of this form, and OSError if the
    machine cannot hold it.
    """
    try:
        with (
            TarStream(data) as stream,
            tarfile.open(fileobj=cast("Any", stream), mode="r:", encoding="utf-8", errors="surrogateescape") as archive,
        ):
            head = _head_of(stream, archive.next())
            writer = _LayerWriter(target, stream)
            # One member at a time, in the archive's order: `_LayerWriter` relies on directories before their entries.
            while (member := archive.next()) is not None:
                writer.add(member)
                # tarfile keeps every member; a million of them would take a gigabyte.
                cast("Any", archive).members.clear()
            writer.finish()
            sha256, arrived = stream.finish()
            return Unpacked(head, writer.links, sha256, arrived, writer.contents)
    except (tarfile.TarError, ValueError, KeyError, TypeError, OverflowError, RecursionError, EOFError) as error:
        # NotPortableError may be one of the listed kinds, and has its own text already.
        if isinstance(error, NotPortableError):
            raise
        raise NotPortableError(f"it is not a tar of a layer: {error}") from error


def _head_of(stream: TarStream, member: tarfile.TarInfo | None) -> bytes:
    # The first member, with its size checked before it is read.
    if member is None or member.name != _HEAD or not member.isreg() or member.size > _MAX_HEAD_BYTES:
        raise NotPortableError(f"it does not begin with its {_HEAD}")
    return b"".join(stream.content(member.size))


class _LayerWriter:
    """Writes the members of a tar, in their order, after checking each. For `links` and `contents` see `Unpacked`."""

    def __init__(self, target: Path, stream: TarStream) -> None:
        self._target, self._stream = target, stream
        self.links: dict[str, str] = {}
        self.contents: dict[str, bytes] = {}
        self._folders: dict[str, tarfile.TarInfo] = {}
        self._files: set[str] = set()

    def add(self, member: tarfile.TarInfo) -> None:
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
            # The first path is a file, not a link in the tar.
            if member.linkname in self.links:
                raise NotPortableError(f"{name!r} is a hard link to another hard link")
            self.links[name] = member.linkname
            if (content := self.contents.get(member.linkname.removeprefix("diff/"))) is not None:
                self.contents[name.removeprefix("diff/")] = content
            os.link(self._target / member.linkname, path, follow_symlinks=False)
            self._files.add(name)
            return
        self._make(member, path)
        self._files.add(name)
        _set_attributes(path, member)

    def _check(self, member: tarfile.TarInfo) -> None:
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
        if not all(key.startswith(_ATTRIBUTE) and _is_files(key.removeprefix(_ATTRIBUTE)) for key in attributes):
            raise NotPortableError(f"{name!r} has attributes that cannot be imported")

    def _make(self, member: tarfile.TarInfo, path: Path) -> None:
        if member.type == tarfile.REGTYPE:
            content = ContentHash(member.size)
            # "x" is O_EXCL: it opens nothing that exists, not even a dangling link (open(2)).
            with path.open("xb") as file:
                for piece in self._stream.content(member.size, content):
                    file.write(piece)
            self.contents[member.name.removeprefix("diff/")] = content.digest()
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
