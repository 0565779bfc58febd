"""Reads requests to E2B's control plane, which is REST with JSON (pure)."""

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from proxy.compat.e2b import connect_rpc as connect
from proxy.compat.e2b.responses import json_response
from proxy.compat.e2b.sandbox_note import DEFAULT_TIMEOUT_S
from proxy.dialects.base import Local, Request
from proxy.refusals import RefusalError

MAX_FORKS = 100
"""Largest number of forks in one request, as in E2B."""
MAX_STRING_CHARS = 1000
"""Longest string member of a body: names and template IDs, which are stored and listed."""
MAX_PAGE_ITEMS = 1000
"""Longest page of a list that a client may request."""
_PAGE_ITEMS = 100
"""Length of a page if the client names none, as in E2B."""
_VARIABLE = re.compile(r"[^=\0]+")
"""Names that an environment variable can have."""


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """A request to the control plane."""

    verb: str  # The operation, as in `_VERBS`.
    sandbox: str = ""  # The sandbox or template in the path; empty if there is none.
    body: dict[str, Any] = field(default_factory=dict)  # The JSON object of a POST.
    query: dict[str, str] = field(default_factory=dict)


_ID = "([^/]+)"
_VERBS = [
    (re.compile(pattern.replace("{id}", _ID)), verb)
    for pattern, verb in {
        "POST (?:/v2)?/sandboxes": "create",
        "GET (?:/v2)?/sandboxes": "list",
        "GET /sandboxes/{id}": "info",
        "DELETE /sandboxes/{id}": "kill",
        "POST /sandboxes/{id}/(?:timeout|refreshes)": "timeout",
        "POST /sandboxes/{id}/pause": "pause",
        "POST (?:/v2)?/sandboxes/{id}/connect": "connect",
        "POST /sandboxes/{id}/resume": "connect",
        "POST /sandboxes/{id}/snapshots": "snapshot",
        "POST /sandboxes/{id}/fork": "fork",
        "GET /sandboxes/{id}/metrics": "metrics",
        "GET (?:/v2)?/sandboxes/{id}/logs": "logs",
        "GET /snapshots": "snapshots",
        "DELETE /templates/{id}": "forget",
        "GET /health": "health",
        "GET /envs": "envs",
        "POST /init": "init",
    }.items()
]
"""Method and path of each operation. A group in the pattern is the sandbox or template."""
_UNSERVED = re.compile(r"/(?:v[0-9]+/)?(?:templates|volumes|secrets|sandboxes)(?:/|$)")
"""Paths that E2B's API has, and this proxy has not."""


def read_control(request: Request, path: str) -> ControlRequest:
    """Parse a request to the control plane, by its decoded path. Raises RefusalError (400, 404, 405 or 501)."""
    line = f"{request.method} {path}"
    for pattern, verb in _VERBS:
        match = pattern.fullmatch(line)
        if match is not None:
            body = connect.message(request.body) if request.method == "POST" else {}
            return ControlRequest(verb, match[1] if match.re.groups else "", body, dict(parse_qsl(request.query)))
    if any(pattern.fullmatch(f"{method} {path}") for pattern, _ in _VERBS for method in ("GET", "POST", "DELETE")):
        raise RefusalError(405, "method", f"{path} does not take {request.method}.")
    if _UNSERVED.match(path) or path.startswith("/execute"):
        raise RefusalError(501, "unimplemented", f"{line}: Forkpoint does not serve this part of E2B's API.")
    raise RefusalError(404, "no-such-path", f"E2B's API has no {line}.")


def variables(value: Any) -> dict[str, str]:
    """Return a request's environment variables; None is none. Raises RefusalError (400) if they are no valid map."""
    pairs = value or {}
    if not isinstance(pairs, dict) or not all(
        _VARIABLE.fullmatch(name) and isinstance(text, str) and "\0" not in text for name, text in pairs.items()
    ):
        raise RefusalError(400, "envs", "Environment variables must map names without = to strings, without NUL.")
    return dict(pairs)


def timeout_s(body: dict[str, Any]) -> float:
    """Return the timeout in a body, in seconds, or E2B's default. Raises RefusalError (400) if it is no number."""
    value = body.get("timeout")
    if value is None:
        return DEFAULT_TIMEOUT_S
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 10**9:
        raise RefusalError(400, "timeout", "timeout must be a number of seconds from 0 to 10^9.")
    return float(value)


def resumes_on_request(body: dict[str, Any]) -> bool:
    """Return whether a sandbox that pauses resumes on the next request."""
    value = body.get("autoResume")
    return value is True or (isinstance(value, dict) and value.get("enabled") is True)


def fork_count(body: dict[str, Any]) -> int:
    """Return the number of forks that a body requests. Raises RefusalError (400) if it is out of range."""
    count = body.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_FORKS:
        raise RefusalError(400, "count", f"count must be 1 to {MAX_FORKS}.")
    return count


def require_memory(body: dict[str, Any]) -> None:
    """Refuse (400) to keep a state without its processes, as E2B does for templates without memory snapshots."""
    if body.get("memory") is False:
        raise RefusalError(
            400, "snapshot_filesystem_only_disabled", "States are kept with their processes, not without. Leave out "
            "memory."
        )  # fmt: skip


def name_field(body: dict[str, Any], name: str) -> str:
    """Return a string member of a body; empty if missing or null. Raises RefusalError (400) for others or long ones."""
    value = body.get(name) or ""
    if not isinstance(value, str) or len(value) > MAX_STRING_CHARS:
        raise RefusalError(400, name, f"{name} must be a string of at most {MAX_STRING_CHARS} characters.")
    return value


def string_map(body: dict[str, Any], name: str) -> dict[str, str]:
    """Return a map of strings in a body; empty if missing or null. Raises RefusalError (400) for other values."""
    value = body.get(name) or {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise RefusalError(400, name, f"{name} must map names to strings.")
    return dict(value)


def page(items: list[dict[str, Any]], query: dict[str, str]) -> Local:
    """Return a page of a list; `x-next-token` has the next one's token. Raises RefusalError (400) for a bad query."""
    limit, token = query.get("limit", str(_PAGE_ITEMS)), query.get("nextToken", "0")
    are_numbers = limit.isascii() and limit.isdigit() and token.isascii() and token.isdigit()
    if not are_numbers or not 0 < int(limit) <= MAX_PAGE_ITEMS:
        raise RefusalError(400, "page", f"limit must be 1 to {MAX_PAGE_ITEMS}, and nextToken the last page's token.")
    start, end = int(token), int(token) + int(limit)
    return json_response(items[start:end], 200, (("x-next-token", str(end)),) if end < len(items) else ())
