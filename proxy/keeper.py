"""Keeps snapshots: takes them while the model thinks, within a budget of bytes."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import structlog

from proxy.counts import Counts
from proxy.plan import Costs, RestorePlan, plan_restore
from proxy.store import Store
from proxy.tree import Node, Tree
from sandboxes.driver import Driver, FrozenState, NotFreezable, Sandbox, SandboxError, StateGone
from sandboxes.pool import Pool
from sandboxes.roster import Slot
from snapshots.policy import FREEZE_S, Prospect, victims, worth_keeping
from snapshots.snapshot import Snapshot
from snapshots.store import SnapshotStore

log = structlog.get_logger()

FindNode = Callable[[int, int], Node | None]
"""Returns the node of a tree id and a node id, None where it is gone."""


class Keeper:
    """Takes, lends and evicts snapshots. `costs` is what ways to a sandbox were measured to cost here."""

    def __init__(
        self,
        snapshots: SnapshotStore,
        drivers: Mapping[str, Driver],
        pool: Pool,
        store: Store,
        counts: Counts,
        *,
        budget_bytes: int,
    ) -> None:
        self._snapshots, self._drivers, self._pool, self._store = snapshots, drivers, pool, store
        self._counts, self._budget_bytes = counts, budget_bytes
        self._freezes: set[asyncio.Task[None]] = set()
        self._failures: Counter[str] = Counter()
        self._freeze_s = FREEZE_S
        self.used_bytes = 0
        self.costs = Costs()

    async def give_back(self, slot: Slot, tree: Tree) -> None:
        """End the lease on a sandbox; freeze its state in the background where that is worth it."""
        node = slot.place
        if not isinstance(node, Node) or tree.spec.cache == "never" or not self._wanted(node):
            await self._pool.release(slot)
            return
        self._pool.hold_still(slot)
        freeze = asyncio.get_running_loop().create_task(self._freeze(slot, tree, node))
        self._freezes.add(freeze)
        freeze.add_done_callback(self._freezes.discard)

    async def keep(self, sandbox: Sandbox, tree: Tree, node: Node) -> None:
        """Freeze what sandbox holds as the snapshot of node, where it stands. One that cannot be written is missed.

        Raises:
            NotFreezable: processes live.
            SandboxError, OSError: the sandbox failed.
        """
        start = time.perf_counter()
        frozen = await sandbox.freeze()
        cost_s = time.perf_counter() - start
        self._freeze_s += 0.1 * (cost_s - self._freeze_s)
        if node is tree.root and node.state is None:
            tree.know_root(frozen.state)
            self._store.save_node(node)
        try:
            # Some hundred microseconds of disk: in a thread, so that hits need not wait for them.
            save = self._snapshots.save
            snapshot = await asyncio.to_thread(save, frozen, tree=tree.id, node=node.id, cost_s=cost_s)
        except OSError as error:
            self._freeze_failed(node, error)
            return
        self.used_bytes += snapshot.size_bytes
        self._counts.snapshots += 1
        if node.detached or node.snapshot is not None:
            self._snapshots.drop(snapshot)
        else:
            node.snapshot = snapshot.id

    @contextmanager
    def leased(self, node: Node) -> Iterator[FrozenState]:
        """Lend node's snapshot; it is not evicted meanwhile.

        Raises:
            StateGone: its files are gone or damaged.
            SandboxError: they cannot be read now.
        """
        snapshot = self._snapshots.get(node.snapshot)
        assert snapshot is not None
        try:
            frozen = self._snapshots.load(snapshot)
        except (FileNotFoundError, ValueError) as error:
            raise StateGone(f"the snapshot of n{node.id} is damaged: {error}") from error
        except OSError as error:
            raise SandboxError(f"the snapshot of n{node.id} cannot be read: {error}") from error
        snapshot.leases += 1
        snapshot.uses += 1
        try:
            yield frozen
        finally:
            snapshot.leases -= 1

    def failed(self, node: Node, error: SandboxError) -> None:
        """Note that a restore of node's snapshot failed.

        It is dropped if it is gone, and at its second failure if another way leads to node: where none does, a machine
        that recovers brings it back.
        """
        if node.snapshot is None:
            return
        self._failures[node.snapshot] += 1
        again = self._failures[node.snapshot] > 1
        if isinstance(error, StateGone) or (again and self._way_without(node) is not None):
            self.drop(node)

    def drop(self, node: Node) -> None:
        """Give node's snapshot up."""
        snapshot = self._snapshots.get(node.snapshot)
        node.snapshot = None
        if snapshot is not None:
            self._failures.pop(snapshot.id, None)
            self._snapshots.drop(snapshot)

    def reattach(self, tree: Tree) -> None:
        """Tell a tree that was read back which of its nodes have snapshots; drop those of nodes that are gone."""
        for snapshot in self._snapshots:
            if snapshot.tree == tree.id:
                node = tree.nodes.get(snapshot.node)
                if node is None or node.snapshot is not None:
                    self._snapshots.drop(snapshot)
                else:
                    node.snapshot = snapshot.id

    def drop_tree(self, tree_id: int) -> None:
        """Give up every snapshot of a tree."""
        for snapshot in self._snapshots:
            if snapshot.tree == tree_id:
                self._snapshots.drop(snapshot)

    async def fit(self, find: FindNode) -> int:
        """Evict until the kept states fit their budget, and free what nothing holds; return how many were evicted."""
        evicted = 0
        self.used_bytes = await self._collect()
        while self.used_bytes > self._budget_bytes:
            excess = self.used_bytes - self._budget_bytes
            chosen = victims([self._prospect(s, find) for s in self._snapshots], excess_bytes=excess)
            if not chosen:
                log.warning("snapshots exceed their budget and none may go", bytes=self.used_bytes)
                break
            for name in chosen:
                self._evict(name, find)
            evicted += len(chosen)
            self.used_bytes = await self._collect()
        self._counts.evictions += evicted
        return evicted

    async def drain(self) -> None:
        """Wait for the freezes under way."""
        while self._freezes:
            await asyncio.wait(self._freezes)

    async def _freeze(self, slot: Slot, tree: Tree, node: Node) -> None:
        try:
            async with self._pool.freezing(slot) as sandbox:
                try:
                    await self.keep(sandbox, tree, node)
                except NotFreezable as reason:
                    # It is in the state, not in the moment: the next sandbox that stands here is not asked again.
                    node.unfreezable = str(reason)
        except (SandboxError, OSError) as error:
            self._freeze_failed(node, error)

    def _freeze_failed(self, node: Node, error: Exception) -> None:
        self._counts.failure("freeze")
        log.warning("freeze failed", node=node.id, error=str(error))

    async def _collect(self) -> int:
        parts = [part for snapshot in self._snapshots for part in snapshot.parts]
        return sum([await driver.collect(parts) for driver in self._drivers.values()])

    def _wanted(self, node: Node) -> bool:
        if node.snapshot is not None or node.detached or node.unfreezable:
            return False
        return worth_keeping(self._describe(node, "", size_bytes=0, protected=False), cost_s=self._freeze_s)

    def _prospect(self, snapshot: Snapshot, find: FindNode) -> Prospect:
        node = find(snapshot.tree, snapshot.node)
        if node is None:
            return Prospect(snapshot.id, 0.0, 0, 0, snapshot.size_bytes)
        protected = snapshot.leases > 0 or node.pinned
        return self._describe(node, snapshot.id, size_bytes=snapshot.size_bytes, protected=protected)

    def _describe(self, node: Node, name: str, *, size_bytes: int, protected: bool) -> Prospect:
        without = self._way_without(node)
        return Prospect(
            name,
            replay_s=without.cost_s if without is not None else 0.0,
            passes=node.passes,
            live=sum(1 for _ in self._pool.roster.at(node)),
            size_bytes=size_bytes,
            reproducible=without is not None,
            protected=protected,
        )

    def _way_without(self, node: Node) -> RestorePlan | None:
        """Return how to get to node without its own snapshot and without luck; None where that is the only way."""
        return plan_restore(node, standing=lambda _: False, costs=self.costs, avoid=(node,))

    def _evict(self, name: str, find: FindNode) -> None:
        snapshot = self._snapshots.get(name)
        if snapshot is not None:
            node = find(snapshot.tree, snapshot.node)
            if node is not None and node.snapshot == name:
                node.snapshot = None
            self._snapshots.drop(snapshot)
