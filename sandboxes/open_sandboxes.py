"""The open sandboxes of a driver, and the parts of states that a collection must keep for them."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, Protocol, TypeVar

Holding = Callable[[tuple[str, ...]], AbstractContextManager[None]]
"""Keeps parts from being collected; see `OpenSandboxes.holding`."""


class PartUser(Protocol):
    """A sandbox that needs parts of states on the disk for as long as it is open."""

    @property
    def closed(self) -> bool:
        """Whether the sandbox needs nothing any more."""
        ...

    @property
    def parts(self) -> Iterable[str]:
        """The parts that the sandbox needs; they change while it works."""
        ...

    async def close(self) -> None:
        """End the sandbox. Idempotent."""
        ...


SandboxT = TypeVar("SandboxT", bound=PartUser)


class OpenSandboxes(Generic[SandboxT]):
    """The sandboxes of one driver that are not closed yet; dead ones included."""

    def __init__(self) -> None:
        self._sandboxes: list[SandboxT] = []
        # A list, not a set: two restores may hold the same parts, and each releases its own entry.
        self._held: list[Iterable[str]] = []

    def __iter__(self) -> Iterator[SandboxT]:
        """Iterate over a copy, so that sandboxes may start and close meanwhile."""
        self._sandboxes = [sandbox for sandbox in self._sandboxes if not sandbox.closed]
        return iter(self._sandboxes[:])

    def add(self, sandbox: SandboxT) -> None:
        """Add a sandbox, which leaves by itself once it is closed."""
        self._sandboxes = [*self, sandbox]

    @contextmanager
    def holding(self, parts: Iterable[str]) -> Iterator[None]:
        """Keep parts in use while no open sandbox names them yet, as during a restore."""
        self._held.append(parts)
        try:
            yield
        finally:
            # By now a sandbox names them, or its start has failed and it needs them no more.
            self._held.remove(parts)

    def parts_in_use(self) -> set[str]:
        """Return the parts that open sandboxes or `holding` need at this moment."""
        return {part for parts in (*(sandbox.parts for sandbox in self), *self._held) for part in parts}

    async def close(self) -> None:
        """Close all sandboxes."""
        await asyncio.gather(*(sandbox.close() for sandbox in self))
