"""Which sandboxes stand where, against a plain list of slots."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sandboxes.pool.lifecycle import NEXT, LifecycleEvent, SandboxState
from sandboxes.pool.roster import Roster, Slot

if TYPE_CHECKING:
    from sandboxes.driver import Sandbox

PLACES = ("n1", "n2", "n3")
owners = st.integers(1, 3)


@dataclass
class Body:
    """As much of a sandbox as the roster looks at."""

    alive: bool = True


@dataclass
class Yard:
    """A roster with slots of given states at given places."""

    roster: Roster = field(default_factory=Roster)

    def add(self, place: str, owner: int | None, state: SandboxState = SandboxState.IDLE, used_at: float = 0.0) -> Slot:
        slot = Slot(owner, sandbox=cast("Sandbox", Body()), state=state, used_at=used_at)
        self.roster.add(slot)
        self.roster.move(slot, place)
        return slot


def test_find_prefers_own_sandbox() -> None:
    yard = Yard()
    yard.add("n1", 2)
    own = yard.add("n1", 1)
    yard.add("n1", None)
    assert yard.roster.find("n1", 1, shared=True) is own


def test_unshared_state_is_for_its_owner_only() -> None:
    yard = Yard()
    slot = yard.add("n1", 2)
    assert yard.roster.find("n1", 1, shared=False) is None
    assert yard.roster.find("n1", 1, shared=True) is slot
    slot.owner = None
    assert yard.roster.find("n1", 1, shared=False) is slot


def test_find_prefers_idle_to_freezing() -> None:
    yard = Yard()
    frozen = yard.add("n1", 2, SandboxState.FREEZING)
    assert yard.roster.find("n1", 1, shared=False) is frozen
    idle = yard.add("n1", 3)
    assert yard.roster.find("n1", 1, shared=True) is idle


def test_dead_sandbox_is_not_found_and_unused() -> None:
    yard = Yard()
    slot = yard.add("n1", 1, used_at=100.0)
    cast("Body", slot.sandbox).alive = False
    assert yard.roster.find("n1", 1, shared=True) is None
    assert yard.roster.unused_since(50.0) == [slot]


def test_victim_is_unowned_first_and_then_the_one_needed_last() -> None:
    yard = Yard()
    yard.add("n1", 1, SandboxState.LEASED, used_at=1.0)
    for owner, pause_s in ((1, 4.0), (2, 10.0), (3, 1.0)):
        yard.roster.habits.left(owner, -pause_s)
        yard.roster.habits.came(owner, 0.0)
    soon, later, late = (yard.add("n2", owner, used_at=12.0) for owner in (1, 2, 3))
    assert yard.roster.victim(13.0) is later
    # The third was due at 13, and has probably ended.
    assert yard.roster.victim(18.0) is late
    later.owner = None
    assert yard.roster.victim(18.0) is later
    late.irreplaceable = later.irreplaceable = True
    assert yard.roster.victim(18.0) is soon


class AgainstAList(RuleBasedStateMachine):
    """Whatever happens in whatever order, the roster finds what a look at every slot would find."""

    def __init__(self) -> None:
        super().__init__()
        self.roster = Roster()
        self.slots: list[Slot] = []

    @rule(owner=owners)
    def enter(self, owner: int) -> None:
        slot = Slot(owner)
        self.slots.append(slot)
        self.roster.add(slot)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), event=st.sampled_from(LifecycleEvent), place=st.sampled_from(PLACES))
    def happen(self, data: st.DataObject, event: LifecycleEvent, place: str) -> None:
        possible = [slot for slot in self.slots if (slot.state, event) in NEXT]
        if not possible:
            return
        slot = data.draw(st.sampled_from(possible))
        if event is LifecycleEvent.STARTED:
            slot.sandbox = cast("Sandbox", Body())
            self.roster.move(slot, place)
        self.roster.apply(slot, event)
        if slot.state is SandboxState.CLOSED:
            self.slots.remove(slot)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), place=st.sampled_from(PLACES))
    def move(self, data: st.DataObject, place: str) -> None:
        leased = [slot for slot in self.slots if slot.state is SandboxState.LEASED]
        if leased:
            self.roster.move(data.draw(st.sampled_from(leased)), place)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots))
        if slot.sandbox is not None:
            cast("Body", slot.sandbox).alive = False

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), moment=st.floats(0, 10))
    def use(self, data: st.DataObject, moment: float) -> None:
        data.draw(st.sampled_from(self.slots)).used_at = moment

    @invariant()
    def it_agrees_with_itself(self) -> None:
        self.roster.check()
        assert self.roster.slots == self.slots

    @invariant()
    def it_names_a_sandbox_exactly_where_one_may_be_taken(self) -> None:
        for place in PLACES:
            for shared in (True, False):
                here = [s for s in self.slots if s.position == place and s.sandbox is not None and s.sandbox.alive]
                idle = [s for s in here if s.state is SandboxState.IDLE and (shared or s.owner == 1)]
                allowed = idle or [s for s in here if s.state is SandboxState.FREEZING]
                named = self.roster.find(place, 1, shared=shared)
                assert named in allowed if allowed else named is None

    @invariant()
    def it_finds_all_that_stand_at_a_place(self) -> None:
        for place in PLACES:
            assert set(self.roster.at(place)) == {slot for slot in self.slots if slot.position == place}


AgainstAList.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAgainstAList = AgainstAList.TestCase
