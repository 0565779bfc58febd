"""Protection from web pages of other sites: cross-site requests, DNS rebinding and content sniffing.

A browser says where a request comes from (`Sec-Fetch-Site`, `Origin`), and no page can change that. With DNS rebinding,
an attacker's host name is made to point at this machine, and only `Host` shows it. Only names that nobody can register
are therefore accepted, unless a setting names others or every request needs a token, which such a page cannot have.
"""

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from proxy.http.asgi import AsgiApp, AsgiMessage, Receive, ReceivedHeaders, Scope, Send
from proxy.http.problems import problem_of
from proxy.http.responses import send_problem
from proxy.refusals import RefusalError

_PRIVATE_SUFFIXES = (".localhost", ".internal", ".local", ".test", ".home.arpa", ".lan")
"""Domains that nobody can register (RFC 6761, RFC 6762, RFC 8375, and ICANN's list of names in private use)."""
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~-]*)(?::[0-9]{0,5})?")
"""A Host header: a name, an IPv4 address or an IPv6 address in brackets, and a port. It may be empty."""
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_OWN_SITES = frozenset({b"same-origin", b"none"})
"""Values of `Sec-Fetch-Site` for a page of this proxy, and for a request that the user made without a page."""
_NOSNIFF = (b"x-content-type-options", b"nosniff")
BROWSERS = frozenset({b"sec-fetch-site", b"sec-fetch-dest", b"origin"})
"""Headers that browsers send and agents do not."""


class BrowserGuard:
    """Middleware before the control plane: refuses foreign requests, forbids sniffing; None allows any name."""

    def __init__(self, behind: AsgiApp, names: Collection[str] | None) -> None:
        self._behind, self._names = behind, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] not in ("http", "websocket"):
            await self._behind(scope, receive, send)
            return
        try:
            # A WebSocket is not a link that could be followed, so it counts as an unsafe method.
            method = scope["method"] if scope["type"] == "http" else "POST"
            refuse_foreign(method, scope["headers"], tool=False, names=self._names)
        except RefusalError as refusal:
            await send_problem(scope, receive, send, problem_of(refusal))
            return
        await self._behind(scope, receive, _without_sniffing(send))


def _without_sniffing(send: Send) -> Send:
    async def sending(message: AsgiMessage) -> None:
        if message["type"] == "http.response.start" and _NOSNIFF not in message["headers"]:
            message = {**message, "headers": [*message["headers"], _NOSNIFF]}
        await send(message)

    return sending


def refuse_foreign(method: str, headers: ReceivedHeaders, *, tool: bool, names: Collection[str] | None = ()) -> None:
    """Refuse a request of another site's page, and a request to a host name that its owner may have pointed here.

    A link from another site may be followed to the control plane by a safe method. A browser may not even show a tool's
    response, because it would run as a page of this origin. Raises RefusalError: 403; 400 for a malformed Host header.
    """
    host = site = origin = mode = dest = b""
    for name, value in headers:
        if name == b"host":
            host = value
        elif name == b"sec-fetch-site":
            site = value
        elif name == b"origin":
            origin = value
        elif name == b"sec-fetch-mode":
            mode = value
        elif name == b"sec-fetch-dest":
            dest = value
    _require_host([value for name, value in headers if name == b"host"], names)
    if tool and dest not in (b"", b"empty"):
        raise RefusalError(
            403,
            "browser",
            "tool endpoints do not answer browsers: a tool's output would run as a page of this origin. Open /ui "
            "instead.",
        )
    is_link = mode == b"navigate" and dest == b"document" and method in _SAFE_METHODS and not tool
    # Old browsers send only `Origin`, which must then be the host that the request is for.
    foreign = site not in _OWN_SITES if site else bool(origin) and not _is_origin_of(origin, host)
    if foreign and not is_link:
        raise RefusalError(
            403, "cross-site", "the request comes from a page of another site. Only /ui of this proxy may send it."
        )


def _require_host(hosts: list[bytes], names: Collection[str] | None) -> None:
    """Require one Host header with a name of this proxy. Raises RefusalError: 400 if malformed, 403 if foreign."""
    # HTTP/1.0 may send none.
    if len(hosts) > 1 or _HOST.fullmatch(b"".join(hosts)) is None:
        # A reader of one of them, or of a part of it, would see another name than this check (RFC 9112, 3.2).
        raise RefusalError(400, "host", "the request needs one Host header, with a name or an address and a port.")
    host = b"".join(hosts).decode("latin-1")
    if names is not None and rebindable(host) and _name(host) not in names:
        raise RefusalError(
            403,
            "host",
            f"{host!r} is not a name of this proxy. Use its IP address or localhost, or add the name to the setting "
            "`names`.",
        )


def _is_origin_of(origin: bytes, host: bytes) -> bool:
    """Return whether an Origin header (RFC 6454, 6.2) names the host that a request is for."""
    try:
        parts = urlsplit(origin.decode("ascii"))
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https") and parts.netloc.encode().lower() == host.lower()
        and not (parts.path or parts.query or parts.fragment)
    )  # fmt: skip


def rebindable(host: str) -> bool:
    """Return whether a Host header holds a name that its owner can point to any address."""
    name = _name(host)
    # A name without a dot, or in a private domain, cannot be registered. HTTP/1.0 may send no name at all.
    if not name or "." not in name or name.endswith(_PRIVATE_SUFFIXES):
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return True
    return False


def _name(host: str) -> str:
    host = host.lower().rstrip(".")
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")
