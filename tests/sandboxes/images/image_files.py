"""Images written by tests: layers from lists of members, and archives of the kinds that programs write."""

import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes.images.archives import ARCHITECTURE


@dataclass(frozen=True)
class Member:
    """A member of a layer: its name, kind, and content or where it leads."""

    name: str
    text: str = ""
    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    mtime: int = 1_700_000_000
    uid: int = 0
    headers: Mapping[str, str] | None = None


def folder(name: str, mode: int = 0o755, mtime: int = 1_700_000_000) -> Member:
    return Member(name, kind=tarfile.DIRTYPE, mode=mode, mtime=mtime)


def link(name: str, target: str) -> Member:
    return Member(name, target, tarfile.SYMTYPE)


def twin(name: str, target: str) -> Member:
    return Member(name, target, tarfile.LNKTYPE)


def layer(*members: Member) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.type, info.mode, info.mtime, info.uid = member.kind, member.mode, member.mtime, member.uid
            info.pax_headers = dict(member.headers or {})
            if member.kind == tarfile.REGTYPE:
                info.size = len(member.text)
                archive.addfile(info, io.BytesIO(member.text.encode()))
            else:
                info.linkname = member.text
                archive.addfile(info)
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def configuration(layers: Sequence[bytes], **changes: Any) -> bytes:
    diff_ids = [f"sha256:{sha256(content)}" for content in layers]
    return json.dumps({
        "architecture": ARCHITECTURE, "os": "linux", "config": {"Env": ["A=1"], "WorkingDir": "/srv"},
        "rootfs": {"type": "layers", "diff_ids": diff_ids}, **changes,
    }).encode()  # fmt: skip


def docker_files(layers: Sequence[bytes], config: bytes | None = None) -> dict[str, bytes]:
    """Return the files that `docker save` writes."""
    config = configuration(layers) if config is None else config
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": f"{sha256(config)}.json", "RepoTags": ["image:1"], "Layers": names}]
    files = dict(zip(names, layers, strict=True))
    return files | {f"{sha256(config)}.json": config, "manifest.json": json.dumps(manifest).encode()}


def blob(files: dict[str, bytes], content: bytes, **more: Any) -> dict[str, Any]:
    """Add a blob to the files of a layout; return its descriptor."""
    files[f"blobs/sha256/{sha256(content)}"] = content
    return {"digest": f"sha256:{sha256(content)}", "size": len(content), **more}


def oci_manifest(files: dict[str, bytes], layers: Sequence[bytes], config: bytes | None = None, **more: Any) -> Any:
    """Add an image with compressed layers to the files of a layout; return the descriptor of its manifest."""
    stored = [blob(files, gzip.compress(content, mtime=0)) for content in layers]
    described = blob(files, configuration(layers) if config is None else config)
    return blob(files, json.dumps({"schemaVersion": 2, "config": described, "layers": stored}).encode(), **more)


def oci_files(layers: Sequence[bytes], config: bytes | None = None) -> dict[str, bytes]:
    """Return the files of an OCI layout."""
    files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}
    entry = oci_manifest(files, layers, config)
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    return files


def packed(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write files as a tar."""
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def laid_out(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write files below a directory."""
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def tree(root: Path) -> dict[str, tuple[Any, ...]]:
    """Return all that a sandbox can see of a tree, by path. Sizes and link counts of directories are the disk's."""
    seen: dict[str, tuple[Any, ...]] = {}
    numbers: dict[int, int] = {}
    for path in sorted([root, *root.rglob("*")]):
        status = path.lstat()
        kind, what = stat.S_IFMT(status.st_mode), ""
        if path.is_symlink():
            what = os.readlink(path)  # noqa: PTH115 - as it is
        elif stat.S_ISREG(kind):
            what = path.read_bytes().hex()
        facts: tuple[Any, ...] = (oct(status.st_mode), status.st_uid, status.st_gid, status.st_mtime_ns, what)
        if not stat.S_ISDIR(kind):
            facts += (status.st_nlink, numbers.setdefault(status.st_ino, len(numbers)))
        if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
            names = [name for name in os.listxattr(path) if name.startswith(("user.", "security.capability"))]
            facts += tuple((name, os.getxattr(path, name)) for name in sorted(names))
        seen[str(path.relative_to(root))] = facts
    return seen
