"""The roster: which sandboxes are alive, at which position each is, and which to close first (pure).

A position is any hashable value of the caller, such as a tree node; sandboxes at one position have the same state. The
roster decides and never waits; `Pool` waits and never decides. So no other task runs between a decision and the lease
that follows.
"""

import asyncio
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from sandboxes.driver import Sandbox
from sandboxes.pool.habits import Habits
from sandboxes.pool.lifecycle import NEXT, LifecycleEvent, SandboxState
from sandboxes.state_table import next_state


@dataclass(slots=True, eq=False)
class Slot:
    """A place in the budget, and the sandbox that takes it."""

    # The rollout that the sandbox is reserved for while its state exists nowhere else; None for everybody.
    owner: int | None
    position: Hashable = None
    sandbox: Sandbox | None = None  # The sandbox; None while it starts.
    state: SandboxState = SandboxState.STARTING
    used_at: float = 0.0  # When the last lease ended, in seconds of the monotonic clock.
    started_at: float = 0.0  # When the sandbox had started, on the same clock.
    live_from: float = 0.0  # Since when its live processes run, on the same clock; of no meaning without any.
    calls: int = 0
    warm: bool = False  # The sandbox was made ahead of its use and was not used yet.
    # The sandbox may be the last way to its state, and the state could not be kept; see `Pool.keep`.
    irreplaceable: bool = False
    # Number of the slot in the order of creation, unique in this process.
    number: int = field(default_factory=itertools.count(1).__next__)
    # Set when a caller waits for the end of the sandbox's freeze, which may have been delayed.
    freeze_now: asyncio.Event = field(default_factory=asyncio.Event)
    # Set when the sandbox's last freeze has ended, or the sandbox is closed.
    freeze_over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Roster:
    """All slots that are not closed, in the order of their start."""

    slots: list[Slot] = field(default_factory=list)
    habits: Habits = field(default_factory=Habits)
    _by_position: dict[Hashable, list[Slot]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.slots)

    def add(self, slot: Slot) -> None:
        """Add a slot, which counts towards the budget from now on."""
        self.slots.append(slot)

    def apply(self, slot: Slot, event: LifecycleEvent) -> None:
        """Change the state of a slot. A closed slot leaves the roster."""
        slot.state = next_state(NEXT, slot.state, event)
        if slot.state is SandboxState.CLOSED:
            self._leave_position(slot)
            self.slots.remove(slot)

    def move(self, slot: Slot, position: Hashable) -> None:
        """Record that the sandbox of a slot is at a position now."""
        if slot.position is not position or slot not in self._by_position.get(position, ()):
            self._leave_position(slot)
            slot.position = position
            self._by_position.setdefault(position, []).append(slot)

    def find(
        self, position: Hashable, owner: int | None, *, shared: bool, fits: Callable[[Slot], bool] = lambda _: True
    ) -> Slot | None:
        """Return the sandbox at a position that a rollout should use, or None.

        Idle sandboxes come first, and among them the rollout's own. A freezing one is worth waiting for, whatever its
        owner: then its state is a snapshot too. Others' sandboxes may be used if the state is `shared`, and as old as
        the rollout expects (`fits`).
        """
        best, found = -1, None
        for slot in self._by_position.get(position, ()):
            own = slot.owner == owner
            if slot.state is SandboxState.IDLE and (shared or own or slot.owner is None):
                worth = 2 + own
            elif slot.state is SandboxState.FREEZING:
                worth = int(own)
            else:
                continue
            if worth > best and _alive(slot) and (own or fits(slot)):
                best, found = worth, slot
        return found

    def victim(self, now: float) -> Slot | None:
        """Return the idle sandbox to close first.

        Irreplaceable ones come last. First come those without an owner, or whose owner has another, the longest idle
        first; then the one that its rollout will need last, as far as `habits` tell.
        """

        def order(slot: Slot) -> tuple[bool, bool, float]:
            if slot.owner is None or self.habits.left_later(slot.owner, slot.used_at):
                return slot.irreplaceable, False, slot.used_at
            return slot.irreplaceable, True, -self.habits.wait_s(slot.owner, now - slot.used_at)

        idle = (s for s in self.slots if s.state is SandboxState.IDLE)
        return min(idle, key=order, default=None)

    def unused_since(self, moment: float) -> list[Slot]:
        """Return the idle sandboxes that were last used before a moment of the monotonic clock, or that died."""
        return [s for s in self.slots if s.state is SandboxState.IDLE and (s.used_at < moment or not _alive(s))]

    def at(self, position: Hashable) -> Iterator[Slot]:
        """Yield every slot at a position, whatever its state."""
        yield from list(self._by_position.get(position, ()))

    def check(self) -> None:
        """Assert that the slots and the index by position agree."""
        indexed = [slot for slots in self._by_position.values() for slot in slots]
        assert len(indexed) == len(set(indexed))
        assert set(indexed) <= set(self.slots)
        for position, slots in self._by_position.items():
            assert slots
            assert all(slot.position is position for slot in slots)

    def _leave_position(self, slot: Slot) -> None:
        here = self._by_position.get(slot.position)
        if here is not None and slot in here:
            here.remove(slot)
            if not here:
                del self._by_position[slot.position]


def _alive(slot: Slot) -> bool:
    return slot.sandbox is not None and slot.sandbox.alive
