"""The trees in memory: each is read back from the store when it is first needed.

A full collection of Python's garbage collector would hold up every hit: it looks at every node and record, and nothing
else runs. So trees are *frozen* (`gc.freeze`): not looked at, and freed all the same when nothing refers to them. Only
circles are not freed, such as the nodes of a closed tree: when many may have gathered, all is thawed and collected.
"""

import asyncio
import gc
import time
from collections.abc import Iterator
from itertools import count

from proxy.storage.trees import TreeStore
from proxy.tree.tree import Node, Tree
from sandboxes.spec import EnvironmentSpec
from snapshots.cache import SnapshotCache

_SLICES_FROZEN = 40
"""Slices of a tree that is read back after which its objects are frozen. Each is 50 rows."""
FREEZE_RECORDS = 4_000
"""Nodes and records that are frozen at once, after a collection."""
THAW_RECORDS = 50_000
"""Least nodes and records that have been dropped before all is thawed; they take some 50 MB."""
THAW_SHARE = 0.5
"""Share of the nodes and records in memory that have been dropped before all is thawed.

A collection then costs each dropped record what it would cost two that stay.
"""


class OpenTrees:
    """Trees by number. Every room sees the same object for a tree, so a change is seen at once."""

    def __init__(self, store: TreeStore, cache: SnapshotCache) -> None:
        self._store, self._cache = store, cache
        self._trees: dict[int, Tree] = {}
        # When each was last named by its number, on the monotonic clock.
        self._named_at: dict[int, float] = {}
        # Trees that `read_back` reads and that have not been in memory since it began.
        self._reading: set[int] = set()
        self._closed = 0

    def __iter__(self) -> Iterator[Tree]:
        """Iterate over a copy of the trees in memory."""
        # A copy, because callers await between trees, and a tree may be opened or closed meanwhile.
        return iter(tuple(self._trees.values()))

    @property
    def size(self) -> int:
        """Number of nodes and records in memory, and of those that trees in memory have forgotten."""
        return sum(tree.size for tree in self._trees.values())

    @property
    def added(self) -> int:
        """Number of nodes and records that have come into memory. Only grows."""
        return self.size + self._closed

    @property
    def dropped(self) -> int:
        """Number of nodes and records that have left memory, with their trees or by themselves. Only grows."""
        return self._closed + sum(tree.forgotten for tree in self._trees.values())

    def get(self, tree_id: int) -> Tree | None:
        """Return a tree that is in memory; None if it would have to be read back."""
        return self._trees.get(tree_id)

    def exists(self, tree_id: int) -> bool:
        """Return whether there is such a tree, in memory or not."""
        return tree_id in self._trees or self._store.exists(tree_id)

    def load(self, tree_id: int) -> Tree:
        """Return a tree that exists in the store."""
        tree = self._trees.get(tree_id)
        self._named_at[tree_id] = time.monotonic()
        return self._keep(self._store.load(tree_id)) if tree is None else tree

    def unnamed_since(self, at: float) -> list[Tree]:
        """Return the trees in memory that nobody named since, the first ones first; at is on the monotonic clock."""
        named = sorted((named_at, tree_id) for tree_id, named_at in self._named_at.items() if named_at <= at)
        return [self._trees[tree_id] for _, tree_id in named]

    async def read_back(self, tree_id: int) -> None:
        """Bring a tree into memory, as `load` does, while hits are answered. Raises DamagedError for its root."""
        if tree_id in self._trees:
            return
        self._reading.add(tree_id)
        try:
            steps = self._store.loading(tree_id)
            for number in count(1):
                try:
                    next(steps)
                except StopIteration as end:
                    # A tree that was in memory meanwhile may have got records that the slices before lack.
                    if tree_id in self._reading and self._store.exists(tree_id):
                        self._keep(end.value)
                    return
                if number % _SLICES_FROZEN == 0:
                    # A full collection amid a large tree would hold up hits. This one looks at the newest objects only.
                    gc.collect(1)
                    gc.freeze()
                await asyncio.sleep(0)
        finally:
            self._reading.discard(tree_id)

    def node(self, tree_id: int, node_id: int) -> Node | None:
        """Return a node of any tree; None if the node or its tree was deleted."""
        # The store is queried first: `load` requires that the tree exists.
        if not self.exists(tree_id):
            return None
        return self.load(tree_id).nodes.get(node_id)

    def open(self, task: str, key: str, spec: EnvironmentSpec) -> Tree:
        """Return the tree of a task under this root key, which is created if the store has none."""
        # The number 0 is no tree's, so an unknown key finds nothing.
        tree = self._trees.get(self._store.id_of(task, key, spec) or 0)
        if tree is None:
            tree = self._keep(self._store.open(task, key, spec))
        if spec.shared:
            # The store remembers which tasks share a tree, so that deleting one of the tasks keeps it.
            self._store.share(task, tree.id)
            # Specs with one root key may name their databases at different addresses; the newest one surely works.
            tree.spec = spec
        return tree

    def close(self, tree_id: int) -> Tree | None:
        """Remove a tree from memory and return it; None if it was not there."""
        tree = self._trees.pop(tree_id, None)
        self._named_at.pop(tree_id, None)
        self._closed += 0 if tree is None else tree.size
        return tree

    def _keep(self, tree: Tree) -> Tree:
        self._trees[tree.id] = tree
        self._named_at[tree.id] = time.monotonic()
        self._reading.discard(tree.id)
        # Snapshots outlive the process; their nodes have just become objects again.
        self._cache.reattach(tree.id, tree.nodes)
        return tree


class Collector:
    """Decides when the trees in memory are frozen and thawed. One a process, like the garbage collector itself."""

    def __init__(self, trees: OpenTrees) -> None:
        self._trees = trees
        self._frozen, self._dropped = 0, 0

    async def settle(self) -> None:
        """Freeze what was recorded since the last time, if it is much."""
        added, dropped = self._trees.added, self._trees.dropped
        thaws = dropped - self._dropped >= max(THAW_RECORDS, THAW_SHARE * (added - dropped))
        if thaws:
            gc.unfreeze()
            self._dropped = dropped
        if thaws or added - self._frozen >= FREEZE_RECORDS:
            # Garbage that is frozen would stay.
            gc.collect()
            gc.freeze()
            self._frozen = added
