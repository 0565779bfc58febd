"""Refusals and problem-details responses: what every room of the proxy may raise or return as an error."""

from dataclasses import dataclass

import orjson

MEDIA_TYPE = "application/problem+json"


class RefusalError(Exception):
    """A request that cannot be served as it is: status, a slug that names the problem, and what to do."""

    code = 0
    """Of JSON-RPC, for dialects that speak it."""

    def __init__(self, status: int, slug: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.slug = status, slug


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem-details answer. infrastructure: counted as a failure of ours, under this kind.

    code: of JSON-RPC, where the dialect said one; 0 elsewhere.
    """

    status: int
    slug: str
    title: str
    detail: str
    retry_after_s: int | None = None
    infrastructure: bool = False
    code: int = 0

    def body(self) -> bytes:
        """Return the JSON of the answer."""
        value = {
            "type": f"urn:forkpoint:{self.slug}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        return orjson.dumps(value)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the answer, without its length."""
        headers = [(b"content-type", MEDIA_TYPE.encode()), (b"cache-status", b"forkpoint; fwd=miss; detail=error")]
        if self.status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="forkpoint"'))
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        return headers
