"""The pool: leases on live sandboxes, within a budget.

Theory of operation:

1. Every sandbox has a slot in the roster from before its start until its close begins. While it closes it is counted
   separately (`_closing`), because its processes still use the machine.
2. A caller that needs a new sandbox closes idle ones until there is room. If none is idle, it waits for `_changed`,
   which is notified after each release, freeze and close. A caller that needs one sandbox waits for that one alone:
   the calls of a group would otherwise wake each other, sixteen at each release.
3. A sandbox may be frozen after its lease. `begin_freeze` turns the lease into a freeze at once, so no other caller can
   lease it in between, and `freezing` may then wait for more calls of its rollout. A caller that waits, for this
   sandbox or for room, sets `freeze_now` and ends that wait.
4. Before an idle sandbox is closed for room, `keep` may freeze it, if it is the last way to its state.
5. A caller that is cancelled never leaves a sandbox half closed: `close` runs to its end in a task of its own.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager

from sandboxes.driver import Sandbox
from sandboxes.pool.lifecycle import LifecycleEvent, SandboxState
from sandboxes.pool.room import Room, RoomBound
from sandboxes.pool.roster import Roster, Slot
from sandboxes.pool.starts import Starts
from sandboxes.task_owner import start as start_task

_STARTS = 4
"""How many sandboxes may be starting at once."""


class OverloadedError(RuntimeError):
    """Every sandbox of the budget was busy for too long. A later attempt may succeed."""


async def _need_not_keep(_slot: Slot) -> bool:
    return True


class Pool:
    """Owns every live sandbox from its start to its close."""

    def __init__(
        self,
        room: Room,
        *,
        patience_s: float,
        callers: Callable[[int], int] = lambda _: 1,
        keep: Callable[[Slot], Awaitable[bool]] = _need_not_keep,
    ) -> None:
        """Make an empty pool; after `patience_s` without room a caller gets `OverloadedError`.

        `callers` returns how many rollouts wait for what an owner's call does, itself included; see `Starts`. `keep` is
        awaited before an idle sandbox is closed for room. It keeps the sandbox's state if need be, and returns False if
        it cannot: then other sandboxes are closed first.
        """
        self.roster = Roster()  # Who is where; read by the proxy to plan and to show.
        # `waiting`: how many callers wait for room.
        # `evicted`: how many sandboxes were closed for room before their rollouts had ended.
        self.waiting = self.evicted = self._seen = 0
        self.room, self._patience_s, self._keep = room, patience_s, keep
        self._changed = asyncio.Condition()
        self._starts = Starts(_STARTS, callers)
        self._closing = 0

    async def start(self, make: Callable[[], Awaitable[Sandbox]], position: Hashable, owner: int | None) -> Slot:
        """Make a sandbox and lease it to a rollout (or None); idle sandboxes are closed if the budget has no room."""
        return await self.fill(await self._make_room(owner), make, position)

    def newly_evicted(self) -> int:
        """Return how many were `evicted` since this was last called."""
        newly, self._seen = self.evicted - self._seen, self.evicted
        return newly

    @property
    def bound(self) -> RoomBound:
        """The most sandboxes at this moment, and what bounds them."""
        return self.room.bound(self._taken)

    @property
    def _full(self) -> bool:
        return self._taken >= self.bound.most

    @property
    def spare(self) -> int:
        """How many sandboxes may be started so that the next caller still has room."""
        return max(0, self.bound.most - self._taken - 1)

    @property
    def _taken(self) -> int:
        return len(self.roster) + self._closing

    async def start_warm(self, make: Callable[[], Awaitable[Sandbox]], position: Hashable) -> Slot:
        """Make a sandbox ahead of its use and lease it. Nothing is closed or delayed for it; see `has_spare_room`."""
        if not self.has_spare_room:
            raise OverloadedError("there is no room for a warm fork.")
        slot = Slot(None, warm=True)
        self.roster.add(slot)
        return await self.fill(slot, make, position)

    @property
    def has_spare_room(self) -> bool:
        """Whether a sandbox may be made ahead: two slots and a start are free, so the next caller still has one."""
        return bool(self.spare) and not self._starts.busy

    async def fill(self, slot: Slot, make: Callable[[], Awaitable[Sandbox]], position: Hashable) -> Slot:
        """Make the sandbox of a new slot in the roster and lease it. If that fails, the slot is closed."""
        try:
            async with self._starts.turn(slot.owner):
                slot.sandbox = await make()
        except BaseException:
            await self.close(slot)
            raise
        slot.started_at = slot.used_at = time.monotonic()
        self._came(slot)
        self.roster.move(slot, position)
        self.roster.apply(slot, LifecycleEvent.STARTED)
        return slot

    async def lease(self, slot: Slot, position: Hashable, owner: int | None) -> bool:
        """Lease the slot that `Roster.find` returned; False if the sandbox froze, moved, died, or is leased now."""
        if slot.state is SandboxState.FREEZING:
            slot.freeze_now.set()
            await slot.freeze_over.wait()
            return False
        if slot.state is not SandboxState.IDLE or slot.position is not position:
            return False
        if slot.sandbox is None or not slot.sandbox.alive:
            return False
        self.roster.apply(slot, LifecycleEvent.LEASE)
        slot.owner, slot.warm, slot.irreplaceable = owner, False, False
        self._came(slot)
        return True

    def _came(self, slot: Slot) -> None:
        if slot.owner is not None:
            self.roster.habits.came(slot.owner, time.monotonic())

    def _left(self, slot: Slot) -> None:
        slot.used_at = time.monotonic()
        if slot.owner is not None:
            self.roster.habits.left(slot.owner, slot.used_at)

    async def release(self, slot: Slot) -> None:
        """End a lease. `Roster.move` has recorded where the sandbox is now."""
        self._left(slot)
        self.roster.apply(slot, LifecycleEvent.RELEASE)
        await self._notify()

    def begin_freeze(self, slot: Slot) -> None:
        """Turn a lease into a freeze. `freezing` must follow."""
        self._left(slot)
        slot.freeze_now.clear()
        slot.freeze_over.clear()
        self.roster.apply(slot, LifecycleEvent.FREEZE)

    @asynccontextmanager
    async def freezing(self, slot: Slot, *, after_s: float = 0.0) -> AsyncIterator[Sandbox]:
        """Yield the sandbox of a freeze that has begun. After the block it is idle, or closed if the block failed."""
        # It waits for `after_s` before the block, but not if a caller needs the sandbox or its room.
        assert slot.sandbox is not None
        try:
            # The event ends the wait, also when the time is up: a timeout would cancel the task and raise for it.
            timer = asyncio.get_running_loop().call_later(after_s, slot.freeze_now.set)
            try:
                await slot.freeze_now.wait()
            finally:
                timer.cancel()
            yield slot.sandbox
        except BaseException:
            await self.close(slot)
            raise
        self.roster.apply(slot, LifecycleEvent.FROZEN)
        slot.freeze_over.set()
        await self._notify()

    async def close(self, slot: Slot) -> None:
        """Close a sandbox in any state. The close completes even if the caller is cancelled."""
        if slot.state is SandboxState.CLOSED:
            return
        self.roster.apply(slot, LifecycleEvent.CLOSE)
        slot.freeze_over.set()
        # The budget is about the machine: until its processes have ended, the sandbox takes room.
        self._closing += 1
        closing = start_task(self._close(slot))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait([closing])
            raise

    def flush_pending_freezes(self) -> None:
        """Start all delayed freezes now."""
        for slot in self.roster.slots:
            slot.freeze_now.set()

    async def release_owner(self, owner: int) -> None:
        """Let every rollout use the sandboxes that one rollout owned, which has ended."""
        self.roster.habits.forget(owner)
        for slot in self.roster.slots:
            if slot.owner == owner:
                slot.owner = None

    async def close_where(self, unwanted: Callable[[Slot], bool]) -> int:
        """Close the idle sandboxes that are unwanted and return how many there were."""
        idle = [slot for slot in self.roster.slots if slot.state is SandboxState.IDLE and unwanted(slot)]
        for slot in idle:
            # A close takes time, and another task may have leased the next sandbox meanwhile.
            if slot.state is SandboxState.IDLE:
                await self.close(slot)
        return len(idle)

    async def close_victim(self) -> bool:
        """Close the idle sandbox that is missed least, after `keep`. Return False if none is idle."""
        while (victim := self.roster.victim(time.monotonic())) is not None:
            if await self._close_kept(victim):
                return True
        return False

    async def _close_kept(self, victim: Slot) -> bool:
        """Close an idle sandbox whose state is kept, or was found to be irreplaceable before; return whether it was."""
        position = victim.position
        # Once only irreplaceable ones are left, one of them goes: a call that waits comes first.
        kept = victim.irreplaceable or await self._keep(victim)
        if victim.state is not SandboxState.IDLE or victim.position is not position:
            # A call has taken the sandbox while its state was kept.
            return False
        if kept:
            self.evicted += victim.owner is not None
            await self.close(victim)
        else:
            victim.irreplaceable = True
        return kept

    async def _close(self, slot: Slot) -> None:
        try:
            if slot.sandbox is not None:
                await slot.sandbox.close()
        finally:
            self._closing -= 1
            await self._notify()

    async def _make_room(self, owner: int | None) -> Slot:
        self.waiting += 1
        try:
            async with asyncio.timeout(self._patience_s):
                while self._full:
                    if await self.close_victim():
                        continue
                    # A sandbox whose freeze is delayed could be closed, too.
                    self.flush_pending_freezes()
                    async with self._changed:
                        await self._changed.wait()
        except TimeoutError:
            bound = self.bound
            raise OverloadedError(
                f"all {bound.most} sandboxes were busy for {self._patience_s:g} s. They are bounded by {bound.by}: "
                f"run fewer rollouts at once, or {bound.remedy}."
            ) from None
        finally:
            self.waiting -= 1
        # No await since the last look at the budget: no other caller can take this room.
        slot = Slot(owner)
        self.roster.add(slot)
        return slot

    async def _notify(self) -> None:
        if self.waiting:
            async with self._changed:
                self._changed.notify_all()
