"""Reads requests to E2B's control plane and to envd, the server in each E2B sandbox (pure).

Both are served at one base URL (`E2B_API_URL`, `E2B_SANDBOX_URL`). The control plane is REST, processes and directory
entries speak Connect with JSON, and files plain HTTP. A call's key consists of what the call does (of a process: its
command, arguments, variables, directory, user, time limit, open stdin, and its tag, by which clients find it again).
Pids and request ids are in no key.
"""

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from posixpath import join
from typing import Any
from urllib.parse import unquote

from proxy.compat.e2b import connect_rpc as connect
from proxy.compat.e2b.connect_rpc import ConnectError
from proxy.compat.e2b.control_requests import ControlRequest, read_control, variables
from proxy.compat.e2b.file_requests import CallsRequest, WatchRequest, entries, file_transfer, string_field, user_of
from proxy.dialects.base import Request
from proxy.refusals import RefusalError
from sandboxes.calls import ToolCall
from sandboxes.spec import SERVER_DRIVERS, EnvironmentSpec

ENVD_PORT = "49983"
"""The port at which E2B serves envd. Requests for other ports of a sandbox are refused."""
DEFAULT_PROCESS_S = 86_400.0
"""Time limit of a process whose client sets none: the longest life of an E2B sandbox."""
_STREAMS = frozenset({"Start", "Connect", "StreamInput", "WatchDir"})
_SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, 15: 15, 9: 9}
"""The signals that envd sends, by name or by number."""
_HOST = re.compile(r"([0-9]{1,5})-([A-Za-z0-9][A-Za-z0-9_-]*)\.")
"""A host that names a port (group 1) and a sandbox (2), as in `49983-ID.domain`."""


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """A request to start a process."""

    call: ToolCall  # Does not contain the sandbox's own variables yet.
    keepalive_s: float  # Silence after which the client expects a keepalive event.
    deadline_s: float | None  # Time limit of the response; None for no limit.

    @property
    def has_terminal(self) -> bool:
        """Whether the process runs on a terminal."""
        return bool(self.call.arguments["tty"])


@dataclass(frozen=True, slots=True)
class ProcessRequest:
    """A request about a running process."""

    verb: str  # `connect`, `write`, `close`, `resize` or `signal`.
    pid: int | None  # None selects the process by its tag.
    tag: str = ""  # Empty if the pid selects.
    data: bytes = b""  # The bytes of a `write`.
    # Further arguments of the call: a signal's number, a terminal's rows and columns, whether data is typed at a
    # terminal.
    arguments: dict[str, Any] = field(default_factory=dict)
    keepalive_s: float = 0.0  # Silence after which the client of a `connect` expects a keepalive event.
    deadline_s: float | None = None  # Time limit of the response to a `connect`; None for no limit.


E2BRequest = ControlRequest | ProcessStart | ProcessRequest | CallsRequest | WatchRequest


def is_connect(request: Request) -> bool:
    """Return whether a request speaks Connect."""
    return request.path.startswith(("/process.Process/", "/filesystem.Filesystem/"))


def is_stream(request: Request) -> bool:
    """Return whether the response to a request is a Connect stream."""
    return is_connect(request) and request.path.rpartition("/")[2] in _STREAMS


def sandbox_of(request: Request) -> str:
    """Return the sandbox that a request to envd names, in a header or in its host; empty if it names none."""
    host = _HOST.match(request.header("host"))
    return request.header("e2b-sandbox-id") or (host[2] if host else "")


