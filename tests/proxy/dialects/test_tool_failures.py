"""Failures of tool servers hold for their own rollout, whatever their name is."""

from typing import Any

import orjson
import pytest

from proxy.dialects.tool_failures import as_shared
from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.effects import Effect
from sandboxes.server_spec import McpServer, Server, Upstream
from sandboxes.spec import EnvironmentSpec

SERVERS: dict[str, Server | Upstream] = {
    "api": Server(command="x", port=1),
    "rex": Server(command="x", port=2, dialect="swe-rex"),
}
SPEC = EnvironmentSpec(servers=SERVERS, mcp_servers={"m": McpServer(command="x")})


def is_shared(endpoint: str, status: int, body: Any, spec: EnvironmentSpec = SPEC) -> bool:
    """Whether a response is shared. Every other one has the mark of a failure that is not the agent's."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    call = ToolCall(endpoint, "POST /x", {})
    execution = Execution(ToolResult(status, "application/json", data), Effect.NONE, 0.0, None)
    shared = as_shared(spec, call, execution)
    assert shared.result.marks == (() if shared.shareable else ("machine",))
    return shared.shareable


def rex(class_path: str, message: str) -> dict[str, Any]:
    error = {"message": message, "class_path": class_path, "traceback": "wait_for(work, timeout=9)", "extra_info": {}}
    return {"swerexception": error}


def mcp(text: str, **members: Any) -> dict[str, Any]:
    return {"notifications": [], "result": {"content": [{"type": "text", "text": text}], **members}}


OWN = [
    ("api", 500, b"oops"), ("api", 503, {}), ("api", 511, {}), ("api", 408, b""), ("api", 429, b""),
    ("api", 400, b"Read timed out after 5 s"), ("api", 422, {"detail": "the time limit is exceeded"}),
    ("api", 200, {"status": "TimeLimitExceeded"}), ("api", 200, {"run_result": [{"timed_out": True}]}),
    ("api", 200, {"error": {"type": "asyncio.TimeoutError"}}), ("api", 200, b'{"status": "\\u0074imeout"}'),
    ("api", 200, {"status": "Time Limit Exceeded"}), ("api", 200, {"error": "The command timed out after 30 s."}),
    ("api", 400, b"DEADLINE EXCEEDED"), ("api", 200, '{"state": "T\u0130MEOUT"}'.encode()),
    ("api", 200, {"messages": [{"text": '{"data": {"state": "timeout"}}'}], "close": None}),
    ("rex", 511, rex("pexpect.exceptions.TIMEOUT", "Timeout exceeded.")),
    ("rex", 511, rex("swerex.exceptions.CommandTimeoutError", "too slow")),
    ("rex", 500, b"Internal Server Error"),
    ("mcp", 200, {"error": {"code": -32603, "message": "internal"}}),
    ("mcp", 200, {"error": {"code": -32001, "message": "Request"}}),
    ("mcp", 200, {"error": {"code": -1, "message": "Deadline exceeded"}}),
    ("mcp", 200, mcp("httpx.ReadTimeout", isError=True)),
    ("mcp", 200, mcp('{"status": "timeout"}')),
]  # fmt: skip
SHARED = [
    ("api", 200, b"see the timeout below"), ("api", 200, {"timeout": 5, "text": "no time"}), ("api", 404, b"none"),
    ("api", 200, {"status": "ok", "reason": "a timeout was set in the file"}), ("api", 200, {"timed_out": False}),
    ("rex", 511, rex("builtins.FileNotFoundError", "/no/such")),
    ("mcp", 200, {"error": {"code": -32602, "message": "unknown tool"}}),
    ("mcp", 200, mcp("no such key", isError=True)), ("mcp", 200, mcp("the timeout is 5 s")),
    ("shell", 200, {"stdout": "", "stderr": "timeout", "exit_code": 1, "timed_out": True}),
    ("shell", 500, b"timeout"),
]  # fmt: skip


@pytest.mark.parametrize(("endpoint", "status", "body"), OWN)
def test_failure_of_the_moment_is_not_shared(endpoint: str, status: int, body: Any) -> None:
    """Another rollout might not have met it."""
    assert not is_shared(endpoint, status, body)


@pytest.mark.parametrize(("endpoint", "status", "body"), SHARED)
def test_other_response_is_shared(endpoint: str, status: int, body: Any) -> None:
    """Those that only speak of time limits, and those of other endpoints, whose drivers know more."""
    assert is_shared(endpoint, status, body)


def test_shared_timeouts_are_shared() -> None:
    """A task may want them recorded; a server's own failure stays its rollout's."""
    spec = SPEC.model_copy(update={"timeouts": "shared"})
    assert is_shared("rex", 511, rex("pexpect.exceptions.TIMEOUT", "Timeout exceeded."), spec)
    assert is_shared("mcp", 200, mcp("httpx.ReadTimeout", isError=True), spec)
    assert not is_shared("api", 500, b"timeout", spec)
