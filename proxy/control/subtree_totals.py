"""What lies below each node of a tree, summed up in slices between which calls are answered."""

import asyncio
import time
from dataclasses import dataclass, field

from proxy.tree.task import Walkers
from proxy.tree.tree import Node, Tree, children

_SLICE = 500
_SHARE = 20
"""A sum is used for so many times as long as making it took: a page that polls costs 5 % of a core at most."""
_LEAST_S = 0.5


@dataclass(slots=True)
class NodeTotals:
    """Of a node and all that came from it. saved_s: seconds that answers given again did not take."""

    nodes: int = 1
    hits: int = 0
    seconds: float = 0.0
    saved_s: float = 0.0
    rollouts: int = 0
    snapshots: int = 0
    diverged: int = 0

    def add(self, other: "NodeTotals") -> None:
        self.nodes += other.nodes
        self.hits += other.hits
        self.seconds += other.seconds
        self.saved_s += other.saved_s
        self.rollouts += other.rollouts
        self.snapshots += other.snapshots
        self.diverged += other.diverged


@dataclass(slots=True)
class SummedTree:
    """The sums of one tree at one moment, with its nodes, parents before children."""

    order: list[Node] = field(default_factory=list)
    sums: dict[int, NodeTotals] = field(default_factory=dict)
    until: float = 0.0

    def of(self, node: Node) -> NodeTotals:
        """Return the sum of a node; one that is newer than the sums stands for itself."""
        return self.sums.get(node.id) or own(node)


def own(node: Node) -> NodeTotals:
    """Return what a node counts by itself: the call that led there, and those that changed nothing there."""
    found = NodeTotals(snapshots=node.snapshot is not None, diverged=bool(node.diverged))
    records = [record for record in node.records.values() if record.observation]
    if node.origin is not None:
        records.append(node.origin)
    for record in records:
        found.hits += record.hits
        found.seconds += record.seconds
        found.saved_s += record.hits * record.seconds
    return found


class SubtreeTotals:
    """Those of the trees that somebody looks at."""

    def __init__(self, walkers: Walkers) -> None:
        self._walkers = walkers
        self._known: dict[Tree, SummedTree] = {}
        self._making: dict[Tree, asyncio.Task[SummedTree]] = {}

    async def of(self, tree: Tree) -> SummedTree:
        """Return a tree's sums, not much older than making them takes."""
        now = time.monotonic()
        for other in [other for other, summed in self._known.items() if summed.until < now and other is not tree]:
            del self._known[other]
        known = self._known.get(tree)
        if known is not None and known.until > now:
            return known
        making = self._making.get(tree)
        if making is None:
            making = asyncio.get_running_loop().create_task(self._make(tree))
            self._making[tree] = making
            making.add_done_callback(lambda _: self._making.pop(tree, None))
        return await asyncio.shield(making)

    async def _make(self, tree: Tree) -> SummedTree:
        began = time.monotonic()
        made = SummedTree()
        stack = [tree.root]
        while stack:
            node = stack.pop()
            made.order.append(node)
            made.sums[node.id] = own(node)
            stack.extend(reversed(children(node)))
            if len(made.order) % _SLICE == 0:
                await asyncio.sleep(0)
        for rollout in self._walkers.of(tree.id):
            if rollout.node.id in made.sums:
                made.sums[rollout.node.id].rollouts += 1
        for at, node in enumerate(reversed(made.order), 1):
            if node.origin is not None and node.origin.source.id in made.sums:
                made.sums[node.origin.source.id].add(made.sums[node.id])
            if at % _SLICE == 0:
                await asyncio.sleep(0)
        ended = time.monotonic()
        made.until = ended + max(_LEAST_S, _SHARE * (ended - began))
        self._known[tree] = made
        return made