def sandboxes_in(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Return the sandboxes that headers name, of which `sandbox_of` takes one."""
    texts = [(name, value.decode("latin-1")) for name, value in headers if name in {b"e2b-sandbox-id", b"host"}]
    hosts = [match[2] for name, value in texts if name == b"host" and (match := _HOST.match(value))]
    return [value for name, value in texts if name == b"e2b-sandbox-id"] or hosts


def port_of(request: Request) -> str:
    """Return the port of the sandbox that a request addresses, in a header or in its host."""
    host = _HOST.match(request.header("host"))
    return request.header("e2b-sandbox-port") or (host[1] if host else ENVD_PORT)


def read(request: Request, spec: EnvironmentSpec) -> E2BRequest:
    """Parse a request. Raises RefusalError (400 to 501) if it is invalid, or ConnectError if it speaks Connect."""
    if spec.driver not in SERVER_DRIVERS or spec.upstreams:
        raise RefusalError(
            404, "no-such-endpoint", "This task has no e2b endpoint, because its driver runs no processes."
        )
    path = unquote(request.path).rstrip("/")
    if path == "/files":
        return file_transfer(request)
    if is_connect(request):
        try:
            return _rpc(request, spec)
        except RefusalError as error:
            raise ConnectError(
                "unimplemented" if error.status in (404, 405) else "invalid_argument", str(error)
            ) from error
    return read_control(request, path)


# -- processes ------------------------------------------------------------------------------------------------------


def _rpc(request: Request, spec: EnvironmentSpec) -> E2BRequest:
    service, _, method = request.path.lstrip("/").partition("/")
    if request.method != "POST":
        raise RefusalError(405, "method", "Connect methods take POST.")
    message = _message(request, stream=method in _STREAMS)
    if service == "filesystem.Filesystem":
        parsed = entries(method, message, request)
        if isinstance(parsed, WatchRequest):
            return replace(parsed, keepalive_s=_keepalive_s(request), deadline_s=_deadline_s(request))
        return parsed
    return _start(message, request, spec) if method == "Start" else _process(method, message, request)


def _process(method: str, message: dict[str, Any], request: Request) -> E2BRequest:
    match method:
        case "List":
            return CallsRequest((ToolCall("process", "list", {}),), "processes")
        case "Connect":
            pid, tag = _selected(message)
            return ProcessRequest(
                "connect", pid, tag, keepalive_s=_keepalive_s(request), deadline_s=_deadline_s(request)
            )
        case "SendInput":
            data, arguments = _input(message)
            return ProcessRequest("write", *_selected(message), data=data, arguments=arguments)
        case "StreamInput":
            return _stream_input(request)
        case "CloseStdin":
            return ProcessRequest("close", *_selected(message))
        case "SendSignal":
            number = _SIGNALS.get(message.get("signal", ""))
            if number is None:
                raise RefusalError(400, "signal", "signal must be SIGNAL_SIGTERM or SIGNAL_SIGKILL.")
            return ProcessRequest("signal", *_selected(message), arguments={"signal": number})
        case "Update":
            return ProcessRequest("resize", *_selected(message), arguments={"size": _size(message)})
    raise RefusalError(404, "no-such-method", f"process.Process/{method} is not served.")


def _message(request: Request, *, stream: bool) -> dict[str, Any]:
    media_type = request.header("content-type").partition(";")[0].strip().lower()
    expected = connect.STREAM if stream else connect.UNARY
    if media_type != expected:
        raise RefusalError(415, "content-type", f"{request.path} takes {expected}, not {media_type or 'nothing'}.")
    if not stream:
        return connect.message(request.body)
    messages = connect.messages(request.body)
    if not messages:
        raise RefusalError(400, "envelope", "The request contains no message.")
    return messages[0]


def _start(message: dict[str, Any], request: Request, spec: EnvironmentSpec) -> ProcessStart:
    process = message.get("process")
    if not isinstance(process, dict) or not isinstance(process.get("cmd"), str) or not process["cmd"]:
        raise RefusalError(400, "process", "process.cmd must be the program to run.")
    args = process.get("args") or []
    if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
        raise RefusalError(400, "process", "process.args must be a list of strings.")
    if any("\0" in argument for argument in (process["cmd"], *args)):
        raise RefusalError(400, "process", "process.cmd and process.args must not contain NUL.")
    deadline_s = _deadline_s(request)
    # Everything in here is part of the call's key.
    arguments: dict[str, Any] = {
        "argv": [process["cmd"], *args],
        "env": variables(process.get("envs")),
        "cwd": join(spec.directory, string_field(process, "cwd")).rstrip("/") or "/",
        "user": user_of(request),
        "tty": False,
        "stdin": message.get("stdin") is True,
        "timeout_s": deadline_s or DEFAULT_PROCESS_S,
    }
    if tag := string_field(message, "tag"):
        arguments["tag"] = tag
    if message.get("pty") is not None:
        arguments |= {"tty": True, "stdin": False, "size": _size(message)}
    return ProcessStart(ToolCall("process", "run", arguments), _keepalive_s(request), deadline_s)


def _selected(message: dict[str, Any]) -> tuple[int | None, str]:
    selector = message.get("process")
    pid = selector.get("pid") if isinstance(selector, dict) else None
    tag = selector.get("tag") if isinstance(selector, dict) else None
    if isinstance(pid, int) and not isinstance(pid, bool):
        return pid, ""
    if isinstance(tag, str) and tag:
        return None, tag
    raise RefusalError(400, "process", "process must select a process by pid or by tag.")


def _size(message: dict[str, Any]) -> list[int]:
    pty = message.get("pty")
    value = pty.get("size") if isinstance(pty, dict) else None
    size = [value.get(name, 0) for name in ("rows", "cols")] if isinstance(value, dict) else []
    if len(size) != 2 or not all(
        isinstance(length, int) and not isinstance(length, bool) and 0 <= length < 1 << 16 for length in size
    ):
        raise RefusalError(400, "pty", "pty.size must have rows and cols, each below 65536.")
    return size


def _input(message: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """Return the data of a write, and the call's argument `typed` if the data is typed at a terminal."""
    value = message.get("input")
    typed = isinstance(value, dict) and "pty" in value
    data = value.get("pty" if typed else "stdin") if isinstance(value, dict) else None
    if not isinstance(data, str):
        raise RefusalError(400, "input", "input.stdin, or input.pty, must be base64.")
    try:
        return base64.b64decode(data, validate=True), {"typed": True} if typed else {}
    except binascii.Error as error:
        raise RefusalError(400, "input", f"input is not base64: {error}.") from None


def _stream_input(request: Request) -> ProcessRequest:
    """Read a whole stream of input as one write: where the client cut it into pieces has no meaning."""
    pid, tag, pieces, arguments = None, "", list[bytes](), dict[str, Any]()
    # Messages are `start` with the selector, `data` with input, or `keepalive`.
    for message in connect.messages(request.body):
        if isinstance(message.get("start"), dict):
            pid, tag = _selected(message["start"])
        if isinstance(message.get("data"), dict):
            piece, arguments = _input(message["data"])
            pieces.append(piece)
    if pid is None and not tag:
        raise RefusalError(400, "input", "A stream of input must begin with a message that selects a process.")
    return ProcessRequest("write", pid, tag, data=b"".join(pieces), arguments=arguments)


def _keepalive_s(request: Request) -> float:
    header = request.header("keepalive-ping-interval")
    return min(max(float(header), 1.0), 50.0) if header.isascii() and header.isdigit() else 50.0


def _deadline_s(request: Request) -> float | None:
    return connect.timeout_s(request.header("connect-timeout-ms")) or None
