"""Listeners: they receive a tool server's response while it is still arriving."""

from typing import Protocol, runtime_checkable

Headers = tuple[tuple[str, str], ...]
"""Names and values of headers in their order and spelling, decoded as latin-1."""


class Listener(Protocol):
    """Receives a response while it arrives. Methods do not raise: a client that left is no failure of the server."""

    async def head(self, status: int, headers: Headers) -> None:
        """Receive the status and the headers, once and first."""
        ...

    async def data(self, chunk: bytes) -> None:
        """Receive the next piece of the body."""
        ...


@runtime_checkable
class Cancellable(Listener, Protocol):
    """A listener whose client may cancel the call, so that the server learns of it."""

    async def cancelled(self) -> None:
        """Return once the client has cancelled."""
        ...


@runtime_checkable
class Leaving(Listener, Protocol):
    """A listener whose client may leave before the response has ended."""

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        ...


@runtime_checkable
class Detachable(Listener, Protocol):
    """A listener whose call may be detached: the process that the call started then continues in the background."""

    async def detached(self) -> None:
        """Return once the call is to be detached."""
        ...
