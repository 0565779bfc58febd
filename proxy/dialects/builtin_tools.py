"""The built-in tools as MCP tools, in one table, with the keys and records of the built-in endpoint (pure)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from proxy.dialects import shell, sql, video
from proxy.dialects.base import Response, tool_entry
from proxy.refusals import RefusalError
from sandboxes.calls import ToolCall
from sandboxes.spec import SHELLLESS_DRIVERS, EnvironmentSpec

RECORDED = "application/vnd.forkpoint.mcp+json"
"""The media type of recorded responses of MCP servers. Responses of built-in tools have other types."""

Schema = dict[str, Any]
Result = dict[str, Any]
Make = Callable[[dict[str, Any], EnvironmentSpec], ToolCall]


@dataclass(frozen=True, slots=True)
class McpTool:
    """One built-in tool. No two tools have the same name."""

    name: str
    description: str  # For the model.
    properties: dict[str, Schema]  # JSON schemas of the arguments.
    required: tuple[str, ...]
    reads: bool  # Whether the tool never changes the state (MCP's `readOnlyHint`).
    call: Make  # Makes the endpoint's call from a client's arguments; raises `RefusalError`.
    offered: Callable[[EnvironmentSpec], bool]  # Returns whether a task with an environment has the tool.
    # Makes the MCP result of the endpoint's response; None for a response that is shown as text.
    result: Callable[[Response], Result | None]

    def listed(self) -> dict[str, Any]:
        """Return the tool's entry in `tools/list`."""
        return tool_entry(self.name, self.description, self.properties, self.required, reads=self.reads)


_LEAST: dict[str, tuple[Callable[[str, str, str, bytes, EnvironmentSpec], ToolCall], dict[str, Schema]]] = {
    "shell": (shell.parse, {"exec": {"command": "true"}}),
    "sql": (sql.parse, {
        "query": {"sql": "SELECT 1"}, "script": {"sql": "SELECT 1"}, "explain": {"sql": "SELECT 1"},
        "compare": {"sql": "SELECT 1", "gold": "SELECT 1"}, "tables": {}, "schema": {},
    }),
}  # fmt: skip
"""By endpoint how it reads a request, and for each tool with defaults the arguments that it needs."""


def defaults_of(endpoint: str, tool: str, spec: EnvironmentSpec) -> Mapping[str, Any]:
    """Return the arguments that a tool's call has in a task of this environment if its request leaves them out."""
    parse, tools = _LEAST.get(endpoint, (shell.parse, {}))
    if tool not in tools:
        return {}
    arguments = parse("POST", tool, "", orjson.dumps(tools[tool]), spec).arguments
    return {name: value for name, value in arguments.items() if name not in tools[tool]}


# -- shell -----------------------------------------------------------------------------------------------------------


def _has_shell(spec: EnvironmentSpec) -> bool:
    return spec.driver not in SHELLLESS_DRIVERS


def _exec(arguments: dict[str, Any], spec: EnvironmentSpec) -> ToolCall:
    return shell.parse("POST", "exec", "", orjson.dumps(arguments), spec)


def _read_file(arguments: dict[str, Any], spec: EnvironmentSpec) -> ToolCall:
    return _file("GET", _text(arguments, "path", {"path"}), b"", spec)


def _write_file(arguments: dict[str, Any], spec: EnvironmentSpec) -> ToolCall:
    content = _text(arguments, "content", {"path", "content"})
    return _file("PUT", _text(arguments, "path", {"path", "content"}), content.encode(), spec)


def _file(method: str, path: str, body: bytes, spec: EnvironmentSpec) -> ToolCall:
    if path.startswith("/"):
        return shell.parse(method, f"files{path}", "", body, spec)
    if not path:
        raise RefusalError(422, "file-path", "the path is empty. Give the path of a file.")
    return shell.in_session(shell.parse(method, "files/", "", body, spec), path)


def _text(arguments: dict[str, Any], name: str, known: set[str]) -> str:
    if not arguments.keys() <= known or not isinstance(arguments.get(name), str):
        raise RefusalError(422, "arguments", f"this tool takes {' and '.join(sorted(known))}, as strings.")
    return str(arguments[name])


def _command_result(response: Response) -> Result | None:
    value = _object(response, {"stdout", "stderr", "exit_code"})
    return value and _structured(value, _command_text(value), failed=value["exit_code"] != 0)


def _command_text(value: dict[str, Any]) -> str:
    """Return what a model reads. Many clients show it only the text, so a failure must be part of the text."""
    output = str(value["stdout"] + value["stderr"])
    if value["exit_code"] == 0:
        return output
    gap = "" if output.endswith("\n") or not output else "\n"
    cause = "timed out, " if value.get("timed_out") else ""
    return f"{output}{gap}[{cause}exit code {value['exit_code']}]\n"


