"""Responses of tool servers that report a failure of the moment: they hold for their own rollout alone (pure).

How far a server comes within its time depends on how busy the machine is, and what it calls its own failure may be one
of its machine. No rule knows the names of all such failures. So a response counts as one

1. by its status: 5xx, 408, 425 and 429, unless the endpoint's rules say that the status is an ordinary result; and
   JSON-RPC's codes for an internal error, a closed connection and a timeout;
2. by its text, if it reports an error that speaks of a timeout;
3. by a member that names a timeout as its class, says that it has passed, or is true for one, whatever the status is.

A false match costs a miss and never a wrong hit. A spec with shared timeouts shares the second and third kind.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson

from proxy.dialects.rule_schema import rules_of, steady
from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.spec import EnvironmentSpec

_STATUSES = frozenset({408, 425, 429})
_CODES = frozenset({-32603, -32000, -32001})
"""JSON-RPC's internal error, and the codes of MCP's SDKs for a closed connection and a timeout."""
_EXCEEDED = r"(?:time[ _-]?limit|deadline)[ _-]?(?:is[ _-]?)?exceed"
_TIMEOUT = re.compile(rf"time[ _-]?d?[ _-]?out|{_EXCEEDED}", re.IGNORECASE)
_PASSED = re.compile(rf"timed[ _-]?out|{_EXCEEDED}", re.IGNORECASE)
"""What a whole sentence says of a limit that has passed; other sentences may speak of a limit that was set."""
_CLASSES = frozenset({
    "status", "state", "type", "kind", "class", "class_path", "exception", "error", "error_type", "error_class", "code",
    "reason",
})  # fmt: skip
"""Members of JSON objects whose value names what happened."""
_CLASS = re.compile(r"[\w.:-]{1,120}")


def as_shared(spec: EnvironmentSpec, call: ToolCall, execution: Execution) -> Execution:
    """Return an execution; if its result is a tool server's failure of the moment, it is marked and not shareable."""
    if not _is_of_the_moment(spec, call, execution.result):
        return execution
    return replace(execution, shareable=False, result=execution.result.marked("machine"))


def _is_of_the_moment(spec: EnvironmentSpec, call: ToolCall, result: ToolResult) -> bool:
    if call.endpoint == "mcp":
        payload = _json(result.body)
        return isinstance(payload, dict) and _is_mcp_failure(spec, payload)
    server = spec.servers.get(call.endpoint)
    if server is None:
        return False
    if result.status in _STATUSES or (result.status >= 500 and result.status not in rules_of(server).results):
        return True
    if spec.shares_timeouts:
        return False
    if not _may_name_timeout(result.body):
        return False
    # A traceback names time limits that did not pass.
    body = steady(spec, call, result.body)
    return _names_timeout(_json(body)) or (result.status >= 400 and _speaks_of_timeout(body))


def _is_mcp_failure(spec: EnvironmentSpec, payload: dict[str, Any]) -> bool:
    error, value = payload.get("error"), payload.get("result")
    if isinstance(error, dict) and error.get("code") in _CODES:
        return True
    if spec.shares_timeouts:
        return False
    failed = error or (value if isinstance(value, dict) and value.get("isError") else None)
    return _names_timeout(value) or (failed is not None and _speaks_of_timeout(orjson.dumps(failed)))


def _may_name_timeout(body: bytes) -> bool:
    """Return whether a body may match `_TIMEOUT`. Most do not, and need not be parsed: 4 ms instead of 100 for 1 MB."""
    # What is no ASCII, or escaped in JSON, may stand for other letters.
    if not body.isascii() or b"\\u" in body:
        return True
    lowered = body.lower()
    return b"time" in lowered or b"deadline" in lowered


def _speaks_of_timeout(text: bytes) -> bool:
    return _TIMEOUT.search(text.decode(errors="replace")) is not None


def _names_timeout(value: Any) -> bool:
    return any(
        (member is True and _TIMEOUT.search(name) is not None)
        or (
            name in _CLASSES
            and isinstance(member, str)
            and (_TIMEOUT if _CLASS.fullmatch(member) else _PASSED).search(member) is not None
        )
        for name, member in _members(value)
    )


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the members of all objects in a JSON value, and in texts that are JSON: messages and contents of tools."""
    pending = [value]
    while pending:
        match pending.pop():
            case dict() as members:
                yield from members.items()
                pending += members.values()
                if isinstance(text := members.get("text"), str):
                    pending.append(_json(text))
            case list() as items:
                pending += items


def _json(body: bytes | str) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
