"""The planner against every way there is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.tree.keys import CallKey
from proxy.tree.restore_plan import Way, kind_of, plan_restore
from proxy.tree.tree import Node, Record
from sandboxes.effects import Effect
from snapshots.costs import Costs, Mean, SnapshotKind

Link = tuple[float, bool, bool, bool, bool, bool]
links = st.lists(
    st.tuples(
        st.floats(0, 2),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.integers(0, 9).map(lambda n: n > 0),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


def chain(described: list[Link]) -> list[Node]:
    """Return a path, root first. A link: its call's seconds, then snapshot, standing, avoided, reproducible, live."""
    nodes = [Node(0)]
    for number, (seconds, snapshot, _, _, reproducible, live) in enumerate(described[1:], start=1):
        node = Node(number, snapshot="s" if snapshot else None, witness=b"w" if live else None)
        node.origin = Record(
            number, CallKey(b""), nodes[-1], node, Effect.FILES, seconds, 0.0, reproducible=reproducible
        )
        nodes.append(node)
    nodes[0].snapshot = "s" if described[0][1] else None
    return nodes


@given(links)
def test_the_plan_is_the_cheapest_of_all_ways(described: list[Link]) -> None:
    nodes, costs = chain(described), Costs()
    standing = {node for node, link in zip(nodes, described, strict=True) if link[2]}
    avoid = {node for node, link in zip(nodes, described, strict=True) if link[3]}
    every = {}
    for start in range(len(nodes)):
        suffix = [node.origin for node in nodes[start + 1 :] if node.origin is not None]
        if not all(record.reproducible for record in suffix):
            continue
        replay_s = sum(record.seconds + costs.replay_overhead.seconds for record in suffix)
        if nodes[start] in standing:
            every[Way.STANDING, start] = replay_s
        if nodes[start].snapshot is not None and nodes[start] not in avoid:
            every[Way.SNAPSHOT, start] = costs.of(kind_of(nodes[start])).restore.seconds + replay_s
        if start == 0:
            every[Way.FRESH, start] = costs.fresh.seconds + replay_s
    plan = plan_restore(nodes[-1], standing=standing.__contains__, costs=costs, avoid=avoid)
    if not every:
        assert plan is None
        return
    assert plan is not None
    assert abs(plan.cost_s - min(every.values())) < 1e-9
    assert abs(every[plan.way, plan.start.id] - plan.cost_s) < 1e-9
    assert [record.target for record in plan.suffix] == nodes[plan.start.id + 1 :]


def test_a_snapshot_is_preferred_to_a_replay_in_doubt_that_seems_cheaper() -> None:
    nodes = chain([(0.0, False, False, False, True, False)] * 2 + [(0.0, True, False, False, True, True)])
    for doubtful, way in ((False, Way.STANDING), (True, Way.SNAPSHOT)):
        assert nodes[2].origin is not None
        nodes[2].origin.doubtful = doubtful
        plan = plan_restore(nodes[2], standing=lambda node: node is nodes[1], costs=Costs())
        assert plan is not None
        assert plan.way is way
    nodes[2].snapshot = None
    assert plan_restore(nodes[2], standing=lambda node: node is nodes[1], costs=Costs()) is not None


def test_a_plan_walks_no_further_up_than_it_can_pay_off() -> None:
    nodes = chain([(0.1, False, False, False, True, False)] * 1000)
    nodes[-2].snapshot = "s"
    seen: list[int] = []

    def standing(node: Node) -> bool:
        seen.append(node.id)
        return False

    plan_restore(nodes[-1], standing=standing, costs=Costs())
    assert len(seen) <= 3


def test_a_state_with_live_processes_is_replayed_where_that_is_cheaper_than_its_restore() -> None:
    nodes = chain([(0.0, False, False, False, True, False), (0.1, True, False, False, True, True)])
    dear, cheap = Costs().restored("processes", 0.5), Costs().restored("processes", 0.01)
    for costs, way in ((dear, Way.FRESH), (cheap, Way.SNAPSHOT)):
        plan = plan_restore(nodes[-1], standing=lambda _: False, costs=costs)
        assert plan is not None
        assert plan.way is way


@given(st.lists(st.floats(1, 4), min_size=1, max_size=10))
def test_a_mean_forgets_its_guess_and_is_exact_over_ten(seconds: list[float]) -> None:
    mean = Mean(1e9)
    for value in seconds:
        mean = mean.then(value)
    assert mean.seconds == pytest.approx(sum(seconds) / len(seconds))


def test_one_slow_moment_moves_a_mean_little_and_a_lasting_change_moves_it_all_the_way() -> None:
    mean = Mean(0.001)
    assert mean.then(10.0).seconds < 0.005
    for _ in range(60):
        mean = mean.then(10.0)
    assert mean.seconds == pytest.approx(10.0, rel=0.02)


@given(st.sampled_from(["files", "processes"]), st.floats(0, 0.002))
def test_what_was_measured_of_one_kind_is_learnt_of_that_kind_alone(kind: SnapshotKind, seconds: float) -> None:
    other: SnapshotKind = "files" if kind == "processes" else "processes"
    costs = Costs().froze(kind, seconds).restored(kind, seconds)
    assert (costs.of(kind).freeze.seconds, costs.of(kind).restore.seconds) == pytest.approx((seconds, seconds))
    assert costs.of(other) == Costs().of(other)
