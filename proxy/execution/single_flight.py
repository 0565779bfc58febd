"""Single flight: identical calls at one node share one execution.

The first rollout that gets the flight's lock executes the call; the others then find the record in the tree. If the
first one fails, it leaves no record, and the next one executes. If its record is private (it ran out of time, for
example), the others execute the call side by side, or a group would wait for one timeout after the other.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from proxy.tree.keys import CallKey
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Node


@dataclass(slots=True, eq=False)
class Flight:
    """One in-flight call."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # Held by the rollout that executes the call.
    # Set when a waiting client sends its next request; the process may then continue in the background.
    detach: asyncio.Event = field(default_factory=asyncio.Event)
    apart: bool = False  # Whether an execution was private, so that each rollout executes the call by itself.
    holders: int = 0  # Number of rollouts that wait for the call.

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until it is this rollout's turn to execute the call. The turn lasts for the block."""
        async with self.lock:
            if not self.apart:
                yield
                return
        yield


class SingleFlight:
    """The in-flight calls by node and key, and by the rollouts that wait for them. Calls that ended are forgotten."""

    def __init__(self) -> None:
        self._flights: dict[tuple[int, CallKey], Flight] = {}
        self._by_rollout: dict[int, Flight] = {}
        self._closing = False

    def __len__(self) -> int:
        return len(self._flights)

    @contextmanager
    def join(self, rollout: Rollout, node: Node, key: CallKey) -> Iterator[Flight]:
        """Yield the flight of a call at a node. A rollout is in one flight at a time."""
        # By node and key: the same call at another node finds another state and is another execution.
        flight = self._flights.setdefault((node.id, key), Flight())
        flight.holders += 1
        # The server is stopping: a call that begins now must not hold the shutdown up either.
        if self._closing:
            flight.detach.set()
        self._by_rollout[rollout.id] = flight
        try:
            yield flight
        finally:
            # A rollout's calls run one at a time, so the entry is this flight's own.
            del self._by_rollout[rollout.id]
            flight.holders -= 1
            # No rollout waits any more, so the next identical call begins a flight of its own.
            if not flight.holders:
                del self._flights[node.id, key]

    def callers(self, rollout: int) -> int:
        """Return how many rollouts wait for the call that a rollout makes, itself included; 0 if it makes none."""
        flight = self._by_rollout.get(rollout)
        return 0 if flight is None else flight.holders

    def detach(self, rollout: Rollout) -> None:
        """Let the process of the rollout's in-flight call continue in the background."""
        flight = self._by_rollout.get(rollout.id)
        if flight is not None:
            flight.detach.set()

    def detach_all(self) -> None:
        """Let the processes of all calls, of later ones too, continue in the background."""
        # Later calls join after this loop, so `join` looks at the flag.
        self._closing = True
        for flight in self._by_rollout.values():
            flight.detach.set()
