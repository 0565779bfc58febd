"""Requests that another process may answer at once: what a connection and the one that passes them on promise."""

import asyncio
from typing import Protocol

from proxy.http.asgi import Scope

PASSED = "forkpoint.passed"
"""Member of a scope with the `PassedRequest` that it continues, if another process has the request already."""


class WaitingConnection(Protocol):
    """A connection whose only request another process has. It gets one of two calls, unless it is lost before."""

    def answered(self, response: bytes) -> None:
        """Write the whole response."""
        ...

    def declined(self) -> None:
        """Let the application have the request: it has no answer at once. Its scope gets the passed request."""
        ...


class PassedRequest(Protocol):
    """A request that another process has."""

    def lose(self) -> None:
        """Note that the client has hung up."""
        ...

    def release(self) -> None:
        """Note that the application has returned, or never will be called. Idempotent."""
        ...


class Passing(Protocol):
    """Passes requests on."""

    def begin(
        self, scope: Scope, request: bytes, body: bytes | bytearray, connection: WaitingConnection
    ) -> PassedRequest | None:
        """Pass a request on, or return None: then it stays here.

        `scope` is the one that `DataPlane.known` had and did not answer; `request` are the bytes of the whole request.
        The connection gets the response after this call has returned.
        """
        ...


class HeldBehind:
    """What a client sends on a connection whose request another process has, before it has the answer."""

    def __init__(self, transport: asyncio.Transport, max_bytes: int) -> None:
        """Hold nothing yet. With more than `max_bytes`, the connection is not read until the answer is there."""
        self._transport, self._max_bytes = transport, max_bytes
        self._data, self._is_full = b"", False

    def add(self, data: bytes) -> None:
        """Hold more bytes."""
        self._data += data
        # Held bytes cost memory; those that the client keeps cost it nothing here.
        if len(self._data) > self._max_bytes and not self._is_full:
            self._is_full = True
            self._transport.pause_reading()

    def take(self) -> bytes:
        """Return the bytes, and let the connection be read again."""
        data, self._data = self._data, b""
        # A connection that is closing is not read any more.
        if self._is_full and not self._transport.is_closing():
            self._is_full = False
            self._transport.resume_reading()
        return data
