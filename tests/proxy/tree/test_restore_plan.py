"""Restore plans, compared with every way that exists."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.tree.keys import CallKey
from proxy.tree.restore_plan import Way, kind_of, plan_restore
from proxy.tree.tree import Node, Record
from sandboxes.effects import Effect
from snapshots.costs import Costs

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
    """Return a path, root first. A link: seconds of its call, then snapshot, idle, avoided, reproducible, live."""
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
def test_the_plan_is_the_cheapest_way(described: list[Link]) -> None:
    nodes, costs = chain(described), Costs()
    idle = {node for node, link in zip(nodes, described, strict=True) if link[2]}
    avoid = {node for node, link in zip(nodes, described, strict=True) if link[3]}
    every = {}
    for start in range(len(nodes)):
        suffix = [node.origin for node in nodes[start + 1 :] if node.origin is not None]
        if not all(record.reproducible for record in suffix):
            continue
        replay_s = sum(record.seconds + costs.replay_overhead.seconds for record in suffix)
        if nodes[start] in idle:
            every[Way.IDLE, start] = replay_s
        if nodes[start].snapshot is not None and nodes[start] not in avoid:
            every[Way.SNAPSHOT, start] = costs.of(kind_of(nodes[start])).restore.seconds + replay_s
        if start == 0:
            every[Way.FRESH, start] = costs.fresh.seconds + replay_s
    plan = plan_restore(nodes[-1], idle_at=idle.__contains__, costs=costs, avoid=avoid)
    if not every:
        assert plan is None
        return
    assert plan is not None
    assert abs(plan.cost_s - min(every.values())) < 1e-9
    assert abs(every[plan.way, plan.start.id] - plan.cost_s) < 1e-9
    assert [record.target for record in plan.suffix] == nodes[plan.start.id + 1 :]


def test_a_snapshot_is_preferred_to_a_doubtful_replay() -> None:
    nodes = chain([(0.0, False, False, False, True, False)] * 2 + [(0.0, True, False, False, True, True)])
    for doubtful, way in ((False, Way.IDLE), (True, Way.SNAPSHOT)):
        assert nodes[2].origin is not None
        nodes[2].origin.doubtful = doubtful
        plan = plan_restore(nodes[2], idle_at=lambda node: node is nodes[1], costs=Costs())
        assert plan is not None
        assert plan.way is way
    nodes[2].snapshot = None
    assert plan_restore(nodes[2], idle_at=lambda node: node is nodes[1], costs=Costs()) is not None


def test_the_search_ends_when_replay_costs_more() -> None:
    nodes = chain([(0.1, False, False, False, True, False)] * 1000)
    nodes[-2].snapshot = "s"
    seen: list[int] = []

    def idle_at(node: Node) -> bool:
        seen.append(node.id)
        return False

    plan_restore(nodes[-1], idle_at=idle_at, costs=Costs())
    assert len(seen) <= 3


def test_a_cheap_replay_beats_restoring_live_processes() -> None:
    nodes = chain([(0.0, False, False, False, True, False), (0.1, True, False, False, True, True)])
    dear, cheap = Costs().restored("processes", 0.5), Costs().restored("processes", 0.01)
    for costs, way in ((dear, Way.FRESH), (cheap, Way.SNAPSHOT)):
        plan = plan_restore(nodes[-1], idle_at=lambda _: False, costs=costs)
        assert plan is not None
        assert plan.way is way
