"""Requests to servers outside the sandboxes, each over its own connection: bytes behind a response answer no other."""

import functools
import ssl
from collections.abc import AsyncIterator, Iterable
from urllib.parse import urlsplit

from sandboxes.http_message import request_head
from sandboxes.lean_imports import without
from sandboxes.listener import Listener
from sandboxes.tool_clients.http1 import connect, converse

with without("pygments"):
    import httpx

CONNECT_S = 10.0
"""Longest time to connect to a server."""


class UnreachableError(OSError):
    """No connection to the server could be made."""


async def send(
    base_url: str,
    method: str,
    target: str,
    headers: Iterable[tuple[str, str]],
    body: bytes | AsyncIterator[bytes],
    length: int,
    listener: Listener,
    *,
    silence_s: float,
) -> None:
    """Send a request and pass its response to the listener.

    `target` is the path below the base URL, with its query. Framing and `Host` are added to the headers. `silence_s` is
    the longest time until the head of the response, and between two pieces of its body. Raises InvalidRequestError,
    UnreachableError, MalformedResponseError, TimeoutError, or OSError if the connection broke.
    """
    base = urlsplit(base_url)
    head = request_head(method, base.path.rstrip("/") + target, headers, base.netloc.rpartition("@")[2], length)
    context = _tls_context() if base.scheme == "https" else None
    port = base.port or (80 if context is None else 443)
    try:
        connection = await connect(str(base.hostname), port, context, within_s=min(CONNECT_S, silence_s))
    except TimeoutError:
        raise
    except OSError as error:
        raise UnreachableError(str(error) or type(error).__name__) from error
    await converse(connection, head, body, listener, silence_s=silence_s)


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """Return the context of connections to https servers, which trusts the authorities that HTTPX trusts."""
    context = httpx.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
