"""Totals of the subtree below each node of a tree.

Summing up a large tree at once would delay every hit, so the event loop does it in slices of a few hundred nodes. Each
slice sees a consistent tree; a node that is added meanwhile may be missing until the totals are computed again.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial

from proxy.control.refreshed import Refreshed
from proxy.tree.task import Walkers
from proxy.tree.tree import Node, Tree, children

_SLICE = 500
"""Nodes that are visited between two turns of the event loop: less than a millisecond."""
_MIN_AGE_S = 0.5
"""Totals are reused for at least this long."""


@dataclass(slots=True)
class NodeTotals:
    """Totals of a node and all of its descendants; `saved_s` is the tool time that hits saved."""

    nodes: int = 1
    hits: int = 0
    seconds: float = 0.0
    saved_s: float = 0.0
    rollouts: int = 0
    snapshots: int = 0
    diverged: int = 0

    def add(self, other: "NodeTotals") -> None:
        """Add the totals of a child."""
        for name in NodeTotals.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class SummedTree:
    """The totals of a tree at one moment."""

    order: list[Node] = field(default_factory=list)  # The tree's nodes, parents before children.
    sums: dict[int, NodeTotals] = field(default_factory=dict)  # By the node's number.

    def of(self, node: Node) -> NodeTotals:
        """Return the totals of a node. A node that is newer than the totals counts by itself."""
        return self.sums.get(node.id) or own(node)


def own(node: Node) -> NodeTotals:
    """Return a node's own share: the call that led there, and the observations recorded there."""
    totals = NodeTotals(snapshots=node.snapshot is not None, diverged=bool(node.diverged))
    records = [record for record in node.records.values() if record.observation]
    if node.origin is not None:
        records.append(node.origin)
    for record in records:
        totals.hits += record.hits
        totals.seconds += record.seconds
        totals.saved_s += record.hits * record.seconds
    return totals


class SubtreeTotals:
    """The totals of the trees that were requested lately."""

    def __init__(self, walkers: Walkers) -> None:
        self._walkers = walkers
        self._trees: dict[Tree, Refreshed[SummedTree]] = {}

    async def of(self, tree: Tree) -> SummedTree:
        """Return a tree's totals, which may be as old as twenty times their computation takes."""
        self._trees = {known: totals for known, totals in self._trees.items() if known is tree or not totals.expired}
        if tree not in self._trees:
            self._trees[tree] = Refreshed(partial(self._sum, tree), min_age_s=_MIN_AGE_S)
        return await self._trees[tree].get()

    async def _sum(self, tree: Tree) -> SummedTree:
        summed = SummedTree()
        stack = [tree.root]
        while stack:
            node = stack.pop()
            summed.order.append(node)
            summed.sums[node.id] = own(node)
            stack.extend(reversed(children(node)))
            if len(summed.order) % _SLICE == 0:
                await asyncio.sleep(0)
        for rollout in self._walkers.of(tree.id):
            if rollout.node.id in summed.sums:
                summed.sums[rollout.node.id].rollouts += 1
        # Children come after their parents, so from the end each node is complete before it is added to its parent.
        for count, node in enumerate(reversed(summed.order), 1):
            if node.origin is not None and node.origin.source.id in summed.sums:
                summed.sums[node.origin.source.id].add(summed.sums[node.id])
            if count % _SLICE == 0:
                await asyncio.sleep(0)
        return summed
