"""The shell endpoint: `POST exec`, and `PUT|GET|DELETE files/{path}` (pure)."""

import re
from dataclasses import replace
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qs

import orjson
from pydantic import Field

from proxy.dialects.arguments import ToolArguments, checked_arguments
from proxy.dialects.base import LoneSurrogateError, json_object
from proxy.refusals import RefusalError
from sandboxes.calls import ToolCall, ToolResult
from sandboxes.server_spec import USER
from sandboxes.spec import SHELLLESS_DRIVERS, EnvironmentSpec

MAX_COMMAND_BYTES = 1 << 20
"""Limits a command. A longer one is a script, which is better uploaded as a file."""
MAX_TIMEOUT_S = 86_400.0
"""Limits the timeout of a command: a day, longer than any step of an agent."""


class ExecArguments(ToolArguments):
    """What `exec` takes."""

    command: str = Field(json_schema_extra={"maxLength": MAX_COMMAND_BYTES})
    session: str = Field(default="main", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)
    service: str | None = Field(default=None, description="a side service of the task; left out: the main container")
    user: str | None = Field(default=None, pattern=f"^{USER.pattern}$", description="a user of the service")


class FileArguments(ToolArguments):
    """What all tools for files take."""

    path: str = Field(description="absolute, or relative to the directory of the shell session main")


class WriteArguments(FileArguments):
    """What writing a text file takes."""

    content: str


_FILE_TOOLS = {"PUT": "put", "GET": "get", "DELETE": "delete"}


def parse(method: str, path: str, query: str, body: bytes, spec: EnvironmentSpec) -> ToolCall:
    """Return the call of a request to the shell endpoint, with defaults filled in. Raises RefusalError (4xx)."""
    if spec.driver in SHELLLESS_DRIVERS:
        endpoint = "video" if spec.driver == "video" else "sql"
        raise RefusalError(
            404, "no-shell", f"driver {spec.driver!r} runs no shell: this task has the {endpoint} endpoint."
        )
    if path == "exec":
        if method != "POST":
            raise RefusalError(405, "method", "exec takes POST with a JSON body.")
        return _exec(body, spec)
    if path.startswith("files/"):
        return _file(method, path.removeprefix("files/"), query, body)
    raise RefusalError(404, "no-such-tool", "the shell endpoint has POST exec and PUT|GET|DELETE files/{path}.")


class UnrunnableCommandError(RefusalError):
    """A command that no shell can run. A model wrote it, so the response is a result that the model can read."""

    def result(self) -> bytes:
        """Return the body of the response: bash's exit code for a command that cannot be executed, and the reason."""
        value = {"stdout": "", "stderr": f"{self}\n", "exit_code": 126, "timed_out": False, "truncated": False}
        return orjson.dumps(value)


def in_session(call: ToolCall, path: str) -> ToolCall:
    """Return a call on a file whose path is relative to the directory of the main session, as it is for a command."""
    if "\0" in path or len(path.encode()) > 4095:
        raise RefusalError(422, "file-path", "a file's path has no NUL, and at most 4095 bytes.")
    return replace(call, arguments={**call.arguments, "path": path, "session": "main"})


def exit_code(result: ToolResult) -> int | None:
    """Return the exit code in an answer; None if the answer has none."""
    if result.media_type != "application/json":
        return None
    try:
        value = orjson.loads(result.body)
    except orjson.JSONDecodeError:
        # Tool servers may label other text as JSON.
        return None
    code = value.get("exit_code") if isinstance(value, dict) else None
    # A tool server's number may be anything.
    return code if isinstance(code, int) and not isinstance(code, bool) and abs(code) < 1 << 31 else None


def _exec(body: bytes, spec: EnvironmentSpec) -> ToolCall:
    try:
        value = json_object(body, '{"command": "ls"}', slug="exec")
    except LoneSurrogateError as error:
        raise UnrunnableCommandError(422, "command", str(error)) from None
    given = checked_arguments("exec", ExecArguments, value)
    _check_command(given.command)
    if given.service is not None and given.service not in spec.services:
        raise RefusalError(422, "service", f'"service" must be one of {sorted(spec.services) or "none"}.')
    if given.user is not None and given.service is None:
        raise RefusalError(422, "user", '"user" is a user of "service", which the request must name too.')
    given.timeout_s = spec.limits.timeout_s if given.timeout_s is None else given.timeout_s
    return ToolCall("shell", "exec", given.model_dump(exclude_none=True))


def _check_command(command: str) -> None:
    if len(command.encode()) > MAX_COMMAND_BYTES:
        raise RefusalError(
            413, "command", f"the command is longer than {MAX_COMMAND_BYTES} bytes. Upload a script and run it."
        )
    if "\0" in command:
        raise UnrunnableCommandError(
            422, "command", "the command has a NUL character, which no shell can run. Upload binary data as a file."
        )


def _file(method: str, path: str, query: str, body: bytes) -> ToolCall:
    tool = _FILE_TOOLS.get(method)
    if tool is None:
        raise RefusalError(405, "method", "files take PUT, GET and DELETE.")
    if "\0" in path or len(path.encode()) > 4095 or ".." in path.split("/"):
        raise RefusalError(422, "file-path", "a file's path has no NUL, no '..' and at most 4095 bytes.")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    arguments: dict[str, Any] = {"path": "/" + "/".join(parts)}
    if tool == "put":
        arguments["sha256"] = sha256(body).hexdigest()
        arguments |= _mode(query)
    return ToolCall("shell", tool, arguments, body if tool == "put" else b"")


def _mode(query: str) -> dict[str, int]:
    text = parse_qs(query).get("mode", [""])[-1]
    if not text:
        return {}
    if re.fullmatch(r"[0-7]{3,4}", text) is None:
        raise RefusalError(422, "mode", "?mode= takes an octal mode such as 755.")
    return {"mode": int(text, 8)}
