"""The requests that recorded calls make again. Pure."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson


class WorkloadError(ValueError):
    """A workload cannot be read, or it uses an unknown tool. The text names the file and the line."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """The request of one recorded call.

    Attributes:
        index: Position of the call in the rollout, from 0; skipped calls count.
        path: Path below the rollout's URL, with a query if there is one.
        arguments: The JSON body; None for none.
        shown: The call as the agent wrote it.
        method: The HTTP method.
        headers: More headers.
    """

    index: int
    path: str
    arguments: Any
    shown: str
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_command(self) -> bool:
        """Whether the answer is the result of a shell command."""
        return self.path == "shell/exec"


def request_of(call: Any, index: int) -> WorkloadRequest | None:
    """Return the request of a recorded call; None if the call never reached a tool.

    Raises:
        WorkloadError: The call has no `tool` or `args`, or its tool is unknown.
    """
    if isinstance(call, dict) and "request" in call:
        return _http_request(member(call, "request", dict), index)
    tool, args = member(call, "tool", str), member(call, "args", dict)
    endpoint, slash, rest = tool.partition("/")
    if slash and endpoint in _ENDPOINTS and rest:
        return WorkloadRequest(index, tool, args, f"{tool} {orjson.dumps(args).decode()}")
    to_request = ENDPOINTS.get(tool)
    if to_request is None:
        raise WorkloadError(
            f"call {index} uses the tool {tool!r}, which a replay does not know. It knows "
            f"{', '.join(sorted(ENDPOINTS))}, {', '.join(f'{name}/TOOL' for name in _ENDPOINTS)}, calls with a "
            "`request`, and calls whose `recorded_output`, `state_before` and `state_after` are known."
        )
    return to_request(call, args, index)


def _http_request(request: Mapping[str, Any], index: int) -> WorkloadRequest:
    """Return a request to a tool server: `{"method"?, "path": "SERVER/…", "json"?, "headers"?}`."""
    path, method = member(request, "path", str).lstrip("/"), request.get("method", "POST")
    headers = request.get("headers", {})
    texts = isinstance(headers, dict) and all(isinstance(value, str) for value in headers.values())
    if not isinstance(method, str) or not texts:
        raise WorkloadError(f"call {index}: `method` must be a string, and `headers` an object of strings.")
    return WorkloadRequest(index, path, request.get("json"), f"{method} {path}", method, headers)


def _sql_request(call: Mapping[str, Any], args: Mapping[str, Any], index: int) -> WorkloadRequest:
    """Return a query; InterCode's have it as `query`, and `sqlite_query` where SQLite needs another one."""
    if "sql" in args:
        return WorkloadRequest(index, "sql/query", args, str(args["sql"]))
    query = member(args, "query", str)
    return WorkloadRequest(index, "sql/query", {"sql": call.get("sqlite_query") or query}, query)


def _shell_request(call: Mapping[str, Any], args: Mapping[str, Any], index: int) -> WorkloadRequest | None:
    command = member(args, "command", str)
    if "argv" not in call:
        return WorkloadRequest(index, "shell/exec", args, command)
    if call["argv"] is None:
        return None
    argv = member(call, "argv", list)
    if not argv or not all(isinstance(argument, str) for argument in argv):
        raise WorkloadError(
            f"call {index}: `argv` must be a list of strings, or null for a call that could not be parsed."
        )
    moves = command.startswith("cd") and argv[1:2] == ["-c"] and len(argv) > 2
    as_run = _moving(argv) if moves else shlex.join(argv)
    return WorkloadRequest(index, "shell/exec", {"command": as_run}, command)


def _moving(argv: Sequence[str]) -> str:
    """Return a command that runs a process, and on success moves the session to the process's last directory.

    The recording ran each command in a new process, and its container then moved to where a `cd` had led. Output and
    exit code are those of the process, which reports its directory on descriptor 3 when it exits. Running the command
    in the session too would repeat its other effects. Reading the path from the text would fail for computed paths. The
    variable is unset afterwards, so a failed `cd` changes nothing.
    """
    shell, option, script, *rest = argv
    reporting = shlex.join([shell, option, f'trap "pwd >&3" EXIT; {script}', *rest])
    return (
        "{ forkpoint_cwd=$(" + reporting + ' 3>&1 >&4 4>&-); } 4>&1 && cd -- "$forkpoint_cwd"; '
        'eval "unset forkpoint_cwd; (exit $?)"'
    )


ENDPOINTS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any], int], WorkloadRequest | None]] = {
    "bash": _shell_request,
    "shell": _shell_request,
    "sql": _sql_request,
}
"""Makes the request of a recorded call, by its tool."""


_ENDPOINTS = ("shell", "sql", "video")
"""Endpoints whose tools can be named in full, such as `video/get_frame`."""


def member(record: Any, name: str, kind: type[Any]) -> Any:
    """Return a member of a JSON object.

    Raises:
        WorkloadError: It is missing or of another kind.
    """
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        raise WorkloadError(f"`{name}` is required and must be a JSON {_JSON_KINDS[kind]}.")
    return value


_JSON_KINDS: Mapping[type[Any], str] = {str: "string", list: "list", dict: "object"}
