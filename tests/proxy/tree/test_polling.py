"""Polling: the n-th identical call beside background processes has a key of its own, shared by all rollouts."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.tree.keys import CallKey, again_key, private_key
from proxy.tree.polling import DWELL_TOLERANCE_S, key_for
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Node, Record, Tree
from sandboxes.driver import SETTLE_S
from sandboxes.effects import Effect, StateDigest
from sandboxes.spec import EnvironmentSpec

KEY = CallKey(b"k" * 32)


def rollout_at(node: Node, number: int = 1, *, cached: bool = True) -> Rollout:
    return Rollout(number, f"r{number}", "task", Tree(1, node, EnvironmentSpec(driver="memory")), node, cached=cached)


def observe(node: Node, key: CallKey, dwell_s: float) -> Record:
    record = Record(1, key, node, node, Effect.NONE, 0.1, 0.0, dwell_s=dwell_s)
    node.records[key] = record
    return record


@given(st.integers(1, 6))
def test_nth_poll_is_shared_between_rollouts(polls: int) -> None:
    node = Node(1)
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


@given(recorded_s=st.floats(0, 20), dwell_s=st.floats(0, 60))
def test_early_answers_do_not_serve_late_rollouts(recorded_s: float, dwell_s: float) -> None:
    node = Node(1)
    node.settling = True
    observe(node, KEY, recorded_s)
    outdated = recorded_s < SETTLE_S and dwell_s > recorded_s + DWELL_TOLERANCE_S
    assert (key_for(rollout_at(node), KEY, dwell_s) != KEY) is outdated


def test_waiting_for_the_proxy_is_no_dwell_time() -> None:
    node = Node(1)
    node.settling = True
    observe(node, KEY, 0.0)
    rollout = rollout_at(node)
    rollout.requested_at = 1.0
    assert key_for(rollout, KEY, 100.0) == KEY


def test_uncached_rollouts_share_no_key() -> None:
    rollout = rollout_at(Node(1), 5, cached=False)
    assert key_for(rollout, KEY, 0.0) == private_key(KEY, 5, 0)
