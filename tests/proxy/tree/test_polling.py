"""Polling: the n-th identical call beside background processes has a key of its own, shared by all rollouts."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tree.keys import CallKey, again_key, private_key
from proxy.tree.polling import AGE_TOLERANCE_S, AGE_TOLERANCE_SHARE, key_for
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Node, Record, Tree
from sandboxes.effects import Effect, StateDigest
from sandboxes.spec import EnvironmentSpec

KEY = CallKey(b"k" * 32)


def rollout_at(node: Node, number: int = 1, *, cached: bool = True) -> Rollout:
    return Rollout(number, f"r{number}", "task", Tree(1, node, EnvironmentSpec(driver="memory")), node, cached=cached)


def live_node() -> Node:
    """Return a node with live processes: it has no digest, and it is no root."""
    root, node = Node(1), Node(2)
    node.origin = Record(1, KEY, root, node, Effect.PROCESSES, 0.1, 0.0, age_s=0.0)
    return node


def observe(node: Node, key: CallKey, age_s: float) -> Record:
    record = Record(1, key, node, node, Effect.NONE, 0.1, 0.0, age_s=age_s)
    node.records[key] = record
    return record


@given(st.integers(1, 6))
def test_nth_poll_is_shared_between_rollouts(polls: int) -> None:
    node = live_node()
    first, second = rollout_at(node, 1), rollout_at(node, 2)
    for rollout in (first, second):
        keys = []
        for _ in range(polls):
            keys.append(key_for(rollout, KEY, 0.0))
            record = node.records.get(keys[-1]) or observe(node, keys[-1], 0.0)
            rollout.advance(record, Outcome.HIT, 0.0)
        assert keys == [again_key(KEY, n) for n in range(polls)]


def test_repeated_calls_of_quiet_states_share_a_key() -> None:
    node = Node(1, state=StateDigest(b"e" * 32, b"c" * 32))
    rollout = rollout_at(node)
    rollout.advance(observe(node, KEY, 0.0), Outcome.HIT, 0.0)
    assert key_for(rollout, KEY, 1.0) == KEY


@given(recorded_s=st.floats(0, 100), asked_s=st.floats(0, 200))
def test_answers_hold_for_rollouts_of_their_age(recorded_s: float, asked_s: float) -> None:
    """An answer beside live processes holds for rollouts whose processes are about as old, and for no others."""
    node = live_node()
    observe(node, KEY, recorded_s)
    holds = abs(asked_s - recorded_s) <= max(AGE_TOLERANCE_S, AGE_TOLERANCE_SHARE * recorded_s)
    assert (key_for(rollout_at(node), KEY, asked_s) == KEY) is holds


def test_each_age_finds_its_own_answer() -> None:
    """A job that ends after 9 s: polls after 6.5 s, after 12 s and after an hour have answers of that time."""
    node = live_node()
    for nth, age_s in enumerate((6.5, 12.0, 3600.0)):
        assert key_for(rollout_at(node), KEY, age_s) == again_key(KEY, nth)
        observe(node, again_key(KEY, nth), age_s)
    for nth, age_s in enumerate((5.0, 13.5, 3000.0)):
        assert key_for(rollout_at(node), KEY, age_s) == again_key(KEY, nth)


def test_answers_of_unknown_age_hold() -> None:
    node = live_node()
    observe(node, KEY, math.inf)
    assert key_for(rollout_at(node), KEY, 50.0) == KEY


def test_ages_add_up_over_nodes() -> None:
    """Ages count from the last state without processes: many small differences are one large difference."""
    quiet = Node(1, state=StateDigest(b"e" * 32, b"c" * 32))
    nodes = [Node(number) for number in range(2, 7)]
    records = []
    for source, target in pairwise([quiet, *nodes]):
        # The first rollout makes a call each second, and each call takes half a second.
        age_s = 0.0 if source is quiet else 1.5 * (source.id - 1) - 0.5
        target.origin = Record(source.id, KEY, source, target, Effect.PROCESSES, 0.5, 0.0, age_s=age_s)
        records.append(target.origin)
        source.records[KEY] = target.origin
    rollout, now, held = rollout_at(quiet), 50.0, []
    for record in records:
        held.append(key_for(rollout, KEY, now) == KEY)
        rollout.advance(record, Outcome.HIT, now)
        # The second one thinks for 2 s longer each time, which alone would be within the tolerance.
        now += 3.0
    assert held == [True, True, False, False, False]


def test_waiting_for_the_proxy_makes_no_older() -> None:
    node = live_node()
    record = observe(node, KEY, 1.0)
    rollout = rollout_at(node)
    rollout.requested_at = 1.0
    assert key_for(rollout, KEY, 100.0) == KEY
    rollout.advance(record, Outcome.MISS, 100.0)
    assert rollout.age_s(101.0) == pytest.approx(1.0 + record.seconds + 1.0)


def test_roots_do_not_age() -> None:
    """The digest of a root is known only once a sandbox was frozen there, so its absence says nothing."""
    root = Node(1)
    observe(root, KEY, 0.0)
    assert key_for(rollout_at(root), KEY, 1000.0) == KEY


def test_uncached_rollouts_share_no_key() -> None:
    rollout = rollout_at(Node(1), 5, cached=False)
    assert key_for(rollout, KEY, 0.0) == private_key(KEY, 5, 0)
