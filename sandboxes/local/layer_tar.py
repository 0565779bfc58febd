"""A layer as a canonical tar: equal layers give equal bytes. What comes from elsewhere is taken for hostile.

    meta.json      what was written with the layer, but for its size
    diff           its directory, then all below it in the order of names, each folder before what it holds
Owners are numbers; whiteouts are character devices 0/0; paths that share a file are hard links to the first of them.
Times in ns and attributes (base64) stand in pax headers of our own.
"""

import base64
import json
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from sandboxes.errors import NotFreezableError
from sandboxes.local.layers import OPAQUE, is_whiteout
from sandboxes.portability import NotPortableError

MAX_ENTRIES = 1_000_000
_HEADER_BYTES = 4 << 20
_META_BYTES = 64 << 20
_PIECE = 1 << 20
_DEEPEST = 400
_TIME, _ATTRIBUTE = "FORKPOINT.mtime_ns", "FORKPOINT.xattr."
_HEADERS = {"path", "linkpath", "size", "uid", "gid", "hdrcharset", _TIME}
_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE, stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}  # fmt: skip


def pack(layer: Path, meta: dict[str, Any]) -> Iterator[bytes]:
    """Yield the tar of a layer's directory, whose `diff` nobody writes to. Blocking; memory: its hard links.

    Raises:
        NotFreezable: there is a socket or a device in it.
        OSError: it is gone, or cannot be read.
    """
    told = json.dumps({"delta": meta["delta"]}, sort_keys=True, separators=(",", ":")).encode()
    info = tarfile.TarInfo("meta.json")
    info.size, info.mode = len(told), 0o644
    yield _head(info)
    yield _padded(told)
    links: dict[int, str] = {}
    for name in _names(layer, "diff"):
        yield from _entry(layer, name, links)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _names(root: Path, top: str) -> Iterator[str]:
    waiting = [(top, True)]
    while waiting:
        name, is_folder = waiting.pop()
        if name.count("/") > _DEEPEST:
            raise NotFreezableError(f"{name.removeprefix('diff')} lies too deep to travel")
        yield name
        if is_folder:
            with os.scandir(root / name) as entries:
                below = [(f"{name}/{entry.name}", entry.is_dir(follow_symlinks=False)) for entry in entries]
            waiting.extend(sorted(below, reverse=True))


