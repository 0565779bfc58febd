"""Refusals and problem-details responses: what every room of the proxy may raise or return as an error."""

from dataclasses import dataclass

import orjson

MEDIA_TYPE = "application/problem+json"


MARKS_HEADER = b"x-forkpoint-marks"
"""The header with the marks of a call (`sandboxes.calls.MARKS`); a response without marks lacks it."""
_BY_MACHINE = frozenset({"overloaded", "state-lost"})
"""Refusals of calls that another machine, or this one at another time, would have answered."""


class RefusalError(Exception):
    """A request that cannot be served as it is.

    Attributes:
        status: The HTTP status.
        slug: Names the problem in its type (`urn:forkpoint:{slug}`) and in metrics.
        code: The JSON-RPC error code, for dialects that speak JSON-RPC; 0 for others.

    The text says what was wrong with which value, and what to do.
    """

    code = 0

    def __init__(self, status: int, slug: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.slug = status, slug


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem details of one response (RFC 9457).

    Attributes:
        retry_after_s: When a retry makes sense, in seconds; None if it does not.
        infrastructure: Whether the proxy or its machine failed, and not the request.
        code: The JSON-RPC error code that a dialect chose; 0 for none.
    """

    status: int
    slug: str
    title: str
    detail: str
    retry_after_s: int | None = None
    infrastructure: bool = False
    code: int = 0

    @property
    def marks(self) -> list[tuple[bytes, bytes]]:
        """The header with the mark `machine`, for a failure that is not the agent's; else none."""
        is_machines = self.infrastructure or self.slug in _BY_MACHINE
        return [(MARKS_HEADER, b"machine")] if is_machines else []

    def body(self) -> bytes:
        """Return the JSON of the response."""
        value = {
            "type": f"urn:forkpoint:{self.slug}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        return orjson.dumps(value)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response, without its length."""
        headers = [(b"content-type", MEDIA_TYPE.encode()), (b"cache-status", b"forkpoint; fwd=miss; detail=error")]
        headers += self.marks
        if self.status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="forkpoint"'))
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        return headers
