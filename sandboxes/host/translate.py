"""From calls to what pid 1 is asked, and from what it answers to executions (pure)."""

from dataclasses import replace
from typing import Any

import orjson

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.effects import Effect, StateDigest
from sandboxes.guest.file_ops import checksum_differs, problem
from sandboxes.ipc.frames import Message
from sandboxes.spec import EnvironmentSpec
from sandboxes.sql.results import Failure, failure

_WITH_PATHS = {"shell": {"put", "get", "delete"}, "archive": {"stat", "pack", "extract"}}
SQL_GRACE_S = 2.0
"""How long after its time a statement that does not let itself be stopped is ended with its process."""


def digest(state: list[str] | None) -> StateDigest | None:
    """Return pid 1's two hexadecimal words as a digest."""
    return None if state is None else StateDigest(bytes.fromhex(state[0]), bytes.fromhex(state[1]))


def refuse(call: ToolCall) -> tuple[int, str, bytes] | None:
    """Return the answer to a call that no sandbox needs to see."""
    if call.tool == "exec":
        if "\0" in str(call.arguments["command"]):
            return problem(400, "Bad command", "a shell command cannot contain NUL: remove it")
        return None
    path = call.arguments.get("path")
    if call.tool in _WITH_PATHS.get(call.endpoint, ()) and not (
        isinstance(path, str) and path.startswith("/") and "\0" not in path
    ):
        return problem(400, "Bad path", "path must be absolute and without NUL")
    if call.tool == "put" and checksum_differs(call.arguments.get("sha256"), call.body):
        return problem(400, "Checksum differs", "the body's SHA-256 is not the announced one: send it again")
    return None


def request(call: ToolCall, spec: EnvironmentSpec, timeout_s: float) -> tuple[dict[str, Any], bytes]:
    """Return what pid 1 is asked for call."""
    arguments = dict(call.arguments)
    if call.endpoint == "sql":
        return {
            "op": "file",
            "tool": "sql",
            "arguments": _statement(call, spec),
            "timeout_s": timeout_s + SQL_GRACE_S,
        }, b""
    if call.tool == "exec":
        fields = {"op": "exec", "session": arguments["session"], "timeout_s": timeout_s}
        return fields, str(arguments["command"]).encode(errors="surrogateescape")
    # The largest file that `get` answers with.
    arguments["limit_bytes"] = spec.limits.disk_mb << 20
    return {"op": "file", "tool": call.tool, "arguments": arguments, "timeout_s": timeout_s}, call.body


def _statement(call: ToolCall, spec: EnvironmentSpec) -> dict[str, Any]:
    arguments = dict(call.arguments)
    return {
        "tool": call.tool, "path": spec.databases[arguments["database"]].path, "arguments": arguments,
        "output_bytes": spec.limits.output_bytes, "frozen_ms": spec.frozen_ms, "seed": "",
    }  # fmt: skip


def sql_execution(answer: Message, call: ToolCall, spec: EnvironmentSpec) -> Execution:
    """Return what pid 1 told of a statement on a database that the shell shares."""
    done = execution(answer, float(answer.fields["seconds"]))
    effect = done.effect | (Effect.DATABASE if Effect.FILES in done.effect else Effect.NONE)
    fields, result = answer.fields, done.result
    ended = "timed_out" not in fields
    if ended:
        shape = str(call.arguments.get("format", "json"))
        told = Failure("the statement was ended: it ran out of time, memory or disk", "limit")
        result = ToolResult(200, "application/json", failure(told, shape=shape))
    once = ended or fields["timed_out"] or (fields["volatile"] and spec.volatile == "never")
    return replace(done, effect=effect, result=result, shareable=not once)


def execution(answer: Message, seconds: float, served: ToolResult | None = None) -> Execution:
    """Return what pid 1 told of a call; served: the answer to one that it has not seen itself, a tool server's."""
    fields = answer.fields
    if served is not None:
        result = served
    elif "status" in fields:
        result = ToolResult(fields["status"], fields["media_type"], answer.body)
    else:
        cut = fields["stdout_bytes"]
        body = {
            "stdout": answer.body[:cut].decode(errors="replace"),
            "stderr": answer.body[cut:].decode(errors="replace"),
            **{name: fields[name] for name in ("exit_code", "timed_out", "truncated")},
        }
        result = ToolResult(200, "application/json", orjson.dumps(body))
    effect = Effect.NONE
    for name, flag in (("files", Effect.FILES), ("session", Effect.SESSION), ("processes", Effect.PROCESSES)):
        if fields[name]:
            effect |= flag
    witness = fields["witness"] and bytes.fromhex(fields["witness"])
    state, restless = digest(fields["state"]), bool(fields.get("restless"))
    settling = bool(fields.get("young"))
    return Execution(result, effect, seconds, state, witness or None, restless=restless, settling=settling)