def _entry(root: Path, name: str, links: dict[int, str]) -> Iterator[bytes]:
    path = root / name
    status = path.lstat()
    info = tarfile.TarInfo(name)
    if is_whiteout(status):
        info.type = tarfile.CHRTYPE
    elif (kind := _TYPES.get(stat.S_IFMT(status.st_mode))) is None:
        raise NotFreezableError(f"{name.removeprefix('diff')} is a socket or a device: it cannot travel")
    else:
        info.type = kind
        if kind != tarfile.DIRTYPE and status.st_nlink > 1:
            first = links.setdefault(status.st_ino, name)
            if first != name:
                info.type, info.linkname = tarfile.LNKTYPE, first
                yield _head(info)
                return
    info.mode, info.uid, info.gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    info.mtime = max(0, status.st_mtime_ns // 10**9)
    info.pax_headers = {_TIME: str(status.st_mtime_ns), **_attributes(path)}
    if info.type == tarfile.SYMTYPE:
        # Not pathlib, which would make "./d/" a "d".
        info.linkname = os.readlink(path)  # noqa: PTH115
    if info.type != tarfile.REGTYPE:
        yield _head(info)
        return
    info.size = status.st_size
    yield _head(info)
    with path.open("rb") as file:
        left = status.st_size
        while left:
            data = file.read(min(_PIECE, left))
            if not data:
                raise OSError(f"{path} became shorter while it was read")
            left -= len(data)
            yield data
    yield bytes(-status.st_size % tarfile.BLOCKSIZE)


def _head(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % tarfile.BLOCKSIZE)


def _attributes(path: Path) -> dict[str, str]:
    found = {}
    for name in sorted(os.listxattr(path, follow_symlinks=False)):
        if _travels(name):
            value = os.getxattr(path, name, follow_symlinks=False)
            found[_ATTRIBUTE + name] = base64.b64encode(value).decode()
    return found


def _travels(name: str) -> bool:
    """Say whether an attribute is a file's own: not a label of the machine's, not what overlayfs notes for itself."""
    if name.startswith(("user.overlay.", "trusted.")):
        return name == OPAQUE
    return name.startswith(("user.", "system.posix_acl_")) or name == "security.capability"


class _BoundedReader:
    """What tarfile reads from: a header that claims gigabytes is refused, not read into memory."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, size: int) -> bytes:
        if size > _HEADER_BYTES:
            raise NotPortableError("a header in it is too large")
        return self._file.read(size)


def unpack(data: BinaryIO, target: Path) -> dict[str, Any]:
    """Write a layer's tar below target, which has an empty `diff`; return its meta, without a size. Blocking.

    Nothing is written outside of target: a name's folder must have come before it, as one, and no name comes twice.

    Raises:
        Unusable: it is no tar of a layer.
        OSError: the machine cannot hold it.
    """
    try:
        bounded = cast("Any", _BoundedReader(data))
        with tarfile.open(fileobj=bounded, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            meta = _meta(archive, archive.next())
            writing = _Writing(target)
            while (member := archive.next()) is not None:
                writing.add(member, archive)
                # tarfile remembers every member.
                cast("Any", archive).members.clear()
            writing.finish()
            return meta
    except (tarfile.TarError, ValueError, KeyError, TypeError, OverflowError, RecursionError, EOFError) as error:
        if isinstance(error, NotPortableError):
            raise
        raise NotPortableError(f"it is no tar of a layer: {error}") from error


def _meta(archive: tarfile.TarFile, member: tarfile.TarInfo | None) -> dict[str, Any]:
    if member is None or member.name != "meta.json" or not member.isreg() or member.size > _META_BYTES:
        raise NotPortableError("it does not begin with meta.json")
    meta = json.loads(b"".join(_content(archive, member)))
    if not isinstance(meta, dict) or set(meta) != {"delta"}:
        raise NotPortableError("its meta.json is none")
    for entry in (meta["delta"] or {}).values():
        if len(entry) != 2 or not isinstance(entry[0], str) or type(entry[1]) is not int:
            raise NotPortableError("its meta.json is none")
    return meta


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    file, left = archive.extractfile(member), member.size
    if left < 0:
        raise NotPortableError(f"{member.name!r} has no size")
    while left:
        piece = b"" if file is None else file.read(min(_PIECE, left))
        if not piece:
            raise NotPortableError(f"{member.name!r} is cut off")
        left -= len(piece)
        yield piece


class _Writing:
    def __init__(self, target: Path) -> None:
        self._target = target
        self._folders: dict[str, tarfile.TarInfo] = {}
        self._files: set[str] = set()

    def add(self, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        name = member.name
        self._require_place(member)
        path = self._target / name
        if member.isdir():
            if name != "diff":
                path.mkdir(mode=0o700)
            self._folders[name] = member
            return
        if member.islnk():
            if member.linkname not in self._files:
                raise NotPortableError(f"{name!r} is a link to what did not come before it")
            os.link(self._target / member.linkname, path, follow_symlinks=False)
            self._files.add(name)
            return
        self._make(member, path, archive)
        self._files.add(name)
        _set_facts(path, member)

    def _require_place(self, member: tarfile.TarInfo) -> None:
        name = member.name
        folder, _, last = name.rpartition("/")
        if name != "diff" and (folder not in self._folders or last in ("", ".", "..")):
            raise NotPortableError(f"{name!r} leads out of the layer, or its folder did not come before it")
        if name in self._folders or name in self._files:
            raise NotPortableError(f"{name!r} is there twice")
        if len(self._folders) + len(self._files) >= MAX_ENTRIES or name.count("/") > _DEEPEST:
            raise NotPortableError(f"there are more than {MAX_ENTRIES} files in it, or folders {_DEEPEST} deep")
        attributes = [key for key in member.pax_headers if key not in _HEADERS]
        if not all(key.startswith(_ATTRIBUTE) and _travels(key.removeprefix(_ATTRIBUTE)) for key in attributes):
            raise NotPortableError(f"{name!r} has attributes that do not travel")

    def _make(self, member: tarfile.TarInfo, path: Path, archive: tarfile.TarFile) -> None:
        if member.type == tarfile.REGTYPE:
            with path.open("xb") as file:
                for piece in _content(archive, member):
                    file.write(piece)
        elif member.issym():
            path.symlink_to(member.linkname)
        elif member.isfifo():
            os.mkfifo(path)
        elif member.ischr() and (member.devmajor, member.devminor) == (0, 0):
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
        else:
            raise NotPortableError(f"{member.name!r} is a device, or of no kind that a layer holds")

    def finish(self) -> None:
        """Give folders their facts, the inner ones first: what is put into one changes its time."""
        if "diff" not in self._folders:
            raise NotPortableError("there is no diff in it")
        for name, member in reversed(self._folders.items()):
            _set_facts(self._target / name, member)


def _set_facts(path: Path, member: tarfile.TarInfo) -> None:
    os.chown(path, member.uid, member.gid, follow_symlinks=False)
    if not member.issym():
        path.chmod(stat.S_IMODE(member.mode))
    for key, value in member.pax_headers.items():
        if key.startswith(_ATTRIBUTE):
            os.setxattr(path, key[len(_ATTRIBUTE) :], base64.b64decode(value, validate=True), follow_symlinks=False)
    moment = int(member.pax_headers[_TIME])
    os.utime(path, ns=(moment, moment), follow_symlinks=False)
