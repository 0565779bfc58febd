"""Heads of HTTP/1.1 messages: what a request to a tool server may contain, and which headers it passes on (pure).

A request head is built here from its parts. No part can smuggle a second request: the head has one framing and one
Host header, and no byte of a part can end a line.
"""

import re
from collections.abc import Iterable

from sandboxes.listener import Headers

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_TARGET = re.compile(r"/[\x21-\x7e]*")
_METHOD = re.compile(r"[A-Z][A-Z-]{0,31}")
HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "http2-settings",
})  # fmt: skip
"""Headers that concern one connection only (RFC 9110, 7.6.1). Headers named by `Connection` do so too."""
_OF_THE_ORIGIN = frozenset({
    "cache-status", "server-timing", "alt-svc", "clear-site-data", "nel", "origin-agent-cluster", "report-to",
    "reporting-endpoints", "service-worker-allowed", "strict-transport-security",
})  # fmt: skip
"""Headers with which a response speaks for its whole origin, or for the proxy. A tool server is neither."""
_OUR_PREFIXES = ("x-forkpoint-", "access-control-")
_SET_BY_REQUEST_HEAD = frozenset({"host", "content-length", "expect"})
"""Headers that `request_head` writes itself, or never sends."""


class InvalidRequestError(ValueError):
    """A part of a request has characters that would make another request of it."""


def end_to_end(headers: Iterable[tuple[str, str]], *, without: frozenset[str] = frozenset()) -> Headers:
    """Return headers without the hop-by-hop ones and without the names in `without` (lower case)."""
    listed = list(headers)
    named = {
        token.strip().lower() for name, value in listed if name.lower() == "connection" for token in value.split(",")
    }
    dropped = HOP_BY_HOP | named | without
    return tuple((name, value) for name, value in listed if name.lower() not in dropped)


def of_tool_server(headers: Iterable[tuple[str, str]]) -> Headers:
    """Return the headers of a tool server's response that reach the client: none of the proxy's, and no broken one."""
    return tuple(
        (name, value) for name, value in end_to_end(headers, without=_OF_THE_ORIGIN)
        # No response can be sent with what is no header.
        if not name.lower().startswith(_OUR_PREFIXES) and is_header(name, value)
    )  # fmt: skip


def is_header(name: str, value: str) -> bool:
    """Return whether a header has only characters that a header may have."""
    return _NAME.fullmatch(name) is not None and _VALUE.fullmatch(value) is not None


def request_head(method: str, target: str, headers: Iterable[tuple[str, str]], host: str, length: int) -> bytes:
    """Return the head of a request, up to and including the blank line."""
    # Hop-by-hop headers and `_SET_BY_REQUEST_HEAD` are left out of the client's. A part with characters that are not
    # allowed there is an `InvalidRequestError`.
    if _METHOD.fullmatch(method) is None:
        raise InvalidRequestError(f"{method[:40]!r} is not a method")
    if _TARGET.fullmatch(target) is None:
        raise InvalidRequestError("the target is not a path: it begins with / and has no spaces or control characters")
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
    for name, value in end_to_end(headers, without=_SET_BY_REQUEST_HEAD):
        if not is_header(name, value):
            raise InvalidRequestError(f"header {name[:40]!r} has characters that a header must not have")
        lines.append(f"{name}: {value}")
    if length or method in ("POST", "PUT", "PATCH"):
        lines.append(f"Content-Length: {length}")
    lines += ["Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")
