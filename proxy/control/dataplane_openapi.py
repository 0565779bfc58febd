"""The OpenAPI description of the data plane, written by hand because no web framework serves it."""

from collections.abc import Iterator
from typing import Any

from proxy.control.routes.params import PROBLEM
from proxy.dialects.arguments import schema_of
from proxy.dialects.builtin_tools import ARGUMENTS, TOOLS, McpTool
from proxy.names import NAME_PATTERN
from sandboxes.calls import MARKS

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
_JSON = {"application/json": {"schema": {"type": "object"}}}
_PICTURE = {"schema": {"type": "string", "format": "binary"}}
_ANSWERS: dict[str, dict[int, dict[str, Any]]] = {
    "shell": {200: {"application/json": {"schema": _EXECUTED}}},
    "sql": {200: _JSON},
    "video": {200: {**_JSON, "image/jpeg": _PICTURE, "image/png": _PICTURE}, 422: {**_JSON, **PROBLEM["content"]}},
}
"""What the tools of an endpoint answer, by status and media type."""
_FILE_VERBS = {"put": "write_file", "get": "read_file", "delete": "delete_file"}
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def data_plane_paths() -> dict[str, Any]:
    """Return the paths of the built-in endpoints, with the rollout in the path and with the rollout in headers."""
    by_path = [_in_path("task", NAME_PATTERN), _in_path("rollout", NAME_PATTERN)]
    by_header = [_in_header("X-Forkpoint-Task"), _in_header("X-Forkpoint-Rollout")]
    paths: dict[str, Any] = {}
    for prefix, suffix, identity in (("/t/{task}/r/{rollout}", "", by_path), ("/e", "_by_headers", by_header)):
        for endpoint, tool in _built_in():
            name = "execute" if tool.name == "exec" else f"{endpoint}_{tool.name}"
            post = _tool(endpoint, tool) | {"operationId": f"{name}{suffix}"}
            paths[f"{prefix}/{endpoint}/{tool.name}"] = {"parameters": identity, "post": post}
        files = {
            method: about | {"operationId": f"{_FILE_VERBS[method]}{suffix}"} for method, about in _files().items()
        }
        paths[f"{prefix}/shell/files/{{path}}"] = {"parameters": [*identity, _in_path("path", None)], **files}
    return paths


def _built_in() -> Iterator[tuple[str, McpTool]]:
    """Yield the tools that take a JSON object, with their endpoints."""
    by_name = {tool.name: tool for tool in TOOLS}
    for endpoint, tools in ARGUMENTS.items():
        yield from ((endpoint, by_name[name]) for name in tools if name in by_name)


def _tool(endpoint: str, tool: McpTool) -> dict[str, Any]:
    body: dict[str, Any] = {"schema": schema_of(tool.tool.kind)}
    if tool.name == "exec":
        body["example"] = {"command": "pytest -q"}
    return {
        "summary": tool.tool.description,
        "tags": [endpoint],
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": _answers(_ANSWERS[endpoint]),
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
