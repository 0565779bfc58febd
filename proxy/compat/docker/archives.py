"""Archives that Docker's clients copy in and out: the keys of calls, and the description of a path (pure)."""

import base64
import datetime as dt
import stat
import tarfile
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import orjson

from proxy.dialects.body_forms import UNORDERED, in_any_order, open_tar
from proxy.tree.keys import CallKey, call_key
from sandboxes.calls import ToolCall
from sandboxes.guest.files.docker_archive import require_whole

_GO_TYPES = {
    stat.S_IFDIR: 1 << 31, stat.S_IFLNK: 1 << 27, stat.S_IFIFO: 1 << 25, stat.S_IFSOCK: 1 << 24, stat.S_IFBLK: 1 << 26,
    stat.S_IFCHR: (1 << 26) | (1 << 21),
}  # fmt: skip
"""Bits of Go's os.FileMode for each Unix file type (Go documentation, io/fs.FileMode)."""
_GO_BITS = ((stat.S_ISUID, 1 << 23), (stat.S_ISGID, 1 << 22), (stat.S_ISVTX, 1 << 20))


def extract_key(call: ToolCall) -> CallKey:
    """Return the key of a call that unpacks an archive, which is the call's body.

    Times of members are not in the key, because clients pack with the time of day. An archive that unpacks to more than
    `body_forms.MAX_UNPACKED_BYTES` is identified by its bytes, because its members are read on the event-loop thread.
    """
    return call_key(ToolCall(call.endpoint, call.tool, {**call.arguments, "holds": _identity(call.body)}))


def _identity(body: bytes) -> Any:
    try:
        with open_tar(body) as archive:
            return _members(archive)
    except (tarfile.TarError, OSError, EOFError, ValueError):
        return sha256(body).hexdigest()


def _members(archive: tarfile.TarFile) -> list[list[Any]]:
    rows, members = list[list[Any]](), list[tuple[str, bool]]()
    # A truncated archive is refused when it is unpacked, so it must not share a key with a whole one.
    require_whole(archive)
    for member in archive:
        file = archive.extractfile(member) if member.isreg() else None
        content = sha256(file.read()).hexdigest() if file is not None else ""
        file_type, owners = member.type.decode("latin-1"), [member.uid, member.gid]
        rows.append([member.name, file_type, member.mode, owners, member.linkname, content])
        members.append((UNORDERED if member.islnk() else member.name, member.isdir()))
    return in_any_order(rows, members)


def path_stat(fields: Mapping[str, Any]) -> str:
    """Return the header with which Docker describes a path, from the sandbox's description."""
    seconds, nanoseconds = divmod(fields["mtime_ns"], 1_000_000_000)
    second = dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S")
    value = {
        "name": fields["name"], "size": fields["size"], "mode": go_mode(fields["mode"]),
        "mtime": f"{second}.{nanoseconds:09d}".rstrip("0").rstrip(".") + "Z", "linkTarget": fields["link"],
    }  # fmt: skip
    return base64.b64encode(orjson.dumps(value)).decode()


def go_mode(mode: int) -> int:
    """Return a Unix mode as Go's os.FileMode."""
    bits = sum(go for unix, go in _GO_BITS if mode & unix)
    return (mode & 0o777) | _GO_TYPES.get(stat.S_IFMT(mode), 0) | bits
