"""The OpenAPI description of the data plane, written by hand because no web framework serves it."""

from typing import Any

from proxy.control.routes.params import PROBLEM
from proxy.dialects.shell import EXEC_OPTIONS
from proxy.names import NAME_PATTERN
from sandboxes.calls import MARKS

_EXEC = {"type": "object", "required": ["command"], "additionalProperties": False, "properties": EXEC_OPTIONS}
_EXEC_BODY = {"schema": _EXEC, "example": {"command": "pytest -q"}}
_EXECUTED = {
    "type": "object",
    "required": ["stdout", "stderr", "exit_code", "timed_out", "truncated"],
    "properties": {
        "stdout": {"type": "string"},
        "stderr": {"type": "string"},
        "exit_code": {"type": "integer"},
        "timed_out": {"type": "boolean"},
        "truncated": {"type": "boolean"},
    },
}
_HEADERS = {
    "Cache-Status": {"description": "Whether the answer is a cache hit (RFC 9211).", "schema": {"type": "string"}},
    "Server-Timing": {
        "description": "Milliseconds of tool, restore, replay and wait, and what the recorded execution used.",
        "schema": {"type": "string"},
    },
    "X-Forkpoint-Node": {"description": "The node that the rollout is at now.", "schema": {"type": "string"}},
    "X-Forkpoint-Marks": {
        "description": f"Facts of the call for rewards, of {', '.join(MARKS)}; left out if there are none.",
        "schema": {"type": "string"},
    },
}
_FILE_VERBS = {"put": "write_file", "get": "read_file", "delete": "delete_file"}
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def data_plane_paths() -> dict[str, Any]:
    """Return the paths of the built-in endpoints, with the rollout in the path and with the rollout in headers."""
    by_path = [_in_path("task", NAME_PATTERN), _in_path("rollout", NAME_PATTERN)]
    by_header = [_in_header("X-Forkpoint-Task"), _in_header("X-Forkpoint-Rollout")]
    paths: dict[str, Any] = {}
    for prefix, suffix, identity in (
        ("/t/{task}/r/{rollout}/shell", "", by_path),
        ("/e/shell", "_by_headers", by_header),
    ):
        paths[f"{prefix}/exec"] = {"parameters": identity, "post": _exec() | {"operationId": f"execute{suffix}"}}
        files = {
            method: about | {"operationId": f"{_FILE_VERBS[method]}{suffix}"} for method, about in _files().items()
        }
        paths[f"{prefix}/files/{{path}}"] = {"parameters": [*identity, _in_path("path", None)], **files}
    return paths


def _exec() -> dict[str, Any]:
    return {
        "summary": "Run a command in the rollout's live shell session.",
        "tags": ["shell"],
        "requestBody": {"required": True, "content": {"application/json": _EXEC_BODY}},
        "responses": _answers({200: {"application/json": {"schema": _EXECUTED}}}),
    }


def _files() -> dict[str, Any]:
    body = {"required": True, "content": _BYTES}
    mode = {"name": "mode", "in": "query", "schema": {"type": "string", "pattern": "^[0-7]{3,4}$"}}
    return {
        "put": {
            "summary": "Write a file. Missing directories are created.",
            "tags": ["shell"],
            "parameters": [mode],
            "requestBody": body,
            "responses": _answers({201: {}, 204: {}}),
        },
        "get": {
            "summary": "Read a file, or list a directory.",
            "tags": ["shell"],
            "responses": _answers({200: _BYTES}),
        },
        "delete": {"summary": "Delete a file or directory.", "tags": ["shell"], "responses": _answers({204: {}})},
    }


def _answers(bodies: dict[int, dict[str, Any]]) -> dict[str, Any]:
    answers: dict[str, Any] = {
        str(status): {"description": "The tool's answer.", "headers": _HEADERS, "content": content}
        for status, content in bodies.items()
    }
    return answers | {"4XX": PROBLEM, "5XX": PROBLEM}


def _in_path(name: str, pattern: str | None) -> dict[str, Any]:
    schema = {"type": "string", "pattern": pattern} if pattern else {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _in_header(name: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": True, "schema": {"type": "string", "pattern": NAME_PATTERN}}
