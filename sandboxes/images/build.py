"""A root file system becomes an image, as an archive that both `docker load` and readers of OCI archives take.

The image has one layer. Times are whole seconds. Sockets and device nodes are left out, as `docker export` leaves out
sockets. Equal trees and configurations give equal images.
"""

import hashlib
import json
import os
import stat
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from sandboxes.images.archives import ARCHITECTURE
from sandboxes.images.config import ImageConfig, ImageError
from sandboxes.images.daemon import ImageDaemon
from sandboxes.images.root_tar import ATTRIBUTE, WHITEOUT, is_kept, require_room
from sandboxes.linux import trees
from sandboxes.linux.descriptors import Opened, open_unnoticed

_MAX_HOLE_BYTES = 1 << 30
"""Limits the holes of a tree's sparse files together, which a layer has as zeros."""

_PIECE_BYTES = 1 << 20
_TYPES = {stat.S_IFREG: tarfile.REGTYPE, stat.S_IFLNK: tarfile.SYMTYPE, stat.S_IFIFO: tarfile.FIFOTYPE}
_OCI = "application/vnd.oci.image"


class _Packed(NamedTuple):
    id: str
    pieces: Iterator[bytes]


def load(
    daemon: ImageDaemon, root: Path, config: ImageConfig, name: str, folder: Path, *, left_out: Collection[str] = ()
) -> str:
    """Give an image of a tree to a Docker daemon; return the image's id. Blocking: some seconds for a gigabyte.

    Nothing may change the tree meanwhile; `folder` has room for a copy. `left_out` are names in the root directory that
    the image does not have. A tree that cannot be an image is an `ImageError`.
    """
    with _packed(root, config, name, folder, left_out) as packed:
        daemon.load(packed.pieces)
        return packed.id


def write(target: Path, root: Path, config: ImageConfig, name: str = "", *, left_out: Collection[str] = ()) -> str:
    """Write an image of a tree into a new file, whose disk has room for two; return its id. Blocking; see `load`."""
    with _packed(root, config, name, target.parent, left_out) as packed, target.open("xb") as file:
        file.writelines(packed.pieces)
        return packed.id


