"""Images in files, without a daemon: what `docker save` writes, and OCI image layouts as a tar or a directory.

An image's id is the SHA-256 of its configuration, which names the SHA-256 of each decompressed layer (`diff_ids`). Both
are compared with what is read; digests of the compressed layers would say nothing more.
"""

import functools
import hashlib
import io
import json
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self, cast

from sandboxes.images.config import ImageConfig, ImageError
from sandboxes.images.root_tar import RootWriter, tar_errors
from sandboxes.linux import syscalls as kernel

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(kernel.MACHINE, kernel.MACHINE)
"""This machine's architecture, as images name it (Go's GOARCH)."""

MAX_JSON_BYTES = 4 << 20
"""Limits an index, a manifest and a configuration, as registries do."""

_MAX_LAYERS = 500
"""Limits the layers of an image. Docker makes at most 127."""

_MAX_FILES = 10_000
"""Limits the members of a tar with an image, which has a few for each layer."""

_MAX_HEADER_BYTES = 4 << 20
_MAX_NESTING = 4
"""Limits the indexes in indexes, and the links of one name."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PLAIN_FILE = kernel.open_how(os.O_RDONLY | os.O_NONBLOCK, kernel.RESOLVE_BENEATH | kernel.RESOLVE_NO_MAGICLINKS)


class _Layer(NamedTuple):
    file: str
    diff_id: str


class ImageArchive:
    """One image in a file or directory, open for reading. Methods block. Its id is the digest of its configuration."""

    def __init__(self, path: Path) -> None:
        """Read what the image at a path of `open_plain` consists of; ImageError if it has none for this machine."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The places of a tar's files; None for a directory.
            self._places = None if path.is_dir() else _places(self._fd)
            with tar_errors():
                self.id, self.config, self._layers = self._described()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)

    def unpack(self, target: Path) -> None:
        """Write the image's files, without device nodes, into an empty directory; ImageError if a layer is unsound."""
        with RootWriter(target, attributes=True) as writer:
            for number, layer in enumerate(self._layers):
                # Nothing is below the first one that it could hide.
                if number:
                    self._read_layer(layer, writer.hide)
                self._read_layer(layer, functools.partial(writer.add, is_layer=True))
            writer.finish()

    def _read_layer(self, layer: _Layer, read: Callable[[BinaryIO], str]) -> None:
        # Checked each time: the file may change while it is read.
        with self._open(layer.file) as file:
            if f"sha256:{read(file)}" != layer.diff_id:
                raise ImageError(f"its layer {layer.file!r} is not the one that its configuration names")

    # -- what the image consists of ----------------------------------------------------------------------------------

    def _described(self) -> tuple[str, ImageConfig, list[_Layer]]:
        if self._has("manifest.json"):
            images = _list(self._json("manifest.json"), "manifest.json")
            if len(images) != 1:
                raise ImageError(f"it holds {len(images)} images: save one of them alone")
            manifest = _object(images[0], "manifest.json")
            config, files = self._read(_text(manifest.get("Config"))), _list(manifest.get("Layers"), "manifest.json")
        elif self._has("index.json"):
            manifest = self._manifest(_object(self._json("index.json"), "index.json"))
            config = self._blob(manifest.get("config"))
            files = [_blob_file(layer) for layer in _list(manifest.get("layers"), "manifest")]
        else:
            raise ImageError("it holds no image: `docker save` and `skopeo copy ... oci-archive:` write such files")
        described = _object(json.loads(config), "configuration")
        require_platform(described)
        rootfs = _object(described.get("rootfs"), "configuration")
        diff_ids = _list(rootfs.get("diff_ids"), "configuration")
        if not 0 < len(files) == len(diff_ids) <= _MAX_LAYERS:
            raise ImageError(f"it has {len(files)} layers, and its configuration names {len(diff_ids)}")
        layers = [_Layer(_text(file), _digest(digest)) for file, digest in zip(files, diff_ids, strict=True)]
        return f"sha256:{hashlib.sha256(config).hexdigest()}", ImageConfig.parse(described.get("config")), layers

    def _manifest(self, index: dict[str, Any], level: int = 0) -> dict[str, Any]:
        entries = [_object(entry, "index") for entry in _list(index.get("manifests"), "index")]
        # An index may name one image by several tags.
        fitting = {_blob_file(entry): entry for entry in entries if _is_for_this_machine(entry.get("platform"))}
        if len(fitting) != 1:
            platforms = sorted({json.dumps(entry.get("platform"))[:100] for entry in entries})
            raise ImageError(f"it holds {len(fitting)} images for linux/{ARCHITECTURE}, not one: {platforms[:10]}")
        [entry] = fitting.values()
        manifest = _object(json.loads(self._blob(entry)), "manifest")
        if "manifests" not in manifest:
            return manifest
        if level == _MAX_NESTING:
            raise ImageError("its index has too many levels")
        return self._manifest(manifest, level + 1)

    def _blob(self, descriptor: object) -> bytes:
        name = _blob_file(descriptor)
        content = self._read(name)
        if hashlib.sha256(content).hexdigest() != name.rpartition("/")[2]:
            raise ImageError(f"{name!r} has another content than its name says")
        return content

    def _json(self, name: str) -> object:
        return json.loads(self._read(name))

    def _read(self, name: str) -> bytes:
        with self._open(name) as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise ImageError(f"{name!r} is larger than {MAX_JSON_BYTES >> 20} MB")
        return content

    # -- its files ---------------------------------------------------------------------------------------------------

    def _has(self, name: str) -> bool:
        try:
            self._open(name).close()
        except ImageError:
            return False
        return True

    def _open(self, name: str) -> BinaryIO:
        """Open a file of the archive. No link leads out of it."""
        if self._places is not None:
            for _ in range(_MAX_NESTING):
                place = self._places.get(posixpath.normpath(name))
                if isinstance(place, tuple):
                    return cast("BinaryIO", io.BufferedReader(_Part(self._fd, *place), 1 << 20))
                if place is None:
                    break
                name = place
            raise ImageError(f"it lacks {name!r}")
        try:
            fd = kernel.openat2(self._fd, os.fsencode(name), _PLAIN_FILE)
        except OSError as error:
            raise ImageError(f"it lacks {name!r}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ImageError(f"its {name!r} is no file")
        return os.fdopen(fd, "rb", buffering=1 << 20)


class _Part(io.RawIOBase):
    def __init__(self, fd: int, begin: int, size: int) -> None:
        super().__init__()
        self._fd, self._begin, self._size, self._at = fd, begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        data = os.pread(self._fd, count, self._begin + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _Headers(io.FileIO):
    """A tar of which only headers are read; it refuses those that claim to be large."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_HEADER_BYTES:
            raise ImageError("one of its headers is too large")
        return super().read(size) or b""


def _places(fd: int) -> dict[str, tuple[int, int] | str]:
    """Return where the files of a tar are: offset and size, or the name that a link leads to."""
    places: dict[str, tuple[int, int] | str] = {}
    end = os.fstat(fd).st_size
    if os.pread(fd, 2, 0) == b"\x1f\x8b":
        raise ImageError("it is compressed as a whole: decompress it (`gunzip`) first")
    with tar_errors(), _Headers(fd, closefd=False) as file, tarfile.open(fileobj=file, mode="r:") as archive:
        for _ in range(_MAX_FILES):
            if (member := archive.next()) is None:
                return places
            name = posixpath.normpath(member.name)
            if member.isreg() and member.offset_data <= member.offset_data + member.size <= end:
                places[name] = member.offset_data, member.size
            elif member.issym():
                places[name] = posixpath.join(posixpath.dirname(name), member.linkname)
            elif member.islnk():
                places[name] = member.linkname
    raise ImageError(f"it has more than {_MAX_FILES} files, so it is no image")


def _is_for_this_machine(platform: object) -> bool:
    """Return whether an image of an index is for this machine; an index of one image need not say so."""
    if not isinstance(platform, dict):
        return platform is None
    return bool((platform.get("os", "linux"), platform.get("architecture", ARCHITECTURE)) == ("linux", ARCHITECTURE))


def require_platform(described: Mapping[str, Any]) -> None:
    """Refuse an image whose `os` and `architecture` are not this machine's."""
    platform = {name: described[name] for name in ("os", "architecture") if described.get(name)}
    if not _is_for_this_machine(platform):
        raise ImageError(f"it is for {json.dumps(platform)[:200]}, and this machine is linux/{ARCHITECTURE}")


def _blob_file(descriptor: object) -> str:
    return f"blobs/sha256/{_digest(_object(descriptor, 'manifest').get('digest')).removeprefix('sha256:')}"


def _digest(value: object) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ImageError(f"{value!r:.100} is no digest of the kind sha256:…")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ImageError(f"its manifest has {value!r:.100} in place of the name of a file")
    return value


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ImageError(f"its {name} has {value!r:.100} in place of an object")
    return value


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ImageError(f"its {name} has {value!r:.100} in place of a list")
    return value
