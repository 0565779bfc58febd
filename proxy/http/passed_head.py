"""The head of a request that is passed on to another process of the same proxy or cluster (pure)."""

from collections.abc import Iterable

from proxy.http.asgi import Scope
from sandboxes.http_message import HOP_BY_HOP

PASSED = b"x-forkpoint-passed"
"""The header with what a member of a cluster says of a request that it passes on. Clients cannot set it."""
_OWN = frozenset({b"content-length", b"expect", PASSED}) | {name.encode() for name in HOP_BY_HOP}


def head_of(scope: Scope, length: int | None, more: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Return the head of a request, with more headers; a body without a length is sent in chunks."""
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    named = [value for name, value in scope["headers"] if name == b"connection"]
    dropped = _OWN | {token.strip().lower() for value in named for token in value.split(b",")}
    headers = [header for header in scope["headers"] if header[0] not in dropped]
    framing = (b"transfer-encoding", b"chunked") if length is None else (b"content-length", b"%d" % length)
    lines = [b"%b: %b" % header for header in (*headers, framing, *more)]
    return b"\r\n".join([b"%b %b HTTP/1.1" % (scope.get("method", "GET").encode(), target), *lines, b"", b""])
