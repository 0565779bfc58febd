"""E2B: what requests to its control plane and to envd, the server in each of its sandboxes, mean (pure).

Both are served at one base URL (`E2B_API_URL`, `E2B_SANDBOX_URL`). Control is REST; processes and directory entries
speak Connect with JSON, files plain HTTP. What is a call here is keyed by what it does: a process by command,
arguments, variables, directory, user, time and whether its stdin stays open; never by pids, tags and ids of requests.
"""

import base64
import binascii
import re
from dataclasses import dataclass, field, replace
from posixpath import join
from typing import Any
from urllib.parse import parse_qsl, unquote

from proxy.compat.e2b import connect_rpc as connect
from proxy.compat.e2b.connect_rpc import ConnectError
from proxy.compat.e2b.file_requests import Plain, Watching, entries, transfers, user_of, word_of
from proxy.dialects.base import Request
from proxy.refusals import RefusalError
from sandboxes.calls import ToolCall
from sandboxes.spec import SERVER_DRIVERS, EnvironmentSpec

ENVD_VERSION = "0.6.1"
"""What clients are told; it selects what they ask for. From 0.6.2 on they would send metadata of files."""
ENVD_PORT = "49983"
FOREVER_S = 86_400.0
_STREAMS = frozenset({"Start", "Connect", "StreamInput", "WatchDir"})
_SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, 15: 15, 9: 9}
_HOST = re.compile(r"([0-9]{1,5})-([A-Za-z0-9][A-Za-z0-9_-]*)\.")
_VARIABLE = re.compile(r"[^=\0]+")


@dataclass(frozen=True, slots=True)
class Control:
    """A request to the control plane. verb: as in `_CONTROL`; body: a JSON object; query: of the URL."""

    verb: str
    sandbox: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """A process to start; the variables of its sandbox are not in call yet. keepalive_s: how often its client wants
    to hear something.
    """

    call: ToolCall
    tag: str
    keepalive_s: float
    deadline_s: float | None

    @property
    def has_terminal(self) -> bool:
        """Whether somebody can type at it."""
        return bool(self.call.arguments["tty"])


@dataclass(frozen=True, slots=True)
class Chosen:
    """A request about a process that runs. verb: `connect`, `write`, `close`, `resize` or `signal`.

    more: what the call has beside the process: a signal's number, a terminal's rows and columns, whether data is typed.
    """

    verb: str
    pid: int | None
    tag: str = ""
    data: bytes = b""
    more: dict[str, Any] = field(default_factory=dict)
    keepalive_s: float = 0.0
    deadline_s: float | None = None


E2BRequest = Control | ProcessStart | Chosen | Plain | Watching

_ID = "([^/]+)"
_CONTROL = [
    (re.compile(pattern.replace("{id}", _ID)), verb)
    for pattern, verb in {
        "POST (?:/v2)?/sandboxes": "create",
        "GET (?:/v2)?/sandboxes": "list",
        "GET /sandboxes/{id}": "info",
        "DELETE /sandboxes/{id}": "kill",
        "POST /sandboxes/{id}/(?:timeout|refreshes)": "timeout",
        "POST /sandboxes/{id}/pause": "pause",
        "POST (?:/v2)?/sandboxes/{id}/connect": "connect",
        "POST /sandboxes/{id}/resume": "connect",
        "POST /sandboxes/{id}/snapshots": "snapshot",
        "POST /sandboxes/{id}/fork": "fork",
        "GET /sandboxes/{id}/metrics": "metrics",
        "GET (?:/v2)?/sandboxes/{id}/logs": "logs",
        "GET /snapshots": "snapshots",
        "DELETE /templates/{id}": "forget",
        "GET /health": "health",
        "GET /envs": "envs",
        "POST /init": "init",
    }.items()
]
_ABSENT = re.compile(r"/(?:v[0-9]+/)?(?:templates|volumes|secrets|sandboxes)(?:/|$)")


def is_connect(request: Request) -> bool:
    """Whether request speaks Connect."""
    return request.path.startswith(("/process.Process/", "/filesystem.Filesystem/"))


def is_stream(request: Request) -> bool:
    """Whether the answer to request is a stream of Connect's."""
    return is_connect(request) and request.path.rpartition("/")[2] in _STREAMS


