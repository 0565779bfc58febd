"""Slots that all sandboxes share, of which no sandbox and no environment can take the last ones.

Theory of operation. A sandbox gets a slot while it holds fewer than the free ones less those of its environment. So one
sandbox gets a third of all slots, the sandboxes of one environment get half of them, and each further environment
finds as many free as the others hold (Choudhury and Hahne, Dynamic queue length thresholds, 1998, with a factor of 1).
"""

import asyncio
from collections import Counter, deque
from typing import NamedTuple


class Requester(NamedTuple):
    """Whose request it is."""

    sandbox: str  # The sandbox's ID.
    scope: str  # Names the environment whose recordings are meant: sandboxes of one spec share it.


class FairSlots:
    """A number of slots. Requesters wait for one; a slot that is given back goes to the first that may have it."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._of_sandbox: Counter[str] = Counter()
        self._of_scope: Counter[str] = Counter()
        self._waiting: deque[tuple[Requester, asyncio.Future[None]]] = deque()

    async def take(self, requester: Requester) -> None:
        """Wait for a slot, which `give_back` returns."""
        if self._may(requester):
            self._hold(requester)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = requester, granted
        self._waiting.append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give_back(requester)
            else:
                self._waiting.remove(entry)
            raise

    def give_back(self, requester: Requester) -> None:
        """Return a slot of a requester. O(waiting)."""
        self._free += 1
        for held, name in ((self._of_sandbox, requester.sandbox), (self._of_scope, requester.scope)):
            held[name] -= 1
            if not held[name]:
                del held[name]
        for entry in tuple(self._waiting):
            if self._may(entry[0]) and not entry[1].done():
                self._waiting.remove(entry)
                self._hold(entry[0])
                entry[1].set_result(None)

    def _may(self, requester: Requester) -> bool:
        return self._of_sandbox[requester.sandbox] < self._free - self._of_scope[requester.scope]

    def _hold(self, requester: Requester) -> None:
        self._free -= 1
        self._of_sandbox[requester.sandbox] += 1
        self._of_scope[requester.scope] += 1
