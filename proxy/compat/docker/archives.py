"""Archives as Docker copies them in and out: their keys, and what is told of a path (pure)."""

import base64
import datetime as dt
import io
import stat
import tarfile
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import orjson

from proxy.tree.keys import CallKey, call_key
from sandboxes.calls import ToolCall
from sandboxes.guest.docker_archive import require_whole

MAX_BYTES = 256 << 20
"""Unpacked; an archive that holds more is known by its bytes."""
_KINDS = {
    stat.S_IFDIR: 1 << 31, stat.S_IFLNK: 1 << 27, stat.S_IFIFO: 1 << 25, stat.S_IFSOCK: 1 << 24, stat.S_IFBLK: 1 << 26,
    stat.S_IFCHR: (1 << 26) | (1 << 21),
}  # fmt: skip
_BITS = ((stat.S_ISUID, 1 << 23), (stat.S_ISGID, 1 << 22), (stat.S_ISVTX, 1 << 20))


def extract_key(call: ToolCall) -> CallKey:
    """Return the key of a call that unpacks call.body: the archive counts by what it holds, not by its bytes.

    Names, kinds, modes, owners, links and contents count; times do not, for clients pack with the time of day.
    """
    known = ToolCall(call.endpoint, call.tool, {**call.arguments, "holds": _form(call.body)})
    return call_key(known)


def _form(body: bytes) -> Any:
    try:
        with tarfile.open(fileobj=io.BytesIO(body), mode="r:*") as archive:
            return _members(archive)
    except (tarfile.TarError, OSError, EOFError, ValueError):
        return sha256(body).hexdigest()


def _members(archive: tarfile.TarFile) -> list[list[Any]]:
    found: list[list[Any]] = []
    size = 0
    # Half of an archive is refused where it is unpacked: it must not share a key with a whole one.
    require_whole(archive)
    for member in archive:
        size += member.size
        if size > MAX_BYTES:
            raise ValueError("it holds too much")
        file = archive.extractfile(member) if member.isreg() else None
        content = sha256(file.read()).hexdigest() if file is not None else ""
        kind, owners = member.type.decode("latin-1"), [member.uid, member.gid]
        found.append([member.name, kind, member.mode, owners, member.linkname, content])
    # Whatever comes later under one name is what stays: only members of different names change places.
    return sorted(found, key=lambda one: str(one[0]))


def path_stat(told: Mapping[str, Any]) -> str:
    """Return the header in which Docker tells of a path, of what a sandbox says of it."""
    seconds, nanoseconds = divmod(told["mtime_ns"], 1_000_000_000)
    at = dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S")
    value = {
        "name": told["name"], "size": told["size"], "mode": go_mode(told["mode"]),
        "mtime": f"{at}.{nanoseconds:09d}".rstrip("0").rstrip(".") + "Z", "linkTarget": told["link"],
    }  # fmt: skip
    return base64.b64encode(orjson.dumps(value)).decode()


def go_mode(mode: int) -> int:
    """Return a mode as Go's os.FileMode has it."""
    bits = sum(go for unix, go in _BITS if mode & unix)
    return (mode & 0o777) | _KINDS.get(stat.S_IFMT(mode), 0) | bits
