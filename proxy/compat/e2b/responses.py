"""Responses and events in the forms of E2B's control plane and of envd, its server in each sandbox (pure)."""

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import orjson

from proxy.compat.e2b.connect_rpc import ConnectError, end, envelope
from proxy.compat.e2b.sandbox_note import SandboxNote
from proxy.dialects.base import Local
from sandboxes.calls import ToolResult
from sandboxes.listener import Headers
from sandboxes.process_output import END, ERR, OUT, ending, frames
from sandboxes.spec import EnvironmentSpec

ENVD_VERSION = "0.6.1"
"""The version of envd that is announced. SDKs choose features by it: from 0.6.2 on they send metadata of files."""
MAX_EVENT_BYTES = 1 << 16
"""Largest piece of output in one event, before base64. Larger output is cut, so that no message is large."""
_STREAMS = {OUT: "stdout", ERR: "stderr"}
_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}
_CODES = {
    "not_found": "not_found", "exists": "already_exists", "invalid": "invalid_argument", "denied": "permission_denied",
    "user": "unauthenticated",
}  # fmt: skip
"""The Connect code for each kind of failure that a sandbox reports."""
_CANNOT_START = (b"OCI runtime exec failed: ", b"unable to find ")
"""How the sandbox's message begins if a process could not be started."""
_SIGNAL_NAMES = {2: "interrupt", 9: "killed", 15: "terminated"}

ProcessEvent = dict[str, Any]
"""One message of a stream, as JSON."""


def json_response(value: Any, status: int = 200, headers: Headers = ()) -> Local:
    """Return a response with a JSON body."""
    return Local(status, orjson.dumps(value), (("content-type", "application/json"), *headers))


# -- processes ------------------------------------------------------------------------------------------------------


def started(pid: int) -> ProcessEvent:
    """Return the first event of a process."""
    return {"event": {"start": {"pid": pid}}}


KEEPALIVE: ProcessEvent = {"event": {"keepalive": {}}}
WATCH_STARTED: ProcessEvent = {"start": {}}
WATCH_KEEPALIVE: ProcessEvent = {"keepalive": {}}


def output_events(kind: int, data: bytes, *, terminal: bool) -> Iterator[ProcessEvent]:
    """Yield the events for a piece of output, of the kind OUT or ERR. A terminal has a single stream."""
    name = "pty" if terminal else _STREAMS[kind]
    for start in range(0, len(data), MAX_EVENT_BYTES):
        encoded = base64.b64encode(data[start : start + MAX_EVENT_BYTES]).decode()
        yield {"event": {"data": {name: encoded}}}


def output(body: bytes, *, terminal: bool, skip: int = 0) -> Iterator[ProcessEvent]:
    """Yield the events for the output in a recorded result, without its first `skip` bytes."""
    for kind, data in frames(body):
        if kind != END:
            yield from output_events(kind, data[skip:], terminal=terminal)
            skip = max(0, skip - len(data))


def watch_events(body: bytes) -> Iterator[dict[str, str]]:
    """Yield the directory events in a recorded result."""
    output_lines = b"".join(data for kind, data in frames(body) if kind == OUT).splitlines()
    for line in output_lines:
        event = orjson.loads(line)
        yield {"name": event["name"], "type": f"EVENT_TYPE_{event['type'].upper()}"}


def ended(body: bytes) -> ProcessEvent | None:
    """Return the last event; None while the process runs. Raises ConnectError if it was killed, or did not start."""
    last = ending(body)
    if last.timed_out:
        raise ConnectError("deadline_exceeded", "context deadline exceeded")
    if last.exit_code is None:
        return None
    # 126 and 127 are also what a shell returns. Only the sandbox's own message means that nothing ran.
    if last.exit_code in (126, 127):
        stdout = b"".join(data for kind, data in frames(body) if kind == OUT)
        if cannot_start(stdout):
            raise ConnectError("invalid_argument", stdout.decode(errors="replace").strip())
    # The texts are those of Go's os.ProcessState, which envd sends.
    if last.signal:
        status = f"signal: {_SIGNAL_NAMES.get(last.signal, last.signal)}"
        return {"event": {"end": {"exitCode": -1, "exited": False, "status": status, "error": status}}}
    status = f"exit status {last.exit_code}"
    event: dict[str, Any] = {"exitCode": last.exit_code, "exited": True, "status": status}
    return {"event": {"end": {**event, "error": status} if last.exit_code else event}}