_TEXT: Schema = {"type": "string"}
_PATH: dict[str, Schema] = {
    "path": {"type": "string", "description": "absolute, or relative to the directory of the shell session main"}
}
_SECONDS: Schema = {"type": "number", "exclusiveMinimum": 0}
_SHELL = (
    McpTool(
        "exec", "Run a command in the rollout's live shell session.", shell.EXEC_OPTIONS, ("command",), False, _exec,
        _has_shell, _command_result,
    ),
    McpTool("read_file", "Read a text file.", _PATH, ("path",), True, _read_file, _has_shell, lambda _: None),
    McpTool(
        "write_file", "Write a text file.", {**_PATH, "content": _TEXT}, ("path", "content"), False, _write_file,
        _has_shell, lambda _: None,
    ),
)  # fmt: skip


# -- sql -------------------------------------------------------------------------------------------------------------


def _sql_result(response: Response) -> Result | None:
    value = _object(response, {"error"})
    return value and _structured(value, response.body.decode(), failed=value["error"] is not None)


_DATABASE: dict[str, Schema] = {
    "database": {"type": "string", "description": "by its name in the task; the first by default"},
    "timeout_s": _SECONDS,
}
_VALUES: Schema = {"type": ["array", "object"], "description": "values for the statement's placeholders"}
_FORMAT: Schema = {"enum": ["json", "table", "markdown", "csv", "skyrl"], "default": "json"}


def _sql_tool(name: str, description: str, properties: dict[str, Schema], *required: str, reads: bool) -> McpTool:
    return McpTool(
        name, description, {**properties, **_DATABASE}, required, reads,
        lambda arguments, spec: sql.parse("POST", name, "", orjson.dumps(arguments), spec),
        lambda spec: bool(spec.databases), _sql_result,
    )  # fmt: skip


_SQL = (
    # `query` and `script` run any statement, so they may change the database.
    _sql_tool(
        "query", "Run one SQL statement; its rows, or how many it changed.",
        {"sql": _TEXT, "params": _VALUES, "max_rows": {"type": "integer", "minimum": 0, "default": 100},
         "format": _FORMAT},
        "sql", reads=False,
    ),
    _sql_tool("script", "Run several SQL statements, all or nothing.", {"sql": _TEXT}, "sql", reads=False),
    _sql_tool(
        "explain", "Show a statement's query plan; nothing is run.",
        {"sql": _TEXT, "params": _VALUES, "format": _FORMAT}, "sql", reads=True,
    ),
    _sql_tool(
        "compare", "Whether two queries give the same rows here; nothing is changed.",
        {"sql": _TEXT, "gold": _TEXT, "ordered": {"type": "boolean", "default": False}}, "sql", "gold", reads=True,
    ),
    _sql_tool("tables", "List tables and views.", {}, reads=True),
    _sql_tool("schema", "Show the definition of one table, or of everything.", {"table": _TEXT}, reads=True),
)  # fmt: skip


# -- video -----------------------------------------------------------------------------------------------------------


def _video_tool(name: str) -> McpTool:
    kind = video.TOOLS[name]
    return McpTool(
        name, kind.description, kind.properties, kind.required, name not in video.CHANGING,
        partial(video.call_of, name), lambda spec: spec.video is not None, video.mcp_content,
    )  # fmt: skip


_VIDEO = tuple(_video_tool(name) for name in video.TOOLS)


# -- all -------------------------------------------------------------------------------------------------------------

TOOLS: tuple[McpTool, ...] = (*_SHELL, *_SQL, *_VIDEO)


def of(spec: EnvironmentSpec) -> dict[str, McpTool]:
    """Return the built-in tools of a task with this environment, by name."""
    return {tool.name: tool for tool in TOOLS if tool.offered(spec)}


def result_of(tool: McpTool, response: Response) -> Result:
    """Return the MCP result of a tool call for its endpoint's response."""
    result = tool.result(response)
    if result is not None:
        return result
    text = response.body.decode(errors="replace")
    return refused(_detail(text)) if response.status >= 400 else {"content": [_text_item(text)], "isError": False}


def refused(why: str) -> Result:
    """Return the MCP result of a call that was not carried out, for a model that may correct it."""
    return {"content": [_text_item(why)], "isError": True}


def _detail(text: str) -> str:
    try:
        return str(orjson.loads(text)["detail"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return text


def _text_item(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _object(response: Response, members: set[str]) -> dict[str, Any] | None:
    if response.status != 200 or dict(response.headers).get("content-type", "") != "application/json":
        return None
    value = orjson.loads(response.body)
    return value if isinstance(value, dict) and members <= value.keys() else None


def _structured(value: dict[str, Any], text: str, *, failed: bool) -> Result:
    return {"content": [_text_item(text)], "structuredContent": value, "isError": failed}