def sandbox_of(request: Request) -> str:
    """Return the sandbox that a request to envd names, by header or by its host; empty where it names none."""
    named = request.header("e2b-sandbox-id")
    found = _HOST.match(request.header("host"))
    return named or (found[2] if found else "")


def port_of(request: Request) -> str:
    """Return the port of the sandbox that a request is for."""
    found = _HOST.match(request.header("host"))
    return request.header("e2b-sandbox-port") or (found[1] if found else ENVD_PORT)


def read(request: Request, spec: EnvironmentSpec) -> E2BRequest:
    """Say what request means.

    Raises:
        Refused: 400 to 501, with what is wrong. ConnectError: the same, in a request that speaks Connect.
    """
    if spec.driver not in SERVER_DRIVERS or spec.upstreams:
        raise RefusalError(404, "no-such-endpoint", "this task has no e2b endpoint: its driver runs no processes.")
    path = unquote(request.path).rstrip("/")
    if path == "/files":
        return transfers(request)
    if is_connect(request):
        try:
            return _rpc(request, spec)
        except RefusalError as error:
            raise ConnectError(
                "unimplemented" if error.status in (404, 405) else "invalid_argument", str(error)
            ) from error
    line = f"{request.method} {path}"
    for pattern, verb in _CONTROL:
        found = pattern.fullmatch(line)
        if found is not None:
            body = connect.message(request.body) if request.method == "POST" else {}
            query = dict(parse_qsl(request.query))
            return Control(verb, found[1] if found.re.groups else "", body, query)
    if any(pattern.fullmatch(f"{method} {path}") for pattern, _ in _CONTROL for method in ("GET", "POST", "DELETE")):
        raise RefusalError(405, "method", f"{path} does not take {request.method}.")
    if _ABSENT.match(path) or path.startswith("/execute"):
        raise RefusalError(501, "unimplemented", f"{line}: Forkpoint does not serve this part of E2B's API.")
    raise RefusalError(404, "no-such-path", f"there is no {line} in E2B's API.")


# -- processes ------------------------------------------------------------------------------------------------------


def _rpc(request: Request, spec: EnvironmentSpec) -> E2BRequest:
    service, _, method = request.path.lstrip("/").partition("/")
    if request.method != "POST":
        raise RefusalError(405, "method", "Connect's methods take POST.")
    message = _message(request, stream=method in _STREAMS)
    if service == "filesystem.Filesystem":
        watched = entries(method, message, request)
        if isinstance(watched, Watching):
            return replace(watched, keepalive_s=_keepalive_s(request), deadline_s=_deadline_s(request))
        return watched
    return _start(message, request, spec) if method == "Start" else _process(method, message, request)


def _process(method: str, message: dict[str, Any], request: Request) -> E2BRequest:
    match method:
        case "List":
            return Plain((ToolCall("process", "list", {}),), "processes")
        case "Connect":
            pid, tag = _selected(message)
            return Chosen("connect", pid, tag, keepalive_s=_keepalive_s(request), deadline_s=_deadline_s(request))
        case "SendInput":
            data, more = _input(message)
            return Chosen("write", *_selected(message), data=data, more=more)
        case "StreamInput":
            return _stream_input(request)
        case "CloseStdin":
            return Chosen("close", *_selected(message))
        case "SendSignal":
            number = _SIGNALS.get(message.get("signal", ""))
            if number is None:
                raise RefusalError(400, "signal", "signal must be SIGNAL_SIGTERM or SIGNAL_SIGKILL.")
            return Chosen("signal", *_selected(message), more={"signal": number})
        case "Update":
            return Chosen("resize", *_selected(message), more={"size": _size(message)})
    raise RefusalError(404, "no-such-method", f"process.Process/{method} is not served.")


def _message(request: Request, *, stream: bool) -> dict[str, Any]:
    kind = request.header("content-type").partition(";")[0].strip().lower()
    wanted = connect.STREAM if stream else connect.UNARY
    if kind != wanted:
        raise RefusalError(415, "content-type", f"{request.path} takes {wanted}, not {kind or 'nothing'}.")
    if not stream:
        return connect.message(request.body)
    found = connect.messages(request.body)
    if not found:
        raise RefusalError(400, "envelope", "the request holds no message.")
    return found[0]


