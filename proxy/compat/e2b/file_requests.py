"""E2B: what requests about files mean: to envd's Filesystem service and to its `/files` (pure)."""

import base64
import binascii
import re
import zlib
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl

from proxy.dialects import multipart
from proxy.dialects.base import Request
from proxy.refusals import RefusalError
from sandboxes.calls import ToolCall

MAX_ENTRY_DEPTH = 64
MAX_UNZIPPED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Plain:
    """Calls whose answers are one answer, in form: `entry`, `entries`, `nothing`, `file`, `uploads` or `processes`."""

    calls: tuple[ToolCall, ...]
    form: str


@dataclass(frozen=True, slots=True)
class Watching:
    """A request about a watched directory. verb: `begin` or `stream`, with the call for it; `events` or `end`."""

    verb: str
    call: ToolCall | None = None
    watcher: str = ""
    keepalive_s: float = 0.0
    deadline_s: float | None = None


def entries(method: str, message: dict[str, Any], request: Request) -> "Plain | Watching":
    """Say what a request about entries means, by its method's name.

    Raises:
        Refused: 400 or 404, with what is wrong.
    """
    path, user = word_of(message, "path"), user_of(request)
    match method:
        case "Stat":
            return _plain("info", "entry", {"path": _path(path), "user": user})
        case "ListDir":
            depth = message.get("depth") or 1
            if not isinstance(depth, int) or isinstance(depth, bool) or not 1 <= depth <= MAX_ENTRY_DEPTH:
                raise RefusalError(400, "depth", f"depth must be 1 to {MAX_ENTRY_DEPTH}.")
            return _plain("list", "entries", {"path": _path(path or "."), "user": user, "depth": depth})
        case "MakeDir":
            return _plain("mkdir", "entry", {"path": _path(path), "user": user})
        case "Move":
            source, target = _path(word_of(message, "source")), _path(word_of(message, "destination"))
            return _plain("move", "entry", {"path": source, "target": target, "user": user})
        case "Remove":
            return _plain("remove", "nothing", {"path": _path(path), "user": user})
        case "WatchDir" | "CreateWatcher":
            return _watch(method == "WatchDir", message, _path(path), user)
        case "GetWatcherEvents":
            return Watching("events", watcher=word_of(message, "watcherId"))
        case "RemoveWatcher":
            return Watching("end", watcher=word_of(message, "watcherId"))
    raise RefusalError(404, "no-such-method", f"filesystem.Filesystem/{method} is not served.")


def _watch(streams: bool, message: dict[str, Any], path: str, user: str) -> Watching:
    if message.get("includeEntry") is True:
        raise RefusalError(404, "entry", "events come without the entries that they are about: look at these.")
    told = {"path": path, "user": user, "recursive": message.get("recursive") is True}
    return Watching("stream" if streams else "begin", ToolCall("process", "watch", told))


def transfers(request: Request) -> Plain:
    """Say what a request means that carries a file, or wants one.

    Raises:
        Refused: 400 to 415, with what is wrong.
    """
    query = dict(parse_qsl(request.query, keep_blank_values=True))
    user, path = query.get("username", "") or user_of(request), query.get("path", "")
    if request.method == "GET":
        return _plain("read", "file", {"path": _path(path), "user": user})
    if request.method != "POST":
        raise RefusalError(405, "method", "files take GET and POST.")
    body = _unpacked(request)
    kind = request.header("content-type")
    if not kind.lower().startswith("multipart/form-data"):
        return Plain((_upload(path, user, body),), "uploads")
    found = multipart.files(body, kind)
    if path and len(found) > 1:
        raise RefusalError(400, "multipart", "one path was given for several files.")
    if not found:
        raise RefusalError(400, "multipart", "the form holds no file.")
    return Plain(tuple(_upload(path or file.name, user, file.data) for file in found), "uploads")


def _upload(path: str, user: str, data: bytes) -> ToolCall:
    arguments = {"path": _path(path), "user": user, "sha256": sha256(data).hexdigest()}
    return ToolCall("files", "write", arguments, data)


def _unpacked(request: Request) -> bytes:
    encoding = request.header("content-encoding").lower() or "identity"
    if encoding == "identity":
        return request.body
    if encoding != "gzip":
        raise RefusalError(415, "content-encoding", f"uploads come as they are or gzipped, not as {encoding}.")
    unzip = zlib.decompressobj(wbits=31)
    try:
        data = unzip.decompress(request.body, MAX_UNZIPPED_BYTES)
    except zlib.error as error:
        raise RefusalError(400, "content-encoding", f"the body is no gzip: {error}.") from None
    if not unzip.eof:
        raise RefusalError(400, "content-encoding", "the gzipped body is cut off, or holds too much.")
    return data


def _plain(tool: str, form: str, arguments: dict[str, Any]) -> Plain:
    return Plain((ToolCall("files", tool, arguments),), form)


def _path(path: str) -> str:
    if not path or "\0" in path or len(path.encode()) > 4095:
        raise RefusalError(400, "path", "a path has 1 to 4095 bytes, none of them NUL.")
    return path


def user_of(request: Request) -> str:
    """Return the user that Basic authorization names; empty for the sandbox's own."""
    scheme, _, coded = request.header("authorization").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        user = base64.b64decode(coded, validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        raise RefusalError(400, "user", "the Authorization header is no Basic one.") from None
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", user):
        raise RefusalError(400, "user", "a user's name is of letters, digits, _, . and -.")
    return user


def word_of(message: dict[str, Any], name: str) -> str:
    """Return a string that a message has; empty where it has none."""
    value = message.get(name) or ""
    if not isinstance(value, str) or "\0" in value:
        raise RefusalError(400, name, f"{name} must be a string without NUL.")
    return value
