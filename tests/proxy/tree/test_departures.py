"""Departures: where rollouts are expected to leave the tree, and which sandboxes are worth making there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tree.departures import AHEAD, MIN_CHANCE, departures, outlook, targets
from proxy.tree.keys import CallKey
from proxy.tree.tree import Node, Record
from sandboxes.effects import Effect

Grown = list[tuple[int, bool, int]]
grown: st.SearchStrategy[Grown] = st.lists(
    st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 20)), min_size=1, max_size=20
)


def recorded(source: Node, target: Node, hits: int = 0) -> Record:
    key = CallKey(bytes([len(source.records)]))
    record = Record(0, key, source, target, Effect.NONE if source is target else Effect.FILES, 1.0, 0.0, hits=hits)
    source.records[key] = record
    target.origin = target.origin or (record if source is not target else None)
    return record


def tree(described: Grown) -> list[Node]:
    """Return nodes, root first. Each entry is a call at an earlier node: an observation or a move, and its hits."""
    nodes = [Node(0)]
    for at, observes, hits in described:
        source = nodes[at % len(nodes)]
        target = source if observes else Node(len(nodes))
        recorded(source, target, hits)
        if not observes:
            nodes.append(target)
    return nodes


def chain(length: int, hits: int) -> list[Node]:
    return tree([(number, False, hits) for number in range(min(length, 10))])


def target_nodes(
    walkers: dict[Node, int], ready: dict[Node, int] | None = None, requested: dict[Node, int] | None = None
) -> list[Node]:
    existing = ready or {}
    result = targets(
        walkers, requested or {}, ready=lambda node: existing.get(node, 0), saved_s=lambda node: 1.0 + node.id
    )
    return [target.node for target in result]


def test_without_records_the_next_call_is_new() -> None:
    assert outlook(Node(1)).leave == 1.0


@given(grown)
def test_chances_at_a_node_add_up_to_one(described: Grown) -> None:
    for node in tree(described):
        view = outlook(node)
        assert view.leave + sum(view.moves.values()) == pytest.approx(1.0)
        assert 0 < view.leave <= 1.000001


@given(grown, st.integers(0, 5))
def test_each_rollout_departs_at_most_once(described: Grown, count: int) -> None:
    nodes = tree(described)
    walkers = dict.fromkeys(nodes[:3], count)
    assert sum(departures(walkers).values()) <= sum(walkers.values()) + 1e-6


def test_observations_do_not_shorten_the_look_ahead() -> None:
    quiet, busy = chain(1, hits=9), chain(1, hits=9)
    recorded(busy[0], busy[0], hits=30)
    assert outlook(busy[0]).moves[busy[1]] == pytest.approx(outlook(quiet[0]).moves[quiet[1]], rel=0.35)


def test_end_of_frequent_path_is_a_target() -> None:
    """The end of a frequent path is a target."""
    nodes = chain(4, hits=50)
    assert target_nodes({nodes[0]: 1})[0] is nodes[-1]


def test_targets_are_within_the_look_ahead() -> None:
    nodes = chain(10, hits=10_000)
    assert target_nodes({nodes[0]: 1}) == []
    assert target_nodes({nodes[10 - AHEAD + 1]: 1}) == [nodes[-1]]


def test_calls_made_once_make_new_calls_likely() -> None:
    nodes = tree([(0, False, 0), (0, False, 0), (0, False, 0)])
    assert target_nodes({nodes[0]: 1})[0] is nodes[0]


def test_one_ready_sandbox_is_enough_by_default() -> None:
    """One ready sandbox is enough unless more are requested."""
    nodes = chain(1, hits=0)
    frontier = nodes[-1]
    assert frontier in target_nodes({frontier: 8})
    assert frontier not in target_nodes({frontier: 8}, {frontier: 1})
    assert target_nodes({}, {frontier: 1}, {frontier: 3}) == [frontier, frontier]


def test_without_walkers_there_are_no_departures() -> None:
    assert target_nodes({}) == []


@given(grown, st.integers(1, 4))
def test_targets_are_likely_and_sorted_by_value(described: Grown, count: int) -> None:
    nodes = tree(described)
    result = targets({nodes[0]: count}, {}, ready=lambda _: 0, saved_s=lambda node: float(node.id))
    assert [target.worth_s for target in result] == sorted((target.worth_s for target in result), reverse=True)
    assert all(MIN_CHANCE <= target.chance <= 1 for target in result)


def test_no_departures_are_expected_at_diverged_nodes() -> None:
    nodes = chain(1, hits=50)
    assert nodes[1] in target_nodes({nodes[0]: 1})
    nodes[1].diverged = "lost"
    assert nodes[1] not in target_nodes({nodes[0]: 1})