def _start(message: dict[str, Any], request: Request, spec: EnvironmentSpec) -> ProcessStart:
    process = message.get("process")
    if not isinstance(process, dict) or not isinstance(process.get("cmd"), str) or not process["cmd"]:
        raise RefusalError(400, "process", "process.cmd must be the program to run.")
    args = process.get("args") or []
    if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
        raise RefusalError(400, "process", "process.args must be a list of strings.")
    if any("\0" in word for word in (process["cmd"], *args)):
        raise RefusalError(400, "process", "a command's words cannot hold a NUL.")
    deadline_s = _deadline_s(request)
    arguments: dict[str, Any] = {
        "argv": [process["cmd"], *args],
        "env": variables(process.get("envs")),
        "cwd": join(spec.workdir, word_of(process, "cwd")).rstrip("/") or "/",
        "user": user_of(request),
        "tty": False,
        "stdin": message.get("stdin") is True,
        "timeout_s": deadline_s or FOREVER_S,
    }
    if message.get("pty") is not None:
        arguments |= {"tty": True, "stdin": False, "size": _size(message)}
    return ProcessStart(
        ToolCall("process", "run", arguments), word_of(message, "tag"), _keepalive_s(request), deadline_s
    )


def variables(value: Any) -> dict[str, str]:
    """Return environment variables as a client gives them.

    Raises:
        Refused: 400, they are none.
    """
    given = value or {}
    if not isinstance(given, dict) or not all(
        _VARIABLE.fullmatch(name) and isinstance(text, str) and "\0" not in text for name, text in given.items()
    ):
        raise RefusalError(400, "envs", "environment variables are names without = and strings, none with a NUL.")
    return dict(given)


def _selected(message: dict[str, Any]) -> tuple[int | None, str]:
    selector = message.get("process")
    pid = selector.get("pid") if isinstance(selector, dict) else None
    tag = selector.get("tag") if isinstance(selector, dict) else None
    if isinstance(pid, int) and not isinstance(pid, bool):
        return pid, ""
    if isinstance(tag, str) and tag:
        return None, tag
    raise RefusalError(400, "process", "process must select one, by pid or by tag.")


def _size(message: dict[str, Any]) -> list[int]:
    """Return the rows and columns of a terminal."""
    pty = message.get("pty")
    given = pty.get("size") if isinstance(pty, dict) else None
    size = [given.get(name, 0) for name in ("rows", "cols")] if isinstance(given, dict) else []
    if len(size) != 2 or not all(
        isinstance(length, int) and not isinstance(length, bool) and 0 <= length < 1 << 16 for length in size
    ):
        raise RefusalError(400, "pty", "pty.size must have rows and cols, each below 65536.")
    return size


def _input(message: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """Return what is written, and in which way: to a process's stdin, or typed at its terminal."""
    given = message.get("input")
    typed = isinstance(given, dict) and "pty" in given
    data = given.get("pty" if typed else "stdin") if isinstance(given, dict) else None
    if not isinstance(data, str):
        raise RefusalError(400, "input", "input.stdin, or input.pty, must be base64.")
    try:
        return base64.b64decode(data, validate=True), {"typed": True} if typed else {}
    except binascii.Error as error:
        raise RefusalError(400, "input", f"input is no base64: {error}.") from None


def _stream_input(request: Request) -> Chosen:
    """Take a whole stream of input as one write: how it was cut into pieces says nothing."""
    pid, tag, data, more = None, "", b"", dict[str, Any]()
    for message in connect.messages(request.body):
        if isinstance(message.get("start"), dict):
            pid, tag = _selected(message["start"])
        if isinstance(message.get("data"), dict):
            piece, more = _input(message["data"])
            data += piece
    if pid is None and not tag:
        raise RefusalError(400, "input", "a stream of input begins by selecting a process.")
    return Chosen("write", pid, tag, data=data, more=more)


def _keepalive_s(request: Request) -> float:
    given = request.header("keepalive-ping-interval")
    return min(max(float(given), 1.0), 50.0) if given.isascii() and given.isdigit() else 50.0


def _deadline_s(request: Request) -> float | None:
    return connect.timeout_s(request.header("connect-timeout-ms")) or None
