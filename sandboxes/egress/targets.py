"""Targets: what a request of a program in a sandbox means, and whether the rules allow it (pure).

What is not clearly a request to an allowed host is refused, so that no server behind this one can read it otherwise.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sandboxes.listener import Headers
from sandboxes.server_spec import HOST_PATTERN, allows

HTTP_PORT, HTTPS_PORT = 80, 443
_URL = re.compile(r"http://([^/?#@\[\]\\\s]+)(/[\x21\x22\x24-\x7e]*)?", re.IGNORECASE)
"""Matches an absolute `http` URL without user and fragment."""
_HOST = re.compile(HOST_PATTERN)
_METHODS = frozenset({"GET", "HEAD"})
"""Methods that only read (RFC 9110, 9.2.1). A restore cannot bring back what other methods change elsewhere."""
_FORWARDED = frozenset({
    "accept", "accept-encoding", "accept-language", "authorization", "cache-control", "cookie", "if-match",
    "if-modified-since", "if-none-match", "if-range", "if-unmodified-since", "pragma", "range", "user-agent",
})  # fmt: skip
"""Request headers that an origin receives. Others say nothing about which response is wanted, or frame a body."""


class RefusedError(Exception):
    """The request is refused."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status  # The HTTP status of the response that says so.


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request leads."""

    host: str  # A DNS name in lower case.
    port: int
    path: str  # Path and query; empty for a tunnel.

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        return self.host if self.port == HTTP_PORT else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL, or host and port of a tunnel."""
        return f"http://{self.authority}{self.path}" if self.path else f"{self.host}:{self.port}"


def target_of(method: str, target: str, hosts: Sequence[str]) -> Target:
    """Return where a request leads: host and port for CONNECT, else a URL; `RefusedError` if that is not allowed."""
    if method == "CONNECT":
        destination, usual_port = Target(*_authority(target, None), ""), HTTPS_PORT
    else:
        if method not in _METHODS:
            raise RefusedError(405, f"only GET and HEAD are allowed, not {method[:20]}")
        parts = _URL.fullmatch(target)
        if parts is None:
            raise RefusedError(400, "the target is not an absolute http:// URL without user and fragment")
        destination, usual_port = Target(*_authority(parts[1], HTTP_PORT), parts[2] or "/"), HTTP_PORT
    if not any(allows(entry, destination.host, destination.port, usual_port) for entry in hosts):
        raise RefusedError(403, f"the task does not allow {destination.host}:{destination.port}")
    return destination


def _authority(text: str, usual_port: int | None) -> tuple[str, int]:
    name, _, port = text.lower().partition(":")
    # The pattern covers the port too; a bare name and a name with a colon and nothing after it are distinguished here.
    if _HOST.fullmatch(text.lower()) is None or name.startswith("*") or (not port and usual_port is None):
        raise RefusedError(403, "only hosts with a DNS name are allowed, as HOST or HOST:PORT")
    return name, int(port) if port else usual_port or 0


def forwarded(headers: Iterable[tuple[str, str]]) -> Headers:
    """Return the headers of a request that the origin receives, sorted: their order does not change the response."""
    return tuple(sorted((name.lower(), value) for name, value in headers if name.lower() in _FORWARDED))
