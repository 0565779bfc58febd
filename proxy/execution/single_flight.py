"""One flight per node and call: who comes second waits for the one execution that is under way."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from proxy.tree.keys import CallKey
from proxy.tree.tree import Node


@dataclass(slots=True, eq=False)
class Flight:
    """One. left: set once somebody who waits for it has more to ask: what it runs may be left running."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    holders: int = 0


class Flights:
    """A lock per node and key, there only while somebody holds it or waits for it.

    Whoever gets the lock looks into the tree again: a leader that failed or was cancelled has left nothing there, and
    the next in line takes over.
    """

    def __init__(self) -> None:
        self._flights: dict[tuple[int, CallKey], Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    @contextmanager
    def join(self, node: Node, key: CallKey) -> Iterator[Flight]:
        """Be one of those who wait for this call at this node, or lead; who leads holds its lock."""
        name = (node.id, key)
        flight = self._flights.setdefault(name, Flight())
        flight.holders += 1
        try:
            yield flight
        finally:
            flight.holders -= 1
            if not flight.holders:
                del self._flights[name]

    def leave(self, node: Node, key: CallKey) -> None:
        """Note that somebody who waits for this call has more to ask."""
        flight = self._flights.get((node.id, key))
        if flight is not None:
            flight.left.set()
