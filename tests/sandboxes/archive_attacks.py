"""Paths and archives that try to leave a sandbox, as clients of Docker's and E2B's file APIs could send them. Pure."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

UP = "../" * 12


def paths(canary: Path) -> list[str]:
    """Return paths that would lead to a file of the host if they were resolved outside of the sandbox."""
    name = str(canary)
    return [
        name, f"/{UP}{name}", f"{UP}{name}", f"/root/{UP}{name}", f"/proc/1/root{name}", f"/proc/self/cwd/{UP}{name}",
        f"/proc/1/cwd/{UP}{name}", f"/proc/self/root/{UP}{name}", f"/tmp/out{name}", f"/tmp/out/{UP}{name}",
    ]  # fmt: skip


def archives(canary: Path) -> Iterator[tuple[str, bytes]]:
    """Yield archives whose members would write to a file of the host, read it, or make a device, with their names."""
    folder, name = str(canary.parent), canary.name
    for path in (f"/{folder}/{name}", f"{UP}{folder}/{name}", f"a/{UP}{folder}/{name}"):
        yield f"a file {path}", _packed(_file(path))
    for target in (folder, f"{UP}{folder}", f"/proc/1/root{folder}", "/proc/self/cwd"):
        yield f"a file behind a link to {target}", _packed(_link("l", target), _file(f"l/{name}"))
    for target in (str(canary), f"{UP}{canary}"):
        yield f"a link to {target} and a file in its place", _packed(_link("l", target), _file("l"))
        yield f"a hard link to {target}", _packed(_link("h", target, tarfile.LNKTYPE), _file("h"))
    for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE):
        device = tarfile.TarInfo("device")
        device.type, device.devmajor, device.devminor, device.mode = kind, 1 if kind == tarfile.CHRTYPE else 8, 1, 0o666
        yield f"a device {kind!r}", _packed((device, b""))


def _file(path: str) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(path)
    member.size = len(b"hostile")
    return member, b"hostile"


def _link(path: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(path)
    member.type, member.linkname = kind, target
    return member, b""


def _packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
