"""Which sandbox starts next: a few start at once, because each takes a core, and the others wait for their turn."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Waiter:
    owner: int | None
    turn: asyncio.Future[None]
    since: float


class Starts:
    """Turns to start a sandbox. The next is of the start for which callers have waited longest, all of them together.

    So a call that eight rollouts wait for goes before one that came earlier and that one rollout waits for. None waits
    for ever: its own wait grows, while those that come later begin at nothing.
    """

    def __init__(self, most: int, callers: Callable[[int], int]) -> None:
        """Let `most` start at once. `callers` returns how many wait for what an owner's call does, itself included."""
        self._free, self._callers = most, callers
        self._waiters: list[_Waiter] = []

    @property
    def busy(self) -> bool:
        """Whether the next one has to wait."""
        return self._free == 0

    @asynccontextmanager
    async def turn(self, owner: int | None) -> AsyncIterator[None]:
        """Wait for a turn, which lasts for the block; the owner is the rollout that needs the sandbox, if one does."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(owner)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, owner: int | None) -> None:
        waiter = _Waiter(owner, asyncio.get_running_loop().create_future(), time.monotonic())
        self._waiters.append(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            else:
                # It had just got its turn.
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        now = time.monotonic()
        # The future of a caller that has been cancelled is done already.
        waiting = [waiter for waiter in self._waiters if not waiter.turn.done()]
        if not waiting:
            self._free += 1
            return
        following = max(waiting, key=lambda each: (now - each.since) * self._weight(each.owner))
        self._waiters.remove(following)
        following.turn.set_result(None)

    def _weight(self, owner: int | None) -> int:
        return 1 if owner is None else max(1, self._callers(owner))
