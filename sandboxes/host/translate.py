"""From calls to the requests that a supervisor gets, and from its answers to executions (pure)."""

from dataclasses import replace
from typing import Any

import orjson

from sandboxes.calls import Course, Execution, ResourceUse, ToolCall, ToolResult
from sandboxes.effects import Effect
from sandboxes.guest.files import docker_archive
from sandboxes.guest.files.operations import checksum_differs, problem
from sandboxes.ipc.codec import Envelope, members_of
from sandboxes.ipc.messages import CallDone, CommandOutcome, FileOutcome, RunCommand, RunFileOperation
from sandboxes.spec import EnvironmentSpec
from sandboxes.sql.results import Failure, failure, marks_of

_WITH_PATHS = {"shell": {"put", "get", "delete"}, "archive": {"stat", "pack", "extract"}}
"""The tools of each endpoint that have a path among their arguments."""
CUT_SHORT = 507
"""The status of a file operation that could not end: its time, or the memory or disk of the sandbox, was up."""
SQL_GRACE_S = 2.0
"""How long after its time limit a statement may stop by itself, until its process is killed."""


def refuse(call: ToolCall) -> tuple[int, str, bytes] | None:
    """Return the answer to a call that is wrong in itself; None for a call that needs the sandbox."""
    if call.tool == "exec":
        # The kernel passes commands as strings that end at the first NUL.
        if "\0" in str(call.arguments["command"]):
            return problem(400, "Bad command", "a shell command cannot contain NUL: remove it")
        return None
    path = call.arguments.get("path")
    if call.tool in _WITH_PATHS.get(call.endpoint, ()) and not (
        isinstance(path, str) and (path.startswith("/") or "session" in call.arguments) and "\0" not in path
    ):
        return problem(400, "Bad path", "path must be absolute and without NUL")
    # Checked here, so that a damaged upload never reaches the sandbox's files.
    if call.tool == "put" and checksum_differs(call.arguments.get("sha256"), call.body):
        return problem(400, "Checksum differs", "the body's SHA-256 is not the announced one: send it again")
    return None


def request(call: ToolCall, spec: EnvironmentSpec, timeout_s: float) -> tuple[RunCommand | RunFileOperation, bytes]:
    """Return the request, and its body, that carries a call out."""
    arguments = dict(call.arguments)
    if call.endpoint == "sql":
        # The statement's own limit is enforced by SQLite; the supervisor's is for one that does not stop.
        return RunFileOperation("sql", _statement(call, spec), timeout_s + SQL_GRACE_S), b""
    if call.tool == "exec":
        # Commands are bytes to the shell; what was no UTF-8 in the request comes back as it was.
        return RunCommand(arguments["session"], timeout_s), str(arguments["command"]).encode(errors="surrogateescape")
    # Three copies of an answer are in memory for a moment here: a few requests for the largest file that a sandbox can
    # hold would take all that the machine has.
    arguments["limit_bytes"] = min(spec.limits.disk_mb << 20, docker_archive.MAX_BYTES)
    return RunFileOperation(call.tool, arguments, timeout_s), call.body


def _statement(call: ToolCall, spec: EnvironmentSpec) -> dict[str, Any]:
    arguments = dict(call.arguments)
    return {
        "tool": call.tool, "path": spec.databases[arguments["database"]].path, "arguments": arguments,
        "output_bytes": spec.limits.output_bytes, "frozen_ms": spec.frozen_ms, "seed": "",
    }  # fmt: skip


def sql_execution(done: Envelope[CallDone], call: ToolCall, spec: EnvironmentSpec) -> Execution:
    """Return what came of a statement on a database file that the shell shares."""
    ran = execution(done)
    effect, result, outcome = ran.effect, ran.result, done.message.outcome
    # The database is a file here, so its effect shows as one on files.
    if Effect.FILES in effect:
        effect |= Effect.DATABASE
    # Facts are missing if the statement's process was killed.
    facts = outcome.sql if isinstance(outcome, FileOutcome) else None
    if facts is None:
        shape = str(call.arguments.get("format", "json"))
        error = Failure("the statement was ended: it ran out of time, memory or disk", "limit")
        result = ToolResult(200, "application/json", failure(error, shape=shape), marks=ran.result.marks)
    else:
        result = result.marked(*marks_of(result.body))
    # An answer that depends on the load of the machine, or on chance, is not for other rollouts.
    volatile = facts is not None and facts.volatile and spec.volatile != "frozen"
    once = facts is None or (facts.timed_out and not spec.shares_timeouts) or (volatile and spec.volatile == "never")
    return replace(ran, effect=effect, result=result, shareable=ran.shareable and not once, volatile=volatile)


def command_execution(done: Envelope[CallDone], spec: EnvironmentSpec) -> Execution:
    """Return what came of a command or of an operation on files."""
    # How far a call comes before its wall time is up depends on how busy the machine is. So neither its result nor the
    # state that it left is for other rollouts, unless the task says so.
    ran, outcome = execution(done), done.message.outcome
    timed_out = isinstance(outcome, CommandOutcome) and outcome.timed_out
    # A file operation whose process was killed is cut short by its time, or by the memory or disk of the sandbox.
    cut_short = isinstance(outcome, FileOutcome) and outcome.status == CUT_SHORT
    if not (timed_out or cut_short) or spec.shares_timeouts:
        return ran
    return replace(ran, shareable=False)


def execution(done: Envelope[CallDone], result: ToolResult | None = None) -> Execution:
    """Return what came of a call. `result` is given if it came another way, as the answer of a tool server does."""
    message = done.message
    # The supervisor reports facts; what counts as which effect is decided in this place only.
    effect = Effect.NONE
    for changed, flag in (
        (message.changed_files, Effect.FILES),
        (message.changed_session, Effect.SESSION),
        (message.changed_processes, Effect.PROCESSES),
    ):
        if changed:
            effect |= flag
    return Execution(
        (result or _result(done)).marked(*message.marks),
        effect,
        message.seconds,
        message.state.digest,
        # An empty witness and none are the same: no process runs.
        message.state.witness or None,
        # Others would get the failure as an answer, long after what was short is there again.
        shareable=not message.short,
        short=message.short,
        restless=message.state.restless,
        course=Course(message.order, message.last_pid),
        resources=None if message.resources is None else ResourceUse(**members_of(message.resources)),
    )


def _result(done: Envelope[CallDone]) -> ToolResult:
    match done.message.outcome:
        case FileOutcome(status, media_type):
            return ToolResult(status, media_type, done.body)
        case CommandOutcome(exit_code, timed_out, truncated, stdout_bytes):
            body = {
                # Output is bytes; JSON has none, so what is no UTF-8 is shown as the replacement character.
                "stdout": done.body[:stdout_bytes].decode(errors="replace"),
                "stderr": done.body[stdout_bytes:].decode(errors="replace"),
                "exit_code": exit_code,
                "timed_out": timed_out,
                "truncated": truncated,
            }
            return ToolResult(200, "application/json", orjson.dumps(body))
    raise TypeError(f"the result of {done.message.outcome} comes another way")
