"""The built-in tools as MCP tools, in one table, with the keys and records of the built-in endpoint (pure)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from proxy.dialects import shell, sql, video
from proxy.dialects.arguments import BuiltInTool, ToolArguments, checked_arguments
from proxy.dialects.base import Response
from proxy.refusals import RefusalError
from sandboxes.calls import ToolCall
from sandboxes.spec import SHELLLESS_DRIVERS, EnvironmentSpec

RECORDED = "application/vnd.forkpoint.mcp+json"
"""The media type of recorded responses of MCP servers. Responses of built-in tools have other types."""

Result = dict[str, Any]
Make = Callable[[dict[str, Any], EnvironmentSpec], ToolCall]


@dataclass(frozen=True, slots=True)
class McpTool:
    """One built-in tool. No two tools have the same name."""

    name: str
    tool: BuiltInTool
    call: Make  # Makes the endpoint's call from a client's arguments; raises `RefusalError`.
    offered: Callable[[EnvironmentSpec], bool]  # Returns whether a task with an environment has the tool.
    # Makes the MCP result of the endpoint's response; None for a response that is shown as text.
    result: Callable[[Response], Result | None]

    def listed(self) -> dict[str, Any]:
        """Return the tool's entry in `tools/list`."""
        return self.tool.listed(self.name)


ARGUMENTS: dict[str, dict[str, type[ToolArguments]]] = {
    "shell": {"exec": shell.ExecArguments, **dict.fromkeys(("put", "get", "delete"), shell.FileArguments)},
    "sql": {name: tool.kind for name, tool in sql.TOOLS.items()},
    "video": {name: tool.kind for name, tool in video.TOOLS.items()},
}
"""What a recorded call has, by endpoint and tool."""


def defaults_of(endpoint: str, tool: str, spec: EnvironmentSpec) -> Mapping[str, Any]:
    """Return the arguments that a tool's call has in a task of this environment if its request leaves them out."""
    parse = {"shell": shell.parse, "sql": sql.parse}.get(endpoint)
    kind = ARGUMENTS.get(endpoint, {}).get(tool)
    if parse is None or kind in (None, shell.FileArguments):
        return {}
    least = {name: "SELECT 1" for name, member in kind.model_fields.items() if member.is_required()}
    arguments = parse("POST", tool, "", orjson.dumps(least), spec).arguments
    return {name: value for name, value in arguments.items() if name not in least}


# -- shell -----------------------------------------------------------------------------------------------------------


def _has_shell(spec: EnvironmentSpec) -> bool:
    return spec.driver not in SHELLLESS_DRIVERS


def _exec(arguments: dict[str, Any], spec: EnvironmentSpec) -> ToolCall:
    return shell.parse("POST", "exec", "", orjson.dumps(arguments), spec)


def _read_file(arguments: dict[str, Any], spec: EnvironmentSpec) -> ToolCall:
    return _file("GET", checked_arguments("read_file", shell.FileArguments, arguments).path, b"", spec)


def _write_file(arguments: dict[str, Any], spec: EnvironmentSpec) -> ToolCall:
    given = checked_arguments("write_file", shell.WriteArguments, arguments)
    return _file("PUT", given.path, given.content.encode(), spec)


def _file(method: str, path: str, body: bytes, spec: EnvironmentSpec) -> ToolCall:
    if path.startswith("/"):
        return shell.parse(method, f"files{path}", "", body, spec)
    if not path:
        raise RefusalError(422, "file-path", "the path is empty. Give the path of a file.")
    return shell.in_session(shell.parse(method, "files/", "", body, spec), path)


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


_EXEC = BuiltInTool(shell.ExecArguments, "Run a command in the rollout's live shell session.")
_READ = BuiltInTool(shell.FileArguments, "Read a text file.", reads=True)
_WRITE = BuiltInTool(shell.WriteArguments, "Write a text file.")
_SHELL = (
    McpTool("exec", _EXEC, _exec, _has_shell, _command_result),
    McpTool("read_file", _READ, _read_file, _has_shell, lambda _: None),
    McpTool("write_file", _WRITE, _write_file, _has_shell, lambda _: None),
)


# -- sql -------------------------------------------------------------------------------------------------------------


def _sql_result(response: Response) -> Result | None:
    value = _object(response, {"error"})
    return value and _structured(value, response.body.decode(), failed=value["error"] is not None)


def _sql(name: str, arguments: dict[str, Any], spec: EnvironmentSpec) -> ToolCall:
    return sql.parse("POST", name, "", orjson.dumps(arguments), spec)


_SQL = tuple(
    McpTool(name, tool, partial(_sql, name), lambda spec: bool(spec.databases), _sql_result)
    for name, tool in sql.TOOLS.items()
)


# -- video -----------------------------------------------------------------------------------------------------------

_VIDEO = tuple(
    McpTool(name, tool, partial(video.call_of, name), lambda spec: spec.video is not None, video.mcp_content)
    for name, tool in video.TOOLS.items()
)


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