def whole_stream(result: ToolResult, pid: int) -> bytes | None:
    """Return a recorded start as the stream that a hit sends; None if the process goes on, was killed or failed."""
    try:
        last = ended(result.body) if result.status == 200 else None
    except ConnectError:
        return None
    if last is None:
        return None
    events = (started(pid), *output(result.body, terminal=False), last)
    return b"".join(map(envelope, events)) + end()


def cannot_start(data: bytes) -> bool:
    """Return whether output of a process is really the sandbox's message that a process could not be started."""
    return data.startswith(_CANNOT_START)


def background_processes(result: ToolResult) -> list[dict[str, Any]]:
    """Return the processes in a recorded list: pid (`process`), `argv`, `env`, `cwd`, `tag` and `tty` of each."""
    listed: list[dict[str, Any]] = orjson.loads(result.body)
    return listed


def processes(result: ToolResult) -> list[dict[str, Any]]:
    """Return the processes in a recorded list as envd lists them."""
    listed = []
    for process in background_processes(result):
        config = {
            "cmd": process["argv"][0], "args": process["argv"][1:], "envs": process["env"], "cwd": process["cwd"],
        }  # fmt: skip
        tag = {"tag": process["tag"]} if process["tag"] else {}
        listed.append({"pid": process["process"], "config": config, **tag})
    return listed


# -- files ----------------------------------------------------------------------------------------------------------


def failure(result: ToolResult) -> ConnectError | None:
    """Return the Connect error for a failed operation; None for a successful one."""
    if result.status < 300:
        return None
    payload = orjson.loads(result.body)
    detail = str(payload.get("detail", "The operation failed."))
    if result.status in (413, 507):
        return ConnectError("resource_exhausted", detail)
    return ConnectError(_CODES.get(payload.get("kind", ""), "internal"), detail)


def entry(result: ToolResult) -> dict[str, Any]:
    """Return the directory entry in a recorded result."""
    return _entry(orjson.loads(result.body))


def entries(result: ToolResult) -> list[dict[str, Any]]:
    """Return the directory entries in a recorded result."""
    return [_entry(fields) for fields in orjson.loads(result.body)]


def upload(result: ToolResult) -> dict[str, Any]:
    """Return the description of an uploaded file."""
    fields = orjson.loads(result.body)
    return {"path": fields["path"], "name": fields["name"], "type": "file"}


def _entry(fields: dict[str, Any]) -> dict[str, Any]:
    link = {} if fields["link"] is None else {"symlinkTarget": fields["link"]}
    return {
        "name": fields["name"], "type": _TYPES.get(fields["type"], "FILE_TYPE_UNSPECIFIED"), "path": fields["path"],
        # 64-bit numbers are strings in the JSON of protocol buffers.
        "size": str(fields["size"]), "mode": fields["mode"], "permissions": fields["permissions"],
        "owner": fields["owner"], "group": fields["group"], "modifiedTime": fields["modified"], **link,
    }  # fmt: skip


# -- control --------------------------------------------------------------------------------------------------------


def sandbox(name: str, note: SandboxNote) -> dict[str, Any]:
    """Return the description of a sandbox that was created or connected to."""
    return {"sandboxID": name, "templateID": note.template, "clientID": "forkpoint", "envdVersion": ENVD_VERSION}


def detail(name: str, note: SandboxNote, spec: EnvironmentSpec) -> dict[str, Any]:
    """Return the full description of a sandbox in this environment."""
    return {
        **sandbox(name, note),
        "startedAt": _timestamp(note.started_at), "endAt": _timestamp(note.ends_at), "cpuCount": 1,
        "memoryMB": spec.limits.memory_mb, "diskSizeMB": spec.limits.disk_mb,
        "state": "paused" if note.paused else "running", "metadata": note.metadata,
        # Sandboxes have no network.
        "allowInternetAccess": False,
        "lifecycle": {"onTimeout": "pause" if note.pauses else "kill", "autoResume": note.resumes},
    }  # fmt: skip


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
