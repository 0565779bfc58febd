"""The planner against every way there is."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.canonical import CallKey
from proxy.plan import Costs, Way, plan_restore
from proxy.tree import Node, Record
from sandboxes.effects import Effect

Link = tuple[float, bool, bool, bool, bool]
links = st.lists(
    st.tuples(st.floats(0, 2), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 9).map(lambda n: n > 0)),
    min_size=1,
    max_size=8,
)


def chain(described: list[Link]) -> list[Node]:
    """Return a path, root first. A link: the seconds of its call, then snapshot, standing, avoided, reproducible."""
    nodes = [Node(0)]
    for number, (seconds, snapshot, _, _, reproducible) in enumerate(described[1:], start=1):
        node = Node(number, snapshot="s" if snapshot else None)
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
        replay_s = sum(record.seconds + costs.replay_overhead_s for record in suffix)
        if nodes[start] in standing:
            every[Way.STANDING, start] = costs.standing_s + replay_s
        if nodes[start].snapshot is not None and nodes[start] not in avoid:
            every[Way.SNAPSHOT, start] = costs.restore_s + replay_s
        if start == 0:
            every[Way.FRESH, start] = costs.fresh_s + replay_s
    plan = plan_restore(nodes[-1], standing=standing.__contains__, costs=costs, avoid=avoid)
    if not every:
        assert plan is None
        return
    assert plan is not None
    assert abs(plan.cost_s - min(every.values())) < 1e-9
    assert abs(every[plan.way, plan.start.id] - plan.cost_s) < 1e-9
    assert [record.target for record in plan.suffix] == nodes[plan.start.id + 1 :]


def test_a_plan_walks_no_further_up_than_it_can_pay_off() -> None:
    nodes = chain([(0.1, False, False, False, True)] * 1000)
    nodes[-2].snapshot = "s"
    seen: list[int] = []

    def standing(node: Node) -> bool:
        seen.append(node.id)
        return False

    plan_restore(nodes[-1], standing=standing, costs=Costs())
    assert len(seen) <= 3
