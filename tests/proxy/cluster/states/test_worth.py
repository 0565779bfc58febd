"""Which states are sent, and which are fetched."""

import math

import pytest

from proxy.cluster.states import worth
from proxy.cluster.states.worth import ROOT_S, UNPROVEN_S, candidate, replay_s
from proxy.tree.restore_plan import DOUBT_S, RestorePlan, plan_restore
from proxy.tree.tree import Node
from snapshots.costs import Costs, Mean
from tests.proxy.tree.test_restore_plan import chain

COSTS = Costs(fresh=Mean(1.0), replay_overhead=Mean(0.0))


def path() -> list[Node]:
    """Return a root and five calls of one second, without snapshots."""
    nodes = chain([(1.0, False, False, False, True, False)] * 6)
    for node in nodes[1:]:
        assert node.origin is not None
        node.origin.proven = True
    return nodes


def plan_of(nodes: list[Node]) -> RestorePlan | None:
    return plan_restore(nodes[-1], idle_at=lambda _: False, costs=COSTS)


def test_replays_are_as_long_as_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the nearest state that was sent; a root state that was not sent, and a doubtful call, count as infinite."""
    monkeypatch.setattr(worth, "WORTH_S", 100.0)
    nodes = path()
    assert replay_s(nodes[-1], (), COSTS) == 6.0
    assert replay_s(nodes[-1], {nodes[2].id}, COSTS) == 3.0
    assert replay_s(nodes[2], {nodes[2].id}, COSTS) == 0.0
    assert replay_s(nodes[0], (), COSTS) == math.inf
    origin = nodes[4].origin
    assert origin is not None
    origin.doubtful = True
    assert replay_s(nodes[-1], {nodes[2].id}, COSTS) == math.inf
    assert replay_s(nodes[-1], {nodes[4].id}, COSTS) == 1.0


def test_only_proven_replays_surely_reach_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may have written the time or a random number without anybody noticing."""
    monkeypatch.setattr(worth, "WORTH_S", 100.0)
    nodes = path()
    assert replay_s(nodes[-1], {nodes[2].id}, COSTS, proven=True) == 3.0
    origin = nodes[3].origin
    assert origin is not None
    origin.proven = False
    assert replay_s(nodes[-1], {nodes[2].id}, COSTS, proven=True) == math.inf
    assert replay_s(nodes[-1], {nodes[2].id}, COSTS) == 3.0
    # And its fetch may take longer than the replay.
    assert candidate(nodes[-1], plan_of(nodes), {nodes[3].id}, COSTS) == (nodes[3], 4.0 + UNPROVEN_S)


def test_nearest_kept_state_is_fetched() -> None:
    """It saves what the plan replays above it. A snapshot that is here, or nearer, makes a fetch pointless."""
    nodes = path()
    kept = {nodes[2].id, nodes[3].id}
    assert candidate(nodes[-1], plan_of(nodes), kept, COSTS) == (nodes[3], 4.0)
    assert candidate(nodes[-1], plan_of(nodes), (), COSTS) is None
    assert candidate(nodes[-1], plan_of(nodes), {nodes[0].id}, COSTS) == (nodes[0], ROOT_S)
    nodes[4].snapshot = "s"
    assert candidate(nodes[-1], plan_of(nodes), kept, COSTS) is None
    nodes[4].snapshot, nodes[3].snapshot = None, "s"
    assert candidate(nodes[-1], plan_of(nodes), kept, COSTS) is None


def test_doubtful_and_impossible_replays_are_worth_waiting() -> None:
    """A state behind a call that may diverge saves the risk, too; without any plan it is the only way."""
    nodes = path()
    first, last = nodes[1].origin, nodes[-1].origin
    assert first is not None
    assert last is not None
    first.doubtful = True
    assert candidate(nodes[-1], plan_of(nodes), {nodes[3].id}, COSTS) == (nodes[3], 4.0 + DOUBT_S)
    first.reproducible = False
    assert candidate(nodes[-1], plan_of(nodes), {nodes[3].id}, COSTS) == (nodes[3], math.inf)
    last.reproducible = False
    assert candidate(nodes[-1], plan_of(nodes), {nodes[3].id}, COSTS) is None
