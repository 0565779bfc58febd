"""Connections whose next request another process of this proxy answers; see `proxy.workers`."""

import socket
from contextlib import suppress
from typing import Protocol

import httptools

from proxy.dataplane.request_reader import END_OF_HEAD, RequestReader
from proxy.http.asgi import Scope


class Handover(Protocol):
    """Brings connections to other processes of this proxy."""

    def elsewhere(self, scope: Scope) -> int | None:
        """Return the number of the process that must answer a request; None for this one."""
        ...

    def give(self, process: int, connection: socket.socket, held: bytes) -> None:
        """Give a connection to another process.

        Args:
            process: Number of the process.
            connection: The connection; this object closes it.
            held: What its client has sent and got no answer to.
        """
        ...


def first_scope(held: bytes, scheme: str) -> Scope | None:
    """Return the scope of the first of several requests that came together (pipelining).

    Args:
        held: The bytes of the requests.
        scheme: `http` or `https`.

    Returns:
        None for bytes that are not HTTP, or a target that only uvicorn interprets.
    """
    first = RequestReader()
    with suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
        first.feed(held.partition(END_OF_HEAD)[0] + END_OF_HEAD)
    return first.scope(scheme) if first.has_head else None
