"""The rules of a cluster, checked exhaustively for small clusters, by random walks of larger ones, and one by one."""

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proxy.cluster.protocol import (
    NOBODY,
    Admission,
    CopyKind,
    Ended,
    Entered,
    IngressTask,
    Outbox,
    OwnedTask,
    Position,
    TakenCalls,
    replaceable,
)
from tests.proxy.cluster.world import FRESH, KNOWN, Budget, World


@pytest.mark.parametrize(
    ("script", "budget"),
    [
        ((KNOWN,), Budget(claims=1, crashes=1)),
        ((FRESH,), Budget(claims=1, crashes=0, give_ups=1)),
        ((FRESH,), Budget(claims=1, crashes=0, lost_acks=1)),
        ((KNOWN, FRESH), Budget(claims=1, crashes=0)),
        ((KNOWN, KNOWN), Budget(claims=1, crashes=1)),
        ((KNOWN,), Budget(claims=1, crashes=0, leaves=1)),
        ((KNOWN, FRESH), Budget(claims=1, crashes=0, compactions=1)),
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
        leaves=st.integers(0, 2),
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


def test_a_rollout_waits_for_its_ingress() -> None:
    """The ingress may have passed on hits that no log has."""
    task = OwnedTask(5, [Entered(1, 30, Position(2, 12))])
    assert task.admit(1, 40, 0, None) is Admission.HOLD
    assert task.hear(30, {1: Position(4, 14)}) == [Entered(1, 30, Position(4, 14))]
    assert task.admit(1, 30, 4) is Admission.SERVE
    assert task.hear(30, {1: Position(9, 19)}) == []


def test_another_ingress_confirms_before_it_enters() -> None:
    """A confirmation counts only as long as the rollout stays where it was."""
    task = OwnedTask(5, [Entered(1, 30, Position(2, 12))])
    task.hear(30, {})
    assert task.admit(1, 40, 2) is Admission.CONFIRM
    assert task.admit(1, 40, 3, 2) is Admission.CONFIRM
    assert task.admit(1, 40, 2, 2) is Admission.ENTER
    task.enter(Entered(1, 40, Position(2, 12)))
    assert task.admit(1, 40, 2) is Admission.SERVE


def test_an_ended_rollout_is_new_again() -> None:
    """Its number never comes back, but the log may name it."""
    task = OwnedTask(5, [Entered(1, 30, Position(0, 1)), Ended(1)])
    assert not task.unheard
    assert task.admit(1, 30, 0) is Admission.ENTER
    task.enter(Entered(1, 30, Position(0, 1)))
    task.end(1)
    assert task.admit(1, 30, 0) is Admission.ENTER


def test_an_ingress_leaves() -> None:
    """Only with the position that its owner has too, and only its own rollouts."""
    task = OwnedTask(5, [Entered(1, 30, Position(2, 12)), Entered(2, 40, Position(0, 1))])
    assert task.left(1, 30, Position(2, 12), None) is None
    task.hear(30, {1: Position(3, 13)})
    # The answer with which the owner went on may not have been passed on.
    assert task.left(1, 30, Position(4, 14), Position(3, 13)) is None
    assert task.left(2, 30, Position(0, 1), None) is None
    assert task.left(1, 30, Position(4, 14), Position(4, 14)) == Entered(1, NOBODY, Position(4, 14))
    assert task.admit(1, 30, 4) is Admission.CONFIRM
    assert task.admit(1, 30, 4, 4) is Admission.ENTER
    assert not OwnedTask(6, [Entered(1, NOBODY, Position(4, 14))]).unheard


def test_rows_of_owners_stay() -> None:
    """A replaced owner may still try to write under their numbers."""
    assert replaceable([(1, True), (2, False), (5, True), (6, False)]) == [2, 6]


def test_an_ingress_refuses_older_views() -> None:
    """It has reported to the newer owner, which must not be surprised by further answers."""
    task = IngressTask(positions={1: Position(3, 9)})
    assert task.accept(4, {1: Position(4, 10)})
    assert task.adopt(6)
    assert not task.accept(4, {1: Position(5, 11)})
    assert not task.adopt(5)
    assert task.positions == {1: Position(4, 10)}


def test_a_call_is_taken_once() -> None:
    """Copies come when a link breaks, and late ones after the agent has its answer."""
    calls = TakenCalls(boot=1)
    assert calls.take(5, oldest=4) is CopyKind.NEW
    assert calls.take(5, oldest=4) is CopyKind.COPY
    assert calls.take(4, oldest=4) is CopyKind.NEW
    assert calls.take(7, oldest=6) is CopyKind.NEW
    assert calls.take(5, oldest=4) is CopyKind.LATE
    assert all(calls.take(number, oldest=6) is CopyKind.NEW for number in range(10, 20))
    assert calls.take(11, oldest=11) is CopyKind.COPY
    assert calls.take(10, oldest=11) is CopyKind.LATE
    assert vars(calls)["_taken"] == set(range(11, 20))


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
