"""Connections whose next request another process of this proxy answers; see `proxy.workers`."""

import asyncio
import os
import socket
from contextlib import suppress
from typing import Protocol

import httptools

from proxy.dataplane.request_reader import END_OF_HEAD, RequestReader
from proxy.http.asgi import Scope

_DRAIN_S = 0.01
"""Interval at which a connection that is given away is checked for bytes that its client has not taken, in seconds."""


class Handover(Protocol):
    """Brings connections to other processes of this proxy."""

    def elsewhere(self, scope: Scope) -> int | None:
        """Return the number of the process that must answer a request; None for this one."""
        ...

    def give(self, process: int, connection: socket.socket, held: bytes) -> None:
        """Give a connection to another process with the unanswered bytes of its client; this object closes it."""
        ...


def first_scope(held: bytes, scheme: str) -> Scope | None:
    """Return the scope of the first pipelined request; None for bytes or a target that only uvicorn interprets."""
    first = RequestReader()
    with suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
        first.feed(held.partition(END_OF_HEAD)[0] + END_OF_HEAD)
    return first.scope(scheme) if first.has_head else None


def give_when_sent(handover: Handover, process: int, transport: asyncio.Transport, held: bytes) -> None:
    """Give a connection that nothing reads any more, once its client took what was sent, unless it closes."""
    if transport.is_closing():
        return
    transport.pause_reading()
    if transport.get_write_buffer_size():
        loop = asyncio.get_running_loop()
        loop.call_later(_DRAIN_S, give_when_sent, handover, process, transport, held)
        return
    own: socket.socket = transport.get_extra_info("socket")
    # A descriptor of its own: the transport closes the other one, and the connection stays.
    handover.give(process, socket.socket(fileno=os.dup(own.fileno())), held)
    transport.abort()
