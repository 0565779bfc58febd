"""E2B: what clients are told, in the control plane's and envd's own words (pure)."""

import base64
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import orjson

from proxy.compat.e2b.connect_rpc import ConnectError
from proxy.compat.e2b.requests import ENVD_VERSION
from sandboxes.calls import ToolResult
from sandboxes.process_output import END, ERR, OUT, ending, frames
from sandboxes.spec import EnvironmentSpec

PIECE_BYTES = 1 << 16
"""Of output in one event."""
_STREAMS = {OUT: "stdout", ERR: "stderr"}
_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}
_KINDS = {
    "not_found": "not_found", "exists": "already_exists", "invalid": "invalid_argument", "denied": "permission_denied",
    "user": "unauthenticated",
}  # fmt: skip
_CANNOT_START = (b"OCI runtime exec failed: ", b"unable to find ")
_SIGNAL_NAMES = {2: "interrupt", 9: "killed", 15: "terminated"}

ProcessEvent = dict[str, Any]


# -- processes ------------------------------------------------------------------------------------------------------


def started(pid: int) -> ProcessEvent:
    """Return the first event of a process."""
    return {"event": {"start": {"pid": pid}}}


KEEPALIVE: ProcessEvent = {"event": {"keepalive": {}}}
WATCH_BEGUN: ProcessEvent = {"start": {}}
WATCH_KEEPALIVE: ProcessEvent = {"keepalive": {}}


def pieces(kind: int, data: bytes, *, terminal: bool) -> Iterator[ProcessEvent]:
    """Yield the events of what came on one stream, or on the terminal that is all that a process has."""
    name = "pty" if terminal else _STREAMS[kind]
    for at in range(0, len(data), PIECE_BYTES):
        coded = base64.b64encode(data[at : at + PIECE_BYTES]).decode()
        yield {"event": {"data": {name: coded}}}


def output(body: bytes, *, terminal: bool, skip: int = 0) -> Iterator[ProcessEvent]:
    """Yield the events of all output in a recorded answer, but for its first bytes."""
    for kind, data in frames(body):
        if kind != END:
            yield from pieces(kind, data[skip:], terminal=terminal)
            skip = max(0, skip - len(data))


def happened(body: bytes) -> Iterator[dict[str, str]]:
    """Yield what a recorded answer tells of a watched directory."""
    said = b"".join(data for kind, data in frames(body) if kind == OUT)
    for line in said.splitlines():
        told = orjson.loads(line)
        yield {"name": told["name"], "type": f"EVENT_TYPE_{told['type'].upper()}"}


def ended(body: bytes) -> ProcessEvent | None:
    """Return the last event of a process by a recorded answer; None where it goes on.

    Raises:
        ConnectError: its time was up, or it could not be started.
    """
    told = ending(body)
    if told.timed_out:
        raise ConnectError("deadline_exceeded", "context deadline exceeded")
    if told.exit_code is None:
        return None
    if told.exit_code in (126, 127):
        said = b"".join(data for kind, data in frames(body) if kind == OUT)
        if cannot_start(said):
            raise ConnectError("invalid_argument", said.decode(errors="replace").strip())
    if told.signal:
        said_so = f"signal: {_SIGNAL_NAMES.get(told.signal, told.signal)}"
        return {"event": {"end": {"exitCode": -1, "exited": False, "status": said_so, "error": said_so}}}
    status = f"exit status {told.exit_code}"
    end: dict[str, Any] = {"exitCode": told.exit_code, "exited": True, "status": status}
    return {"event": {"end": {**end, "error": status} if told.exit_code else end}}


def cannot_start(said: bytes) -> bool:
    """Whether this is how a sandbox says that a process cannot be started."""
    return said.startswith(_CANNOT_START)


def left_running(result: ToolResult) -> list[dict[str, Any]]:
    """Return what each process that a recorded list names was started with."""
    found: list[dict[str, Any]] = orjson.loads(result.body)
    return found


def processes(result: ToolResult) -> list[dict[str, Any]]:
    """Return the processes that a recorded list names, as envd lists them."""
    listed = []
    for one in left_running(result):
        config = {"cmd": one["argv"][0], "args": one["argv"][1:], "envs": one["env"], "cwd": one["cwd"]}
        tag = {"tag": one["tag"]} if one["tag"] else {}
        listed.append({"pid": one["process"], "config": config, **tag})
    return listed


# -- files ----------------------------------------------------------------------------------------------------------


def failure(result: ToolResult) -> ConnectError | None:
    """Return what a failed operation is called in Connect; None for one that did not fail."""
    if result.status < 300:
        return None
    told = orjson.loads(result.body)
    detail = str(told.get("detail", "it failed"))
    if result.status in (413, 507):
        return ConnectError("resource_exhausted", detail)
    return ConnectError(_KINDS.get(told.get("kind", ""), "internal"), detail)


def entry(result: ToolResult) -> dict[str, Any]:
    """Return the one entry that a recorded answer tells of."""
    return _entry(orjson.loads(result.body))


def entries(result: ToolResult) -> list[dict[str, Any]]:
    """Return the entries that a recorded answer lists."""
    return [_entry(one) for one in orjson.loads(result.body)]


def upload(result: ToolResult) -> dict[str, Any]:
    """Return what is told of a file that was written."""
    told = orjson.loads(result.body)
    return {"path": told["path"], "name": told["name"], "type": "file"}


def _entry(told: dict[str, Any]) -> dict[str, Any]:
    link = {} if told["link"] is None else {"symlinkTarget": told["link"]}
    return {
        "name": told["name"], "type": _TYPES.get(told["type"], "FILE_TYPE_UNSPECIFIED"), "path": told["path"],
        # 64-bit numbers are strings in the JSON of protocol buffers.
        "size": str(told["size"]), "mode": told["mode"], "permissions": told["permissions"],
        "owner": told["owner"], "group": told["group"], "modifiedTime": told["modified"], **link,
    }  # fmt: skip


# -- control --------------------------------------------------------------------------------------------------------


def sandbox(name: str, note: dict[str, Any]) -> dict[str, Any]:
    """Return a sandbox as it is told of when it was created or connected to."""
    return {
        "sandboxID": name, "templateID": note["template"], "clientID": "forkpoint", "envdVersion": ENVD_VERSION,
    }  # fmt: skip


def detail(name: str, note: dict[str, Any], spec: EnvironmentSpec) -> dict[str, Any]:
    """Return all that is told of a sandbox."""
    at_end = {"onTimeout": "pause" if note["pauses"] else "kill", "autoResume": note["resumes"]}
    return {
        **sandbox(name, note),
        "startedAt": _time(note["started"]), "endAt": _time(note["ends"]), "cpuCount": 1,
        "memoryMB": spec.limits.memory_mb, "diskSizeMB": spec.limits.disk_mb,
        "state": "paused" if note["paused"] else "running", "metadata": note["metadata"],
        # Nothing in a sandbox reaches a network.
        "allowInternetAccess": False, "lifecycle": at_end,
    }  # fmt: skip


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
