"""Reads requests about files: to envd's Filesystem service and to its `/files` (pure)."""

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
MAX_UNZIPPED_BYTES = 64 << 20
"""Largest size of a gzipped upload after decompression: that of other bodies (`max_body_bytes`, by default)."""


@dataclass(frozen=True, slots=True)
class CallsRequest:
    """A request that runs calls and combines their results into one response."""

    calls: tuple[ToolCall, ...]  # In order. Only uploads are more than one.
    form: str  # `entry`, `entries`, `nothing`, `file`, `uploads` or `processes`: the form of the response.


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """A request about a watched directory."""

    verb: str  # `begin` or `stream` to begin a watch, `events` to fetch its events, or `end`.
    call: ToolCall | None = None  # Begins the watch; None for `events` and `end`.
    watcher: str = ""  # The watch, for `events` and `end`.
    keepalive_s: float = 0.0  # Silence after which the client of a `stream` expects a keepalive event.
    deadline_s: float | None = None  # Time limit of a `stream`; None for no limit.


def entries(method: str, message: dict[str, Any], request: Request) -> CallsRequest | WatchRequest:
    """Parse a request to the Filesystem service. Raises RefusalError (400 or 404) if it is invalid or not supported."""
    path, user = string_field(message, "path"), user_of(request)
    match method:
        case "Stat":
            return _single("info", "entry", {"path": _path(path), "user": user})
        case "ListDir":
            depth = message.get("depth") or 1
            if not isinstance(depth, int) or isinstance(depth, bool) or not 1 <= depth <= MAX_ENTRY_DEPTH:
                raise RefusalError(400, "depth", f"depth must be 1 to {MAX_ENTRY_DEPTH}.")
            return _single("list", "entries", {"path": _path(path or "."), "user": user, "depth": depth})
        case "MakeDir":
            return _single("mkdir", "entry", {"path": _path(path), "user": user})
        case "Move":
            source, target = _path(string_field(message, "source")), _path(string_field(message, "destination"))
            return _single("move", "entry", {"path": source, "target": target, "user": user})
        case "Remove":
            return _single("remove", "nothing", {"path": _path(path), "user": user})
        case "WatchDir" | "CreateWatcher":
            return _watch(method == "WatchDir", message, _path(path), user)
        case "GetWatcherEvents":
            return WatchRequest("events", watcher=string_field(message, "watcherId"))
        case "RemoveWatcher":
            return WatchRequest("end", watcher=string_field(message, "watcherId"))
    raise RefusalError(404, "no-such-method", f"filesystem.Filesystem/{method} is not served.")


def _watch(streams: bool, message: dict[str, Any], path: str, user: str) -> WatchRequest:
    if message.get("includeEntry") is True:
        raise RefusalError(404, "entry", "includeEntry is not supported. Request the entry when its event has arrived.")
    arguments = {"path": path, "user": user, "recursive": message.get("recursive") is True}
    return WatchRequest("stream" if streams else "begin", ToolCall("process", "watch", arguments))


def file_transfer(request: Request) -> CallsRequest:
    """Parse a request that uploads or downloads files. Raises RefusalError (400 to 415) if it is invalid."""
    # The user is in the query (`username`) or in the Authorization header, depending on the SDK.
    query = dict(parse_qsl(request.query, keep_blank_values=True))
    user, path = query.get("username", "") or user_of(request), query.get("path", "")
    if request.method == "GET":
        return _single("read", "file", {"path": _path(path), "user": user})
    if request.method != "POST":
        raise RefusalError(405, "method", "/files takes GET and POST.")
    body = _decompressed_body(request)
    content_type = request.header("content-type")
    if not content_type.lower().startswith("multipart/form-data"):
        return CallsRequest((_upload(path, user, body),), "uploads")
    files = multipart.files(body, content_type)
    if path and len(files) > 1:
        raise RefusalError(400, "multipart", "The form has several files but the query has one path. Leave path out.")
    if not files:
        raise RefusalError(400, "multipart", "The form contains no file.")
    return CallsRequest(tuple(_upload(path or file.filename or "", user, file.data) for file in files), "uploads")


def _upload(path: str, user: str, data: bytes) -> ToolCall:
    arguments = {"path": _path(path), "user": user, "sha256": sha256(data).hexdigest()}
    return ToolCall("files", "write", arguments, data)


def _decompressed_body(request: Request) -> bytes:
    encoding = request.header("content-encoding").lower() or "identity"
    if encoding == "identity":
        return request.body
    if encoding != "gzip":
        raise RefusalError(415, "content-encoding", f"Content-Encoding must be identity or gzip, not {encoding}.")
    # wbits 31 selects the gzip format; the limit stops a small body that would unpack to gigabytes.
    unzip = zlib.decompressobj(wbits=31)
    try:
        data = unzip.decompress(request.body, MAX_UNZIPPED_BYTES)
    except zlib.error as error:
        raise RefusalError(400, "content-encoding", f"The body is not gzip: {error}.") from None
    # More than one gzip file in a row is one to some servers, and its beginning to others.
    if not unzip.eof or unzip.unused_data:
        raise RefusalError(
            400,
            "content-encoding",
            f"The gzipped body is cut off, larger than {MAX_UNZIPPED_BYTES} bytes, or more than one gzip file.",
        )
    return data


def _single(tool: str, form: str, arguments: dict[str, Any]) -> CallsRequest:
    return CallsRequest((ToolCall("files", tool, arguments),), form)


def _path(path: str) -> str:
    if not path or "\0" in path or len(path.encode()) > 4095:
        raise RefusalError(400, "path", "path must have 1 to 4095 bytes without NUL.")
    return path


def user_of(request: Request) -> str:
    """Return the user of a Basic Authorization header; empty for the sandbox's default user."""
    scheme, _, encoded = request.header("authorization").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        user = base64.b64decode(encoded, validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        raise RefusalError(400, "user", "The Authorization header is not valid Basic authorization.") from None
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", user):
        raise RefusalError(400, "user", "A user name consists of letters, digits, _, . and -.")
    return user


def string_field(message: dict[str, Any], name: str) -> str:
    """Return a string member of a message; empty if it is missing or null."""
    value = message.get(name) or ""
    if not isinstance(value, str) or "\0" in value:
        raise RefusalError(400, name, f"{name} must be a string without NUL.")
    return value
