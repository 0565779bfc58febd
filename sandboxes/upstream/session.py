"""Sessions with servers elsewhere: their names in requests and responses, and their cookies (pure).

Every rollout has its own session. Records must not depend on its name, so that is `OUR_NAME` in what is recorded, and
the real one in what is sent. The dialect says which members of JSON bodies hold it.
"""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

import orjson

from sandboxes.calls import ToolCall, ToolResult
from sandboxes.tool_clients.json_paths import OUR_NAME, member, renamed

_LONG_NAME = 8
"""Length from which a server's own name for a session is replaced inside longer texts, too."""


@dataclass(slots=True)
class UpstreamSession:
    """A session that a rule's `open` began."""

    # The name by which the server knows the session.
    name: str = field(default_factory=lambda: f"fp{secrets.token_hex(10)}")
    chosen_by_server: bool = False  # Otherwise the name is random, so it cannot occur by chance.
    cookies: dict[str, str] = field(default_factory=dict)  # The cookies that the server set, by name.

    def outgoing(self, body: bytes, call: ToolCall) -> bytes:
        """Return the body of a request, with this session's name in it."""
        return _replace_name(body, call, OUR_NAME, self.name)

    def incoming(self, result: ToolResult, call: ToolCall) -> ToolResult:
        """Learn the cookies and the name from a response, and return the response with `OUR_NAME` in its body."""
        for name, value in result.headers:
            if name.lower() == "set-cookie":
                self.cookies |= _set_cookies(value)
        if call.arguments.get("names") and call.arguments.get("session") == "opens":
            given = member(_parse(result.body), call.arguments["names"].removeprefix("body:"))
            if isinstance(given, str | int) and not isinstance(given, bool):
                self.name, self.chosen_by_server = str(given), True
        # A short name of the server's, such as 7, may occur inside other texts by chance.
        whole = self.chosen_by_server and len(self.name) < _LONG_NAME
        body = _replace_name(result.body, call, self.name, OUR_NAME, whole=whole)
        if body is result.body:
            return result
        length = str(len(body))
        headers = tuple((name, length if name.lower() == "content-length" else value) for name, value in result.headers)
        return ToolResult(result.status, result.media_type, body, headers)


def cookie_header(cookies: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the Cookie header for some cookies, or no header for none."""
    return [("cookie", "; ".join(f"{name}={value}" for name, value in cookies.items()))] if cookies else []


def parse_cookies(values: Iterable[str]) -> dict[str, str]:
    """Return the cookies of Cookie headers by name."""
    cookies = {}
    for value in values:
        for pair in value.split(";"):
            name, equals, content = pair.strip().partition("=")
            if equals:
                cookies[name] = content
    return cookies


def _set_cookies(header: str) -> dict[str, str]:
    try:
        return {name: morsel.coded_value for name, morsel in SimpleCookie(header).items()}
    except CookieError:
        return {}


def _replace_name(body: bytes, call: ToolCall, before: str, after: str, *, whole: bool = False) -> bytes:
    paths = call.arguments.get("bind", ())
    value = _parse(body) if paths else None
    if not isinstance(value, dict):
        return body
    changed = renamed(value, paths, before, after, whole=whole)
    return body if changed == value else orjson.dumps(changed)


def _parse(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
