"""The trees in memory: each is read back from the store when it is first needed.

A full collection of Python's garbage collector would hold up every hit: it looks at every node and record, and nothing
else runs. So trees are *frozen* (`gc.freeze`): not looked at, and freed all the same when nothing refers to them. Only
circles are not freed, such as the nodes of a closed tree: when many may have gathered, all is thawed and collected.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from proxy.storage.errors import NotWholeError
from proxy.storage.tree_reading import TreeReading
from proxy.storage.trees import TreeStore
from proxy.tree.tree import Node, Tree
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import TaskOwner
from snapshots.cache import SnapshotCache
from snapshots.snapshot import Snapshot

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


@dataclass(frozen=True, slots=True)
class _Reading:
    """A tree that is read back, and the task that reads its slices."""

    slices: TreeReading
    end: asyncio.Task[None]


class OpenTrees:
    """Trees by number. Every room sees the same object for a tree, so a change is seen at once."""

    def __init__(self, store: TreeStore, cache: SnapshotCache, snapshots: Callable[[int], Iterable[Snapshot]]) -> None:
        """Create an empty registry; `snapshots` returns those of a tree's nodes."""
        self._store, self._cache, self._snapshots = store, cache, snapshots
        self._trees: dict[int, Tree] = {}
        # When each was last named by its number, on the monotonic clock.
        self._named_at: dict[int, float] = {}
        # The trees that are not whole yet, by number.
        self._readings: dict[int, _Reading] = {}
        self._tasks = TaskOwner()
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
        """Return a tree that exists in the store. Holds up all hits while it reads one that is not in memory."""
        tree = self._trees.get(tree_id)
        if tree is not None:
            self._named_at[tree_id] = time.monotonic()
            return tree
        begun = self._readings.get(tree_id)
        slices = self._store.reading(tree_id) if begun is None else begun.slices
        while slices.step():
            pass
        return self._keep(slices)

    def unnamed_since(self, at: float) -> list[Tree]:
        """Return the trees in memory that nobody named since, the first ones first; at is on the monotonic clock."""
        named = sorted((named_at, tree_id) for tree_id, named_at in self._named_at.items() if named_at <= at)
        return [self._trees[tree_id] for _, tree_id in named]

    @property
    def are_whole(self) -> bool:
        """Whether no tree is being read back."""
        return not self._readings

    async def read_back(self, tree_id: int) -> None:
        """Bring a tree into memory, as `load` does, while hits are answered. Raises DamagedError for its root."""
        if tree_id not in self._trees:
            await asyncio.shield(self._read(tree_id).end)

    async def whole(self, tree: Tree) -> None:
        """Wait until a tree has all nodes and records of the store. Raises StoreError if they cannot be read."""
        if tree.unread is not None:
            reading = self._readings.get(tree.id)
            if reading is None or reading.slices.tree is not tree:
                raise NotWholeError
            await asyncio.shield(reading.end)

    def begin(self, tree_id: int, nodes: Iterable[int], failed: Callable[[], object]) -> bool:
        """Begin to bring a tree into memory; return whether rollouts at these nodes can go on before it is whole.

        `failed` is called if the tree cannot be read; whatever names it then has to open it again.
        """
        if tree_id in self._trees:
            return True
        reading = self._read(tree_id)
        known = [reading.slices.node(number) for number in nodes]
        if not reading.slices.tells or any(node is None or node.state is None for node in known):
            return False
        reading.end.add_done_callback(lambda end: failed() if end.cancelled() or end.exception() else None)
        return True

    async def aclose(self) -> None:
        """Read nothing back any more."""
        await self._tasks.end()

    def _read(self, tree_id: int) -> _Reading:
        reading = self._readings.get(tree_id)
        if reading is None:
            kept = {snapshot.node: snapshot for snapshot in self._snapshots(tree_id)}

            def attach(node: Node) -> None:
                if (snapshot := kept.get(node.id)) is not None:
                    node.snapshot, node.kept_age_s = snapshot.id, snapshot.age_s

            slices = self._store.reading(tree_id, attach)
            reading = _Reading(slices, self._tasks.spawn("read back", self._finish(slices), awaited=True))
            self._readings[tree_id] = reading
        return reading

    async def _finish(self, slices: TreeReading) -> None:
        tree_id = slices.tree.id

        def is_ours() -> bool:
            # `load` may have read it to its end meanwhile, or it was closed.
            reading = self._readings.get(tree_id)
            return reading is not None and reading.slices is slices

        try:
            for number in count(1):
                if not slices.step():
                    break
                if number % _SLICES_FROZEN == 0:
                    # A full collection amid a large tree would hold up hits. This one looks at the newest objects only.
                    gc.collect(1)
                    gc.freeze()
                await asyncio.sleep(0)
            if is_ours() and self._store.exists(tree_id):
                self._keep(slices)
        finally:
            if is_ours():
                del self._readings[tree_id]

    def node(self, tree_id: int, node_id: int) -> Node | None:
        """Return a node of any tree; None if the node or its tree was deleted."""
        # The store is queried first: `load` requires that the tree exists.
        if not self.exists(tree_id):
            return None
        return self.load(tree_id).nodes.get(node_id)

    def open(self, task: str, key: str, spec: EnvironmentSpec) -> Tree:
        """Return the tree of a task under this root key, which is created if the store has none."""
        known = self._store.id_of(task, key, spec)
        tree = self._add(self._store.open(task, key, spec)) if known is None else self.opened(known)
        if spec.shared:
            # The store remembers which tasks share a tree, so that deleting one of the tasks keeps it.
            self._store.share(task, tree.id)
            # Specs with one root key may name their databases at different addresses; the newest one surely works.
            tree.spec = spec
        return tree

    def opened(self, tree_id: int) -> Tree:
        """Return a tree that exists in the store; one that is being read back as it is, if calls may be answered."""
        reading = self._readings.get(tree_id)
        return self.load(tree_id) if reading is None or not reading.slices.tells else reading.slices.tree

    def close(self, tree_id: int) -> Tree | None:
        """Remove a tree from memory and return it; None if it was not there."""
        self._readings.pop(tree_id, None)
        tree = self._trees.pop(tree_id, None)
        self._named_at.pop(tree_id, None)
        self._closed += 0 if tree is None else tree.size
        return tree

    def _keep(self, slices: TreeReading) -> Tree:
        tree = slices.tree
        self._readings.pop(tree.id, None)
        # Snapshots outlive the process; their nodes have just become objects again.
        for node in slices.ahead:
            node.snapshot = None
        self._cache.reattach(tree.id, tree.nodes)
        return self._add(tree)

    def _add(self, tree: Tree) -> Tree:
        self._trees[tree.id] = tree
        self._named_at[tree.id] = time.monotonic()
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
