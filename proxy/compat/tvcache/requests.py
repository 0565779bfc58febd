"""Requests of the cache API: the task, the chain of calls, and what the client reports (pure)."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import orjson

from proxy.dialects.base import Request, json_object
from proxy.names import named
from proxy.refusals import RefusalError
from proxy.tree.keys import CallKey, call_key, canonical_json
from sandboxes.calls import ToolCall

MAX_CALLS = 10_000
"""Longest chain. The API sends the whole chain with each request, so longer ones take megabytes for each call."""
_VERBS = {
    "get": "GET", "get_all_envs": "GET", "get_test_result": "GET", "prefix_match": "POST", "should_fork": "POST",
    "store_test_result": "POST", "unref": "POST", "put": "PUT",
}  # fmt: skip
"""The requests that are answered, with their methods."""
_FAILED = "Failed to execute"
"""Answers that begin so are failures of the client's sandbox. The client never reports one as the last of a chain."""


@dataclass(frozen=True, slots=True)
class Reported:
    """One call of a chain with the answer that the client got."""

    answer: bytes | None  # As JSON; None if there is nothing to record.
    seconds: float  # How long the tool ran.


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """A request of the cache API."""

    verb: str  # What the client wants, such as `get`.
    task: str
    # Whether chains hold every call of their rollout. If not, calls that only read are left out of a chain unless
    # they are its last call.
    whole: bool
    chain: tuple[str, ...] = ()  # The calls, in the client's serialization.
    sandbox: str = ""  # Name of a sandbox of the client; empty for none.
    reported: tuple[Reported, ...] = ()  # With `put`: the last calls of the chain with their answers.
    result: bytes = b""  # With `store_test_result`: the result as JSON.


def read(request: Request) -> CacheRequest:
    """Return what a request means. Raises RefusalError: 400 to 422 if malformed, 404, 405, 501 if not served."""
    first, _, rest = request.path.strip("/").partition("/")
    verb = rest if first == "whole" else first
    # The library's synchronous client names the task in a header, and its chains are whole histories.
    whole = first == "whole" or bool(request.header("x-task-name"))
    method = _VERBS.get(verb)
    if method is None:
        raise RefusalError(501, "not-served", f"{verb[:80]!r} is not served here. Served are: {', '.join(_VERBS)}.")
    if request.method != method:
        raise RefusalError(405, "method", f"{verb} takes {method}.")
    fields = _query(request.query) if method == "GET" else json_object(request.body)
    task = fields.get("task_name")
    if not isinstance(task, str):
        raise RefusalError(422, "task_name", "task_name is required, as a string.")
    chain = _texts(fields, "tool_calls" if method == "GET" or verb == "prefix_match" else "history")
    sandbox = fields.get("env_id") or ""
    if not isinstance(sandbox, str):
        raise RefusalError(422, "env_id", "env_id must be a string, or null.")
    reported = _reported(fields, len(chain)) if verb == "put" else ()
    result = _json(fields.get("test_result")) if verb == "store_test_result" else b""
    return CacheRequest(verb, named("task", task), whole, chain, sandbox, reported, result)


def call_of(text: str, *, whole: bool, body: bytes = b"") -> ToolCall:
    """Return a call of a chain; `body` is the client's report (`sandboxes.client`). Both kinds of chains are apart."""
    return ToolCall("tvcache", "whole" if whole else "call", {"call": text}, body)


def key_of(text: str, *, whole: bool) -> CallKey:
    """Return the key of a call of a chain, which is the same whatever the client reports."""
    return call_key(call_of(text, whole=whole))


def history_test(chain: tuple[str, ...], body: bytes = b"") -> ToolCall:
    """Return the call that stands for the test of a whole history."""
    return ToolCall("tvcache", "test", {"history": list(chain)}, body)


def _query(query: str) -> dict[str, Any]:
    try:
        fields = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query), errors="strict")
    except ValueError:
        raise RefusalError(400, "query", "the query is malformed. Percent-encode its UTF-8.") from None
    # An empty chain has no member in a query.
    return {name: values[-1] for name, values in fields.items()} | {"tool_calls": fields.get("tool_calls", [])}


def _texts(fields: dict[str, Any], member: str) -> tuple[str, ...]:
    texts = fields.get(member) or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RefusalError(422, member, f"{member} must be a list of strings.")
    if len(texts) > MAX_CALLS:
        raise RefusalError(422, member, f"{member} has {len(texts)} calls, of {MAX_CALLS}.")
    return tuple(texts)


def _reported(fields: dict[str, Any], length: int) -> tuple[Reported, ...]:
    values, seconds, first = fields.get("values"), fields.get("tool_exec_times"), fields.get("start_idx", 0)
    if not isinstance(values, list) or not isinstance(seconds, list) or not isinstance(first, int):
        raise RefusalError(422, "values", "values and tool_exec_times must be lists, and start_idx a number.")
    if first < 0 or first + len(values) != length or not values:
        raise RefusalError(422, "values", f"{len(values)} values from {first} on are not the end of {length} calls.")
    if not all(isinstance(each, int | float) for each in seconds):
        raise RefusalError(422, "tool_exec_times", "tool_exec_times must be numbers.")
    if len(seconds) != len(values):
        # The client leaves answers out that read SKIP, with which it marks calls that did not run. Nobody knows then
        # which answer belongs to which call.
        return tuple(Reported(None, 0.0) for _ in values)
    return tuple(Reported(_answer(value), max(0.0, float(s))) for value, s in zip(values, seconds, strict=True))


def _answer(value: Any) -> bytes | None:
    return None if value is None or (isinstance(value, str) and value.startswith(_FAILED)) else _json(value)


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(orjson.loads(canonical_json(value)))
    except (TypeError, ValueError) as error:
        raise RefusalError(422, "value", f"an answer has no canonical form as JSON: {error}.") from None
