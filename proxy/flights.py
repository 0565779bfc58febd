"""One flight per node and call: who comes second waits for the one execution that is under way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy.canonical import CallKey
from proxy.tree import Node


class Flights:
    """A lock per node and key, there only while somebody holds it or waits for it.

    Whoever gets the lock looks into the tree again: a leader that failed or was cancelled has left nothing there, and
    the next in line takes over.
    """

    def __init__(self) -> None:
        self._locks: dict[tuple[int, CallKey], tuple[asyncio.Lock, int]] = {}

    def __len__(self) -> int:
        return len(self._locks)

    @asynccontextmanager
    async def hold(self, node: Node, key: CallKey) -> AsyncIterator[None]:
        """Hold the flight of this call at this node."""
        name = (node.id, key)
        lock, holders = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = (lock, holders + 1)
        try:
            async with lock:
                yield
        finally:
            lock, holders = self._locks[name]
            if holders == 1:
                del self._locks[name]
            else:
                self._locks[name] = (lock, holders - 1)
