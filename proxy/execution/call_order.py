"""The order of a rollout's calls: one at a time as they arrive, except that commuting calls have a canonical order.

An agent that uploads its files all at once sends them in an order that differs from run to run, but any order reaches
the same state. Commuting calls that wait at the same time therefore take their turns in an order that all rollouts
share (`_await_canonical_turn`): known calls first, then, after `WINDOW_S`, the smallest key. A call that does not
commute waits until no commuting call is left, then takes its turn in the order of arrival.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from proxy.tree.keys import CallKey
from proxy.tree.rollout import Rollout

WINDOW_S = 0.05
"""How long a commuting call that the tree does not know waits for one that it knows. Covers the spread of uploads that
a client sends at once, on one machine; each new upload of a group takes so much longer."""


@dataclass(slots=True, eq=False)
class _Queue:
    """The calls of one rollout that wait or run."""

    # Held by the call that has its turn. asyncio's locks are first come, first served.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    commuting: list[CallKey] = field(default_factory=list)  # Keys of the commuting calls that wait or run.
    # Set, and replaced by a new event, whenever a commuting call has ended.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    holders: int = 0  # Number of calls that use this queue; the last one removes it.


class CallOrder:
    """Gives the calls of each rollout their turns. A rollout without calls in flight costs no memory here."""

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}

    def busy(self, rollout: Rollout, *, but_for: int = 0) -> bool:
        """Return whether a call of the rollout waits or runs, apart from `but_for` of them."""
        queue = self._queues.get(rollout.id)
        return queue is not None and queue.holders > but_for

    def expect(self, rollout: Rollout) -> None:
        """Note that a request of the rollout was read, which may become a call. `expected` must follow."""
        self._join(rollout)

    def expected(self, rollout: Rollout) -> None:
        """Note that an expected request has been handled, whatever became of it."""
        self._leave(rollout)

    def arrive(self, rollout: Rollout) -> None:
        """Note that a call of the rollout has arrived. Its `turn` must follow."""
        # Only the oldest unanswered call sets this: the time that later calls wait is the proxy's, not the agent's
        # thinking.
        rollout.requested_at = rollout.requested_at or time.monotonic()
        rollout.waiting += 1
        # Joined before the turn begins, so that `busy` is true from the arrival on and no hit can overtake this
        # call.
        self._join(rollout)

    def begin_turn(self, rollout: Rollout) -> None:
        """Take the turn of a call that has just arrived, for a rollout that is not busy. `end_turn` must follow."""
        self.arrive(rollout)
        # A lock that no task holds is acquired without a wait.
        with suppress(StopIteration):
            self._queues[rollout.id].lock.acquire().send(None)

    def end_turn(self, rollout: Rollout) -> None:
        """Let the next call of a rollout have its turn."""
        self._queues[rollout.id].lock.release()
        rollout.waiting -= 1
        self._leave(rollout)

    @asynccontextmanager
    async def turn(self, rollout: Rollout, key: CallKey, *, commutes: bool) -> AsyncIterator[None]:
        """Wait for the turn of a call that has arrived, and hold it for the block."""
        queue = self._queues[rollout.id]
        try:
            if commutes:
                queue.commuting.append(key)
                # The call is among the commuting ones while it runs, so calls that do not commute wait for its end
                # as well.
                await self._await_canonical_turn(queue, rollout, key)
            else:
                while queue.commuting:
                    # A loop, because several commuting calls may be waiting; `changed` is a new event after each of
                    # them.
                    await queue.changed.wait()
            async with queue.lock:
                yield
        finally:
            # In `finally`: a call that is cancelled while it waits must not block the calls behind it.
            rollout.waiting -= 1
            if commutes:
                queue.commuting.remove(key)
                queue.changed.set()
                # The set event stays set for the calls that wait now; calls that come later wait for the next
                # change.
                queue.changed = asyncio.Event()
            self._leave(rollout)

    @asynccontextmanager
    async def hold(self, rollout: Rollout) -> AsyncIterator[None]:
        """Wait for the call that has its turn, and let no other call of the rollout run inside the block."""
        # No `arrive`: an end or an audit is no call, so it must not count as waiting.
        queue = self._join(rollout)
        try:
            async with queue.lock:
                yield
        finally:
            self._leave(rollout)

    def _join(self, rollout: Rollout) -> _Queue:
        # No await between the look-up and the count, so no other call can remove the queue in between.
        queue = self._queues.setdefault(rollout.id, _Queue())
        queue.holders += 1
        return queue

    def _leave(self, rollout: Rollout) -> None:
        queue = self._queues[rollout.id]
        queue.holders -= 1
        # The last call removes the queue, so `busy` is one look-up and finished rollouts leave nothing behind.
        if not queue.holders:
            del self._queues[rollout.id]

    async def _await_canonical_turn(self, queue: _Queue, rollout: Rollout, key: CallKey) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + WINDOW_S
        # Looked up again after each wait: another call may have moved the rollout to a node that knows this one.
        # 1. A call that the tree knows goes first, in the order of `lock`.
        while rollout.tree.record(rollout.node, key) is None:
            known = any(rollout.tree.record(rollout.node, other) is not None for other in queue.commuting)
            # Read once: between two looks the window may end, and nothing would end the wait.
            remaining_s = until - loop.time()
            # 3. No waiting call is known: the smallest key goes first, so that the order recorded here is
            # canonical.
            if remaining_s <= 0 and not known and key == min(queue.commuting):
                return
            # 2. Within the window a known call may still arrive. After it, only the end of another call can change
            # anything.
            try:
                async with asyncio.timeout(remaining_s if remaining_s > 0 else None):
                    await queue.changed.wait()
            except TimeoutError:
                continue
