"""The pool: leases on live sandboxes, within a budget."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager

from sandboxes.driver import Sandbox
from sandboxes.pool.lifecycle import LifecycleEvent, SandboxState
from sandboxes.pool.roster import Roster, Slot


class OverloadedError(RuntimeError):
    """Every sandbox that the budget allows is at work, and none became free in time. Try again later."""


class Pool:
    """Owns every live sandbox from its start to its close.

    budget: how many may live at once. patience_s: how long a caller waits for one of them before `OverloadedError`.
    starts: how many may be starting at the same time.
    """

    def __init__(self, *, budget: int, patience_s: float, starts: int = 4) -> None:
        self.roster = Roster()
        self._budget, self._patience_s = budget, patience_s
        self._changed = asyncio.Condition()
        self._starts = asyncio.Semaphore(starts)
        self._closing = 0
        self.waiting = 0

    async def start(self, make: Callable[[], Awaitable[Sandbox]], place: Hashable, owner: int | None) -> Slot:
        """Make a sandbox that stands at place and lease it to owner; give up an idle one where the budget asks for it.

        Raises:
            Overloaded: no room within the patience.
        """
        return await self._start(await self._room(owner), make, place)

    async def start_warm(self, make: Callable[[], Awaitable[Sandbox]], place: Hashable) -> Slot:
        """Make a sandbox ahead of its use. Nobody waits for it or gives way: it takes no place that another may need.

        Raises:
            Overloaded: fewer than two places are free, or all that may start at once are starting.
        """
        if not self.has_spare_room:
            raise OverloadedError("no place is free for a warm fork.")
        slot = Slot(None, warm=True)
        self.roster.enter(slot)
        return await self._start(slot, make, place)

    @property
    def has_spare_room(self) -> bool:
        """Say whether a sandbox may be made ahead: a place must stay free for who comes meanwhile."""
        return len(self.roster) + self._closing + 1 < self._budget and not self._starts.locked()

    async def _start(self, slot: Slot, make: Callable[[], Awaitable[Sandbox]], place: Hashable) -> Slot:
        try:
            async with self._starts:
                slot.sandbox = await make()
        except BaseException:
            await self.close(slot)
            raise
        slot.started_at = slot.used_at = time.monotonic()
        self.roster.stand(slot, place)
        self.roster.happen(slot, LifecycleEvent.STARTED)
        return slot

    async def take(self, slot: Slot, place: Hashable, owner: int | None) -> bool:
        """Lease a slot that `roster.standing` named; False where it froze (after waiting for that) or went away.

        What may be taken, and what is cheapest, can have changed meanwhile: ask the roster again.
        """
        if slot.state is SandboxState.FREEZING:
            slot.hurry.set()
            async with self._changed:
                await self._changed.wait_for(lambda: slot.state is not SandboxState.FREEZING)
            return False
        if (
            slot.state is not SandboxState.IDLE
            or slot.place is not place
            or slot.sandbox is None
            or not slot.sandbox.alive
        ):
            return False
        self.roster.happen(slot, LifecycleEvent.LEASE)
        slot.owner, slot.warm = owner, False
        return True

    async def release(self, slot: Slot) -> None:
        """Give a leased sandbox back; where it stands was noted by `roster.stand`."""
        slot.used_at = time.monotonic()
        self.roster.happen(slot, LifecycleEvent.RELEASE)
        await self._notify()

    def hold_still(self, slot: Slot) -> None:
        """Turn a lease into a freeze without a moment between; `freezing` must follow."""
        slot.used_at = time.monotonic()
        slot.hurry.clear()
        self.roster.happen(slot, LifecycleEvent.FREEZE)

    @asynccontextmanager
    async def freezing(self, slot: Slot, *, after_s: float = 0.0) -> AsyncIterator[Sandbox]:
        """Give the sandbox that is held still, then give it back. It is closed where the freeze fails.

        after_s: seconds to wait before, unless somebody wants the sandbox, or its place, meanwhile.
        """
        assert slot.sandbox is not None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    await slot.hurry.wait()
            yield slot.sandbox
        except BaseException:
            await self.close(slot)
            raise
        self.roster.happen(slot, LifecycleEvent.FROZEN)
        await self._notify()

    async def close(self, slot: Slot) -> None:
        """Close a sandbox, whatever it is doing. Runs to its end even when the caller is cancelled."""
        if slot.state is SandboxState.CLOSED:
            return
        self.roster.happen(slot, LifecycleEvent.CLOSE)
        # It lives until it has ended: the budget holds for the machine, not for the roster.
        self._closing += 1
        closing = asyncio.ensure_future(self._close(slot))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait([closing])
            raise

    def hurry(self) -> None:
        """Let no freeze be put off any longer."""
        for slot in self.roster.slots:
            slot.hurry.set()

    async def disown(self, owner: int) -> None:
        """Let everyone have what owner leaves behind."""
        for slot in self.roster.slots:
            if slot.owner == owner:
                slot.owner = None

    async def close_where(self, unwanted: Callable[[Slot], bool]) -> int:
        """Close the idle sandboxes that are unwanted; return how many."""
        found = [slot for slot in self.roster.slots if slot.state is SandboxState.IDLE and unwanted(slot)]
        for slot in found:
            if slot.state is SandboxState.IDLE:
                await self.close(slot)
        return len(found)

    async def close_victim(self) -> bool:
        """Close the idle sandbox that is missed least; False where none is idle."""
        victim = self.roster.victim()
        if victim is None:
            return False
        await self.close(victim)
        return True

    async def close_unused(self, idle_s: float) -> int:
        """Close what nobody has used for idle_s seconds, and what has died; return how many."""
        old = set(self.roster.unused_since(time.monotonic() - idle_s))
        return await self.close_where(old.__contains__)

    async def _close(self, slot: Slot) -> None:
        try:
            if slot.sandbox is not None:
                await slot.sandbox.close()
        finally:
            self._closing -= 1
            await self._notify()

    async def _room(self, owner: int | None) -> Slot:
        self.waiting += 1
        try:
            async with asyncio.timeout(self._patience_s):
                while len(self.roster) + self._closing >= self._budget:
                    victim = self.roster.victim()
                    if victim is not None:
                        await self.close(victim)
                        continue
                    self.hurry()
                    async with self._changed:
                        await self._changed.wait()
        except TimeoutError:
            raise OverloadedError(
                f"all {self._budget} sandboxes were busy for {self._patience_s:g} s. "
                "Run fewer rollouts at once, or raise max_sandboxes."
            ) from None
        finally:
            self.waiting -= 1
        slot = Slot(owner)
        self.roster.enter(slot)
        return slot

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
