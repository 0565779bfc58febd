"""Listeners: they receive a tool server's answer while it is still arriving."""

from typing import Protocol, runtime_checkable

Headers = tuple[tuple[str, str], ...]
"""In their order and spelling, latin-1."""


class Listener(Protocol):
    """Hears an answer while it comes."""

    async def head(self, status: int, headers: Headers) -> None: ...
    async def data(self, chunk: bytes) -> None: ...


@runtime_checkable
class Cancellable(Listener, Protocol):
    """One whose client may want no answer any more, and wants the server to know."""

    async def cancelled(self) -> None:
        """Return once it is so."""
        ...


@runtime_checkable
class Detachable(Listener, Protocol):
    """A listener whose call may be detached: the process that the call started then continues in the background."""

    async def detached(self) -> None:
        """Return once the call is to be detached."""
        ...
