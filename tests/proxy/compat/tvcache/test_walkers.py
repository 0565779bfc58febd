"""The rollouts that count the calls of clients whose requests name none."""

from itertools import count
from types import SimpleNamespace
from typing import Any, cast

from proxy.compat.tvcache.walkers import ChainWalkers
from proxy.execution.call_order import CallOrder
from proxy.lifecycle import Lifecycle


def test_a_rollout_in_the_middle_of_a_step_is_not_moved() -> None:
    """A step may wait for the log of a cluster. A request beside it gets another rollout, and none is forgotten."""
    numbers, tree = count(), SimpleNamespace(root=None)
    order = CallOrder()

    def begin(_task: Any, name: str, tree: Any, node: Any, *, labels: Any) -> Any:
        return SimpleNamespace(id=next(numbers), name=name, tree=tree, node=node, labels=labels, finished=False)

    context = SimpleNamespace(
        lifecycle=Lifecycle(), step=SimpleNamespace(order=order),
        tasks=SimpleNamespace(rollouts=SimpleNamespace(begin=begin)),
    )  # fmt: skip
    walkers, task = ChainWalkers(cast("Any", context)), cast("Any", SimpleNamespace(name="t", tree=tree))

    def at(node: str) -> Any:
        return walkers.at(task, "client", {}, cast("Any", node))

    first = at("a")
    order.expect(first)
    second = at("b")
    assert (first.node, second.node) == ("a", "b")
    order.expected(first)
    assert at("c") is first
    assert [each.rollout for each in walkers._walkers.values()] == [first, second]
