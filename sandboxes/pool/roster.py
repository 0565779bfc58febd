"""Which sandboxes live, where each stands, and which to give up first (pure).

A place is whatever the caller stands sandboxes at (the proxy: a node of a tree); equal places are interchangeable.
"""

import asyncio
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from sandboxes.driver import Sandbox
from sandboxes.pool.lifecycle import LifecycleEvent, SandboxState, after


@dataclass(slots=True, eq=False)
class Slot:
    """One live sandbox. `sandbox` is None while it starts; `owner` may alone take it where its state lives only in it.

    used_at: seconds of a monotonic clock. warm: made ahead, and not used yet. hurry: set when somebody waits for the
    end of its freeze.
    """

    owner: int | None
    place: Hashable = None
    sandbox: Sandbox | None = None
    state: SandboxState = SandboxState.STARTING
    used_at: float = 0.0
    started_at: float = 0.0
    calls: int = 0
    warm: bool = False
    hurry: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Roster:
    """All slots, found by place."""

    slots: list[Slot] = field(default_factory=list)
    _by_place: dict[Hashable, list[Slot]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.slots)

    def enter(self, slot: Slot) -> None:
        self.slots.append(slot)

    def happen(self, slot: Slot, event: LifecycleEvent) -> None:
        """Move slot on; one that closes leaves the roster."""
        slot.state = after(slot.state, event)
        if slot.state is SandboxState.CLOSED:
            self._leave_place(slot)
            self.slots.remove(slot)

    def stand(self, slot: Slot, place: Hashable) -> None:
        """Note that slot stands at place now."""
        if slot.place is not place or slot not in self._by_place.get(place, ()):
            self._leave_place(slot)
            slot.place = place
            self._by_place.setdefault(place, []).append(slot)

    def standing(self, place: Hashable, owner: int | None, *, shared: bool) -> Slot | None:
        """Return a sandbox at place that owner may take: its own first, then, if shared, any.

        One that freezes is worth waiting for, whoever owns it: once it is frozen its state can be had again.
        """
        found = [s for s in self._by_place.get(place, ()) if _alive(s)]
        idle = [s for s in found if s.state is SandboxState.IDLE and (shared or s.owner in (owner, None))]
        takeable = idle or [s for s in found if s.state is SandboxState.FREEZING]
        return max(takeable, key=lambda s: s.owner == owner, default=None)

    def victim(self) -> Slot | None:
        """Return the idle sandbox to give up: of those that nobody owns, then of the others, the one idle longest."""
        idle = (s for s in self.slots if s.state is SandboxState.IDLE)
        return min(idle, key=lambda s: (s.owner is not None, s.used_at), default=None)

    def unused_since(self, moment: float) -> list[Slot]:
        """Return the idle sandboxes, and the dead ones, that nobody has used since moment."""
        return [s for s in self.slots if s.state is SandboxState.IDLE and (s.used_at < moment or not _alive(s))]

    def at(self, place: Hashable) -> Iterator[Slot]:
        yield from list(self._by_place.get(place, ()))

    def check(self) -> None:
        """Assert that slots and places agree."""
        placed = [slot for slots in self._by_place.values() for slot in slots]
        assert len(placed) == len(set(placed))
        assert set(placed) <= set(self.slots)
        for place, slots in self._by_place.items():
            assert slots
            assert all(slot.place is place for slot in slots)

    def _leave_place(self, slot: Slot) -> None:
        here = self._by_place.get(slot.place)
        if here is not None and slot in here:
            here.remove(slot)
            if not here:
                del self._by_place[slot.place]


def _alive(slot: Slot) -> bool:
    return slot.sandbox is not None and slot.sandbox.alive
