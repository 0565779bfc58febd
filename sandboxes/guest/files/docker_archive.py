"""Docker's `archive` operations, with the statuses and texts of Docker 20.10, run in a child by `operations`."""

import bz2
import gzip
import io
import json
import lzma
import os
import stat
import tarfile
from collections.abc import Iterator
from typing import Any

from sandboxes.linux.files import remove_path

COMPRESSIONS = (gzip, bz2, lzma)
"""Loaded before this process changes its root: tarfile would import them from the sandbox when it needs one."""
MEDIA_TYPE = "application/vnd.forkpoint.archive"
"""The media type of a packed path: a line of JSON about the path, then the archive."""
MAX_BYTES = 512 << 20
"""The largest archive that is packed, and the largest file that is read: it is in memory as a whole."""


class ArchiveError(Exception):
    """An operation cannot be carried out; `status` is the HTTP status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def perform(tool: str, fields: dict[str, Any], body: bytes) -> tuple[int, str, bytes]:
    """Return an operation's answer: HTTP status, media type and body."""
    if tool not in {"stat", "pack", "extract"}:
        raise ArchiveError(404, f"there is no tool {tool!r}: use exec, put, get, delete")
    if root := fields.get("root"):
        # The files of a side service: its absolute links lead to its own files. Only this child moves.
        os.chroot(root)
        os.chdir("/")
    if tool == "stat":
        return 200, "application/json", json.dumps(look(fields["path"])).encode()
    if tool == "pack":
        head = json.dumps(look(fields["path"])).encode()
        return 200, MEDIA_TYPE, head + b"\n" + _pack(fields["path"])
    _extract(fields["path"], body, whole_kinds=bool(fields.get("no_overwrite")))
    return 200, "application/octet-stream", b""


def look(path: str) -> dict[str, Any]:
    """Return the facts of a path. A link is not followed, unless the path ends with a slash or a dot."""
    # lstat follows a link whose path ends with a slash (path_resolution(7)), which gives Docker's behaviour without a
    # case of its own.
    status = os.lstat(path)
    link = os.path.realpath(path) if stat.S_ISLNK(status.st_mode) else ""
    facts = {"name": _base(path), "size": status.st_size, "mode": status.st_mode, "mtime_ns": status.st_mtime_ns}
    return {**facts, "link": link}


def _base(path: str) -> str:
    stripped = path.rstrip("/")
    return os.path.basename(stripped) if stripped else "/"  # noqa: PTH119 - pathlib is not loaded here


class _BoundedBuffer(io.BytesIO):
    def write(self, data: Any, /) -> int:
        # Checked at each write, because the sizes of the files may change while they are packed.
        if self.tell() + len(data) > MAX_BYTES:
            raise ArchiveError(413, f"what is there is larger than {MAX_BYTES >> 20} MB: copy it in parts")
        return super().write(data)


def _pack(path: str) -> bytes:
    buffer, base = _BoundedBuffer(), _base(path)
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        # Links are packed as links, so nothing outside the path gets into the archive.
        archive.add(path, arcname="" if base == "/" else base, filter=_plain)
    return buffer.getvalue()


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if member.name == f"proc/{os.getpid()}":
        # Of this very process, which is a fork of pid 1.
        return None
    # Docker packs owners by number, and times in whole seconds.
    member.uname = member.gname = ""
    member.mtime = int(member.mtime)
    return member


def _extract(path: str, body: bytes, *, whole_kinds: bool) -> None:
    if not stat.S_ISDIR(os.stat(path).st_mode):  # noqa: PTH116
        raise ArchiveError(400, f"extraction point is not a directory: {path}")
    # An empty body counts as an archive without members; tarfile would refuse it.
    if not body:
        return
    try:
        with tarfile.open(fileobj=io.BytesIO(body), mode="r:*") as archive:
            require_whole(archive)
            # This process is inside the sandbox's root, so the archive's links cannot lead out of it.
            archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
            archive.extractall(path, members=_cleared(archive, path, whole_kinds=whole_kinds), numeric_owner=True)  # noqa: S202
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise ArchiveError(400, f"the body is not a whole tar archive: {str(error).partition(chr(10))[0]}") from error


def require_whole(archive: tarfile.TarFile) -> None:
    """Read a whole archive before any of it is unpacked, because `tarfile` takes half an archive for a shorter one."""
    members, source = archive.getmembers(), archive.fileobj
    assert source is not None
    if members and members[-1].isreg() and members[-1].size:
        # tarfile skips contents by seeking, so a missing end of the last file is not noticed by reading its heads.
        source.seek(members[-1].offset_data + members[-1].size - 1)
        if not source.read(1):
            raise tarfile.ReadError("its last file is cut off")
    # Two blocks of zeros end an archive; what comes after them is padding.
    source.seek(archive.offset)
    rest = source.read(tarfile.BLOCKSIZE)
    if rest.strip(b"\0") or len(rest) not in {0, tarfile.BLOCKSIZE}:
        raise tarfile.ReadError("it is cut off")


def _cleared(archive: tarfile.TarFile, target: str, *, whole_kinds: bool) -> Iterator[tarfile.TarInfo]:
    """Yield the members under names that stay below target, and remove what is in the way of each."""
    for member in archive:
        parts = [part for part in member.name.split("/") if part not in {"", "."}]
        # Inside the sandbox's root such a name could not reach the host, but it would leave the target.
        if ".." in parts:
            raise ArchiveError(400, f"{member.name!r} leads out of the archive")
        member.name = "/".join(parts)
        if not parts:
            continue
        # `parts` has no empty name, so this cannot become an absolute path that drops the target.
        path = os.path.join(target, member.name)  # noqa: PTH118
        # lexists, because a dangling link is in the way, too; open(2) would create its target.
        if os.path.lexists(path):
            is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
            # `noOverwriteDirNonDir`: a directory must not become a file, or a file a directory.
            if whole_kinds and is_folder != member.isdir():
                kinds = ("directory", "non-directory") if is_folder else ("non-directory", "directory")
                raise ArchiveError(400, f'cannot overwrite {kinds[0]} "{path}" with {kinds[1]} "{target}"')
            if is_folder and not member.isdir():
                remove_path(path)
            elif not is_folder:
                # Replaced and not overwritten: other hard links of the old file keep their content.
                os.unlink(path)  # noqa: PTH108
        yield member
