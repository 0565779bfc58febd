"""The rules of a cluster, checked exhaustively for small clusters, by random walks of larger ones, and one by one."""

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proxy.cluster.protocol import MAX_ANSWERED, Ended, Floors, Outbox, Position, StepId, Stepped, Steps, replaceable
from tests.proxy.cluster.world import FRESH, KNOWN, Budget, World


@pytest.mark.parametrize(
    ("script", "budget"),
    [
        ((KNOWN,), Budget(claims=2, crashes=1)),
        ((FRESH,), Budget(claims=2, crashes=0, give_ups=1)),
        ((FRESH,), Budget(claims=2, crashes=0, refusals=1)),
        ((FRESH,), Budget(claims=2, crashes=0, breaks=1)),
        ((FRESH,), Budget(claims=2, crashes=0, lost_acks=1)),
        ((KNOWN, KNOWN), Budget(claims=1, crashes=0, refusals=1, give_ups=1)),
        ((KNOWN, KNOWN), Budget(claims=2, crashes=1)),
        ((KNOWN, KNOWN), Budget(claims=1, crashes=0, breaks=1)),
        ((KNOWN, FRESH), Budget(claims=2, crashes=0, compactions=1)),
    ],
)
def test_no_order_of_events_answers_wrongly(script: tuple[str, ...], budget: Budget) -> None:
    """Every order of every event that the budget allows, for two members and one agent."""
    start = World(2, script, budget)
    seen, pending, finished = {start.frozen()}, deque([start]), 0
    while pending:
        world = pending.popleft()
        for action in world.actions():
            after = world.apply(action)
            after.check()
            finished += after.finished
            if (state := after.frozen()) not in seen:
                seen.add(state)
                pending.append(after)
    # The agent does get through: a model in which nothing is answered would be right as well.
    assert finished


class AnyOrder(RuleBasedStateMachine):
    """Two or three members, one agent with six calls, and whatever may happen to them."""

    world: World

    @initialize(
        members=st.sampled_from((2, 3)),
        script=st.lists(st.sampled_from((KNOWN, FRESH)), min_size=6, max_size=6),
        claims=st.integers(1, 6),
        crashes=st.integers(0, 3),
        give_ups=st.integers(0, 3),
        lost_acks=st.integers(0, 2),
        refusals=st.integers(0, 2),
        breaks=st.integers(0, 3),
        compactions=st.integers(0, 3),
    )
    def begin(self, members: int, script: list[str], **budget: int) -> None:
        self.world = World(members, tuple(script), Budget(**budget))

    @rule(data=st.data())
    def happen(self, data: st.DataObject) -> None:
        actions: list[tuple[Any, ...]] = sorted(self.world.actions(), key=repr)
        if actions:
            self.world = self.world.apply(data.draw(st.sampled_from(actions)))

    @invariant()
    def answers_are_right(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=25, stateful_step_count=80)


def step(turn: int, call: StepId, *, oldest: int = 0, rollout: int = 7) -> Stepped:
    """Return a step of a record with the number 10 and more."""
    return Stepped(rollout, Position(turn, 100 + turn), 10 + turn, call, oldest)


def test_a_call_that_is_made_again_has_its_answer() -> None:
    """Whatever the rollout was answered since, as long as the ingress may make the call again."""
    first, second, other = StepId(30, 1, 4, 0), StepId(30, 1, 5, 0), StepId(40, 1, 9, 0)
    steps = Steps([step(1, first), step(2, second, oldest=4), step(3, other)])
    assert [steps.answered(7, call) for call in (first, second, other)] == [11, 12, 13]
    assert steps.answered(8, first) is None
    assert steps.answered(7, first._replace(step=1)) is None
    # It has the answer of the first one, and a later start makes none of these again.
    steps.take(step(4, StepId(30, 1, 6, 0), oldest=5))
    assert [steps.answered(7, call) for call in (first, second)] == [None, 12]
    steps.take(step(5, StepId(30, 2, 1, 0), oldest=1))
    assert [steps.answered(7, call) for call in (second, other)] == [None, 13]
    assert Steps(steps.lines()).answered(7, other) == 13


def test_an_agent_that_tries_again_has_the_answer_of_the_last_step_only() -> None:
    """Behind another step, the same request is a new call."""
    first, other = StepId(30, 1, 4, 0), StepId(40, 1, 9, 0)
    steps = Steps([step(1, first)])
    assert steps.answered(7, first, is_again=True) == 11
    steps.take(step(2, other))
    assert steps.answered(7, first, is_again=True) is None


def test_what_an_ingress_makes_no_more_is_late() -> None:
    """Whichever connection it comes on. A later start of the ingress makes none of the earlier one's calls."""
    floors = Floors()
    assert not floors.is_late(30, 1, 4)
    floors.note(30, 1, 5)
    floors.note(30, 1, 4)
    assert [floors.is_late(30, 1, number) for number in (4, 5)] == [True, False]
    assert not floors.is_late(40, 1, 4)
    floors.note(30, 2, 1)
    assert [floors.is_late(30, 1, 9), floors.is_late(30, 2, 1)] == [True, False]


def test_a_step_that_was_not_taken_is_replaced() -> None:
    """An answer turned out to be damaged after its step was written: the next line says where the rollout is."""
    call = StepId(30, 1, 4, 0)
    steps = Steps([step(1, call), step(1, call)._replace(record=99, position=Position(1, 55))])
    assert (steps.answered(7, call), steps.last(7)) == (99, Stepped(7, Position(1, 55), 99, call, 0))


def test_another_ingress_confirms_its_call() -> None:
    """A confirmation counts only as long as the rollout stays where it was."""
    steps = Steps([step(2, StepId(30, 1, 4, 0))])
    assert not steps.must_confirm(7, 30, 2, None)
    assert steps.must_confirm(7, 40, 2, None)
    assert steps.must_confirm(7, 40, 3, 2)
    assert not steps.must_confirm(7, 40, 2, 2)
    assert not steps.must_confirm(8, 40, 0, None)


def test_an_ended_rollout_has_no_steps() -> None:
    """Its number never comes back."""
    steps = Steps([step(1, StepId(30, 1, 4, 0)), step(1, StepId(30, 1, 5, 0), rollout=8), Ended(7)])
    assert (len(steps), steps.last(7)) == (1, None)


def test_remembered_steps_are_bounded() -> None:
    steps = Steps(step(number, StepId(30, 1, 1, number)) for number in range(MAX_ANSWERED + 5))
    assert len(list(steps.lines())) == MAX_ANSWERED
    last = steps.last(7)
    assert last is not None
    assert last.position.turn == MAX_ANSWERED + 4


def test_rows_of_owners_stay() -> None:
    """A replaced owner may still try to write under their numbers."""
    assert replaceable([(1, True), (2, False), (5, True), (6, False)]) == [2, 6]


def test_one_row_is_on_its_way() -> None:
    """Lines that come up meanwhile go together in the next row."""
    outbox: Outbox[str] = Outbox(3)
    assert outbox.next_row() is None
    outbox.waiting.append("a")
    assert outbox.next_row() == 4
    outbox.waiting += ["b", "c"]
    assert outbox.next_row() is None
    outbox.written()
    assert outbox.next_row() == 5
    assert outbox.sent == ["b", "c"]
