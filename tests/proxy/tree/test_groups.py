"""Rollouts are compared by state: where they part, where they end alike, and what only winners did."""

from itertools import pairwise

import pytest

from proxy.tree.groups import MadeCall, RolloutWay, compared, threshold


def way(name: str, *nodes: int, reward: float | None = None) -> RolloutWay:
    """Return a rollout that moves along nodes; each call's text has the number of the node that it leads to."""
    moves = [MadeCall(target, source, target) for source, target in pairwise(nodes)]
    return RolloutWay(name, nodes[0], nodes[-1], reward, moves)


def test_reads_are_no_parting() -> None:
    """One reads three times before the call that both make, so their calls have other numbers."""
    reads = [MadeCall(7, 0, 0)] * 3
    one, other = way("one", 0, 1, 2), way("other", 0, 1, 3)
    other = RolloutWay("other", 0, 3, None, [*reads, *other.moves])
    assert compared([one, other], None).parts == [(1, [(2, 2, ["one"]), (3, 3, ["other"])])]


def test_two_texts_to_one_state_are_no_parting() -> None:
    ways = [RolloutWay("one", 0, 1, None, [MadeCall(5, 0, 1)]), RolloutWay("other", 0, 1, None, [MadeCall(6, 0, 1)])]
    found = compared(ways, None)
    assert (found.parts, found.same_end) == ([], [(None, 1, ["one", "other"])])


def test_rollouts_that_met_again_end_alike() -> None:
    found = compared([way("one", 0, 1, 3), way("two", 0, 2, 3), way("three", 0, 2)], None)
    assert found.same_end == [(None, 3, ["one", "two"])]
    assert [node for node, _ in found.parts] == [0]


def test_winning_states_begin_where_winners_left() -> None:
    """States behind such a state are no news; a rollout without a reward decides nothing."""
    ways = [
        way("won", 0, 1, 2, 3, reward=1.0), way("won too", 0, 1, 2, 4, reward=0.9), way("lost", 0, 1, 5, reward=0.0),
        way("unknown", 0, 1, 2, 3),
    ]  # fmt: skip
    found = compared(ways, 0.5)
    assert found.winning_states == [(None, 2, ["won", "won too"])]
    assert found.winning_calls == [(2, None, ["won", "won too"]), (3, None, ["won"]), (4, None, ["won too"])]
    assert compared(ways, None).winning_states == []


def test_reward_at_the_threshold_is_not_high() -> None:
    ways = [way("one", 0, 1, reward=1.0), way("two", 0, 2, reward=1.0)]
    assert compared(ways, 1.0).winning_states == []
    ways.append(way("low", 0, 3, reward=0.0))
    assert compared(ways, 0.9).winning_states == [(None, 1, ["one"]), (None, 2, ["two"])]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([], None), ([1.0, 1.0], None), ([0.0, 1.0, 1.0], 0.5), ([1e308, -1e308, 1.7e308], 3.5e307)],
)
def test_threshold_is_the_middle(rewards: list[float], expected: float | None) -> None:
    assert threshold(rewards) == (None if expected is None else pytest.approx(expected))