@contextmanager
def _packed(root: Path, config: ImageConfig, name: str, folder: Path, left_out: Collection[str]) -> Iterator[_Packed]:
    if name and ":" not in name.rpartition("/")[2]:
        # `docker load` takes no name without a tag.
        name += ":latest"
    # A file, because a tar has the digest of the layer before the layer.
    with tempfile.TemporaryFile(dir=folder) as file:
        layer = _HashedFile(cast("BinaryIO", file))
        with Opened(os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as top:
            _LayerTar(layer).write(top, left_out)
        diff_id = layer.sha256.hexdigest()
        described = {
            "architecture": ARCHITECTURE, "os": "linux", "config": config.members(),
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff_id}"]},
        }  # fmt: skip
        configuration = _json(described)
        config_id = hashlib.sha256(configuration).hexdigest()
        size = file.tell()
        file.seek(0)

        def pieces() -> Iterator[bytes]:
            manifest = _json({
                "schemaVersion": 2, "mediaType": f"{_OCI}.manifest.v1+json",
                "config": _descriptor("config.v1+json", config_id, len(configuration)),
                "layers": [_descriptor("layer.v1.tar", diff_id, size)],
            })  # fmt: skip
            digest = hashlib.sha256(manifest).hexdigest()
            entry = _descriptor("manifest.v1+json", digest, len(manifest)) | {
                "platform": {"architecture": ARCHITECTURE, "os": "linux"}, "annotations": _annotations(name),
            }  # fmt: skip
            docker = {"Config": _blob(config_id), "RepoTags": [name] if name else None, "Layers": [_blob(diff_id)]}
            yield _member("oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
            yield _member(_blob(config_id), configuration)
            yield _member(_blob(digest), manifest)
            yield _head(_blob(diff_id), size)
            while piece := file.read(_PIECE_BYTES):
                require_room(file.fileno())
                yield piece
            yield bytes(-size % tarfile.BLOCKSIZE)
            yield _member("index.json", _json({"schemaVersion": 2, "manifests": [entry]}))
            yield _member("manifest.json", _json([docker])) + bytes(2 * tarfile.BLOCKSIZE)

        yield _Packed(f"sha256:{config_id}", pieces())


def _annotations(name: str) -> dict[str, str]:
    """Return the names that readers of OCI archives look for: the tag alone, and containerd's with a registry."""
    if not name:
        return {}
    host, slash, _ = name.partition("/")
    is_host = bool(slash) and (host == "localhost" or any(character in host for character in ".:"))
    full = name if is_host else f"docker.io/{name}" if slash else f"docker.io/library/{name}"
    return {"org.opencontainers.image.ref.name": name.rpartition(":")[2], "io.containerd.image.name": full}


class _HashedFile:
    """The file below a `TarFile` that is written; it computes the digest of what it gets."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256 = file, hashlib.sha256()
        self._fd = file.fileno()
        self.tell = file.tell

    def write(self, data: bytes) -> int:
        require_room(self._fd)
        self.sha256.update(data)
        return self._file.write(data)


class _LayerTar:
    def __init__(self, target: _HashedFile) -> None:
        self._archive = tarfile.open(  # noqa: SIM115 - closed at the end of `write`
            fileobj=cast("Any", target), mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
        )
        # The first name of each file that has several.
        self._first: dict[tuple[int, int], str] = {}
        self._hole_bytes = 0

    def write(self, top: int, left_out: Collection[str]) -> None:
        try:
            for folder in trees.folders(top):
                if folder.path.partition("/")[0] in left_out:
                    continue
                status, attributes = os.fstat(folder.fd), _attributes(folder.fd)
                self._add(_described(folder.path or "./", status, tarfile.DIRTYPE, attributes))
                for entry in folder.entries:
                    if not folder.path and entry.name in left_out:
                        continue
                    if entry.name.startswith(WHITEOUT):
                        raise ImageError(f"{folder.path}{entry.name} has the name of a whiteout: rename it")
                    self._add_entry(folder, entry)
        except trees.TreeTooDeepError as error:
            raise ImageError(str(error)) from error
        self._archive.close()

    def _add_entry(self, folder: trees.Folder, entry: os.DirEntry[str]) -> None:
        status = entry.stat(follow_symlinks=False)
        kind = _TYPES.get(stat.S_IFMT(status.st_mode))
        if kind is None:
            return
        name = folder.path + entry.name
        first = self._first.setdefault((status.st_dev, status.st_ino), name) if status.st_nlink > 1 else name
        if first != name:
            info = _described(name, status, tarfile.LNKTYPE)
            info.linkname = first
        elif kind == tarfile.REGTYPE:
            self._add_file(folder, entry.name)
            return
        else:
            info = _described(name, status, kind)
            if kind == tarfile.SYMTYPE:
                info.linkname = os.readlink(entry.name, dir_fd=folder.fd)
        self._add(info)

    def _add_file(self, folder: trees.Folder, name: str) -> None:
        with open(  # noqa: PTH123
            open_unnoticed(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, within=folder.fd), "rb"
        ) as file:
            status = os.fstat(file.fileno())
            self._hole_bytes += max(0, status.st_size - status.st_blocks * 512)
            if self._hole_bytes > _MAX_HOLE_BYTES:
                raise ImageError(f"its sparse files have holes of more than {_MAX_HOLE_BYTES >> 20} MB")
            info = _described(folder.path + name, status, tarfile.REGTYPE, _attributes(file.fileno()))
            info.size = status.st_size
            self._add(info, file)

    def _add(self, info: tarfile.TarInfo, content: BinaryIO | None = None) -> None:
        self._archive.addfile(info, content)
        # tarfile keeps every member otherwise.
        cast("Any", self._archive).members.clear()


def _described(
    name: str, status: os.stat_result, kind: bytes, attributes: dict[str, str] | None = None
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.uid, info.gid = kind, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    info.mtime, info.pax_headers = status.st_mtime_ns // 1_000_000_000, attributes or {}
    return info


def _attributes(fd: int) -> dict[str, str]:
    names = filter(is_kept, sorted(os.listxattr(fd)))
    return {ATTRIBUTE + name: os.getxattr(fd, name).decode("utf-8", "surrogateescape") for name in names}


def _descriptor(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": f"{_OCI}.{kind}", "digest": f"sha256:{digest}", "size": size}


def _blob(digest: str) -> str:
    return f"blobs/sha256/{digest}"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _head(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)


def _member(name: str, content: bytes) -> bytes:
    return _head(name, len(content)) + content + bytes(-len(content) % tarfile.BLOCKSIZE)
