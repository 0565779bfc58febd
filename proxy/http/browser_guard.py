"""Which requests a web page of somebody else makes, or may have made: they steer nothing here (pure).

A browser says where a request comes from (`Sec-Fetch-Site`, `Origin`); no page can change that. Agents' clients say
nothing of the kind. A page whose own name was made to lead here (DNS rebinding) looks like one of ours but for the name
it asks under, so only names that nobody can buy are answered to, unless a setting or a token says otherwise.
"""

import ipaddress
from collections.abc import Collection

from proxy.http.asgi import ReceivedHeaders
from proxy.refusals import RefusalError

_PRIVATE_SUFFIXES = (".localhost", ".internal", ".local", ".test", ".home.arpa", ".lan")
_SAFE = frozenset({"GET", "HEAD"})
_OURS = frozenset({b"same-origin", b"none"})


BROWSERS = frozenset({b"sec-fetch-site", b"sec-fetch-dest", b"origin"})
"""Headers by which a browser is known, and no agent."""


def refuse_foreign(method: str, headers: ReceivedHeaders, *, tool: bool, names: Collection[str] | None = ()) -> None:
    """Refuse what another site's page sends, and what leads here by a name that its owner may have pointed here.

    tool: the request is for a tool; then a browser may not even show the answer, which is a tool's to write, and would
    run as a page of ours. Elsewhere a link from another site may be followed. names: under which the proxy is known;
    None where a token is asked for, which no page that was led here has.

    Raises:
        Refused: 403.
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
    if names is not None and rebindable(host.decode("latin-1")) and _name(host.decode("latin-1")) not in names:
        raise RefusalError(
            403,
            "host",
            f"this proxy is not known as {host.decode('latin-1')!r}. Ask by its address or as localhost, or add the "
            "name to the setting `names`.",
        )
    if tool and dest not in (b"", b"empty"):
        raise RefusalError(
            403, "browser", "tools answer agents, not browsers: what a tool wrote would run as our page."
        )
    followed = mode == b"navigate" and dest == b"document" and method in _SAFE and not tool
    foreign = site not in _OURS if site else bool(origin) and origin.rpartition(b"//")[2].lower() != host.lower()
    if foreign and not followed:
        raise RefusalError(
            403, "cross-site", "a page of another site asked. Only /ui of this proxy may, or no page at all."
        )


def rebindable(host: str) -> bool:
    """Say whether a Host header holds a name that somebody may own and point anywhere."""
    name = _name(host)
    if not name or "." not in name or name.endswith(_PRIVATE_SUFFIXES):
        # Of one word, or of a domain that nobody can register; an empty one is HTTP/1.0's.
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return True
    return False


def _name(host: str) -> str:
    """Return the name or address of a Host header, without its port."""
    host = host.lower().rstrip(".")
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")
