"""Keeps snapshots: takes them while the model thinks, within budgets of bytes."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import structlog

from proxy.storage.records import RecordStore
from proxy.telemetry.counters import Counters
from proxy.tree.restore_plan import RestorePlan, kind_of, plan_restore
from proxy.tree.task import Walkers
from proxy.tree.tree import Node, Tree
from sandboxes.driver import Driver, FrozenState, Sandbox
from sandboxes.errors import NotFreezableError, SandboxError, StateGoneError
from sandboxes.pool.pool import Pool
from sandboxes.pool.roster import Slot
from snapshots.costs import Costs, SnapshotKind
from snapshots.policy import Prospect, Reuse, at_stake_s, expected_uses, victims, why, worth_keeping
from snapshots.snapshot import Snapshot, snapshot_kind
from snapshots.store import SnapshotStore

log = structlog.get_logger()

FindNode = Callable[[int, int], Node | None]
"""Returns the node of a tree id and a node id, None where it is gone."""

_SETTLE_S = 0.02
"""How long a freeze is put off, unless somebody wants the sandbox: drivers put what a call wrote in a layer of its own
anyway, within 5 ms after it. A freeze before that waits for it, at the cost of the answers given meanwhile; one that
comes later takes 0.1 ms (measured, `local`). What is learnt is then what keeping a state adds."""


class Keeper:
    """Takes, lends and evicts snapshots.

    costs: by driver, what ways to a sandbox were measured to cost here. reuse: how often states were wanted again here.
    budget_bytes: of all kept states. checkpoint_bytes: of those with live processes, whose images share nothing.
    """

    def __init__(
        self,
        snapshots: SnapshotStore,
        drivers: Mapping[str, Driver],
        pool: Pool,
        records: RecordStore,
        counts: Counters,
        walkers: Walkers,
        *,
        budget_bytes: int,
        checkpoint_bytes: int,
    ) -> None:
        self._snapshots, self._drivers, self._pool, self._records = snapshots, drivers, pool, records
        self._counts, self._walkers = counts, walkers
        self._budget_bytes, self._checkpoint_bytes = budget_bytes, checkpoint_bytes
        self._freezes: set[asyncio.Task[None]] = set()
        self._failures: Counter[str] = Counter()
        self.used_bytes = 0
        # Of other drivers too: trees may be older than the settings that turned theirs off.
        self.costs = defaultdict(Costs, dict.fromkeys(drivers, Costs()))
        self.reuse = Reuse()

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the kept states with live processes."""
        return sum(snapshot.size_bytes for snapshot in self._snapshots if snapshot.kind == "processes")

    def note_demand(self, node: Node) -> None:
        """Note that a sandbox was wanted at node and none stood there."""
        node.demand += 1
        if node.origin is not None:
            self.reuse = self.reuse.demanded()

    async def give_back(self, slot: Slot, tree: Tree) -> None:
        """End the lease on a sandbox; freeze its state in the background where that is worth it."""
        node = slot.position
        if not isinstance(node, Node) or tree.spec.cache == "never" or not self._worth_freezing(node, tree):
            await self._pool.release(slot)
            return
        self._pool.begin_freeze(slot)
        freeze = asyncio.get_running_loop().create_task(self._freeze(slot, tree, node))
        self._freezes.add(freeze)
        freeze.add_done_callback(self._freezes.discard)

    async def keep_held(self, slot: Slot, tree: Tree, node: Node) -> bool:
        """Freeze the sandbox that is leased at node, and end the lease; False where the snapshot cannot be written.

        Raises:
            NotFreezable: the driver cannot freeze what lives there; the node remembers why.
            SandboxError, OSError: the sandbox failed, and is closed.
        """
        self._pool.begin_freeze(slot)
        async with self._pool.freezing(slot) as sandbox:
            try:
                await self.keep(sandbox, tree, node)
            except NotFreezableError as reason:
                node.unfreezable = str(reason)
                refusal = reason
            else:
                return node.snapshot is not None
        # Raised here, the sandbox goes on.
        raise refusal

    async def keep(self, sandbox: Sandbox, tree: Tree, node: Node) -> None:
        """Freeze what sandbox holds as the snapshot of node, where it stands. One that cannot be written is missed.

        Raises:
            NotFreezable: the driver cannot freeze what lives there.
            SandboxError, OSError: the sandbox failed.
        """
        start = time.perf_counter()
        frozen = await sandbox.freeze()
        cost_s = time.perf_counter() - start
        self._counts.freeze_s.observe(cost_s)
        if node is tree.root and node.state is None:
            tree.set_root_state(frozen.state)
            self._records.save_node(node)
        try:
            # Some hundred microseconds of disk: in a thread, so that hits need not wait for them.
            save = self._snapshots.save
            snapshot = await asyncio.to_thread(save, frozen, tree=tree.id, node=node.id, cost_s=cost_s)
        except OSError as error:
            self._freeze_failed(node, error)
            return
        if node is not tree.root:
            # The root is frozen on the way to an answer, right after a set-up: that tells nothing of the others.
            driver = tree.spec.driver
            self.costs[driver] = self.costs[driver].froze(snapshot_kind(snapshot), time.perf_counter() - start)
        self.used_bytes += snapshot.size_bytes
        self._counts.snapshots += 1
        if node.detached or node.snapshot is not None:
            self._snapshots.drop(snapshot)
        else:
            node.snapshot = snapshot.id

    def restored(self, node: Node, seconds: float) -> None:
        """Note what a restore of node's snapshot took."""
        snapshot = self._snapshots.get(node.snapshot)
        if snapshot is not None:
            snapshot.restore_s = seconds
            self.costs[snapshot.driver] = self.costs[snapshot.driver].restored(snapshot_kind(snapshot), seconds)

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
            raise StateGoneError(f"the snapshot of n{node.id} is damaged: {error}") from error
        except OSError as error:
            raise SandboxError(f"the snapshot of n{node.id} cannot be read: {error}") from error
        snapshot.leases += 1
        snapshot.uses += 1
        try:
            yield frozen
        finally:
            snapshot.leases -= 1

    @contextmanager
    def lent(self, tree: Tree) -> Iterator[list[Snapshot]]:
        """Lend all snapshots of a tree; they are not evicted meanwhile, but may be dropped with their nodes."""
        found = [snapshot for snapshot in self._snapshots if snapshot.tree == tree.id]
        for snapshot in found:
            snapshot.leases += 1
        try:
            yield found
        finally:
            for snapshot in found:
                snapshot.leases -= 1

    def load(self, snapshot: Snapshot) -> FrozenState:
        """Read what a snapshot holds; see `SnapshotStore.load`."""
        return self._snapshots.load(snapshot)

    @property
    def room_bytes(self) -> int:
        """What the budget of kept states has left."""
        return max(0, self._budget_bytes - self.used_bytes)

    def take_in(self, frozen: FrozenState, tree: Tree, node: Node, *, cost_s: float) -> bool:
        """Make a state from elsewhere the snapshot of node; False where it has one, or none can be written."""
        if node.detached or node.snapshot is not None:
            return False
        try:
            snapshot = self._snapshots.save(frozen, tree=tree.id, node=node.id, cost_s=cost_s)
        except OSError as error:
            self._freeze_failed(node, error)
            return False
        self.used_bytes += snapshot.size_bytes
        node.snapshot = snapshot.id
        return True

    def failed(self, node: Node, error: SandboxError) -> None:
        """Note that a restore of node's snapshot failed.

        It is dropped if it is gone, and at its second failure if another way leads to node: where none does, a machine
        that recovers brings it back.
        """
        if node.snapshot is None:
            return
        self._failures[node.snapshot] += 1
        again = self._failures[node.snapshot] > 1
        snapshot = self._snapshots.get(node.snapshot)
        assert snapshot is not None
        if isinstance(error, StateGoneError) or (again and self._way_without(node, snapshot.driver) is not None):
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
        """Evict until the kept states fit their budgets, and free what nothing holds; return how many were evicted."""
        images = [s for s in self._snapshots if s.kind == "processes"]
        excess = sum(image.size_bytes for image in images) - self._checkpoint_bytes
        chosen = victims([self.prospect(s, find(s.tree, s.node)) for s in images], excess_bytes=excess)
        for name in chosen:
            self._evict(name, find)
        evicted = len(chosen)
        self.used_bytes = await self._collect()
        while self.used_bytes > self._budget_bytes:
            excess = self.used_bytes - self._budget_bytes
            chosen = victims([self.prospect(s, find(s.tree, s.node)) for s in self._snapshots], excess_bytes=excess)
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
            self._pool.flush_pending_freezes()
            await asyncio.wait(self._freezes)

    async def _freeze(self, slot: Slot, tree: Tree, node: Node) -> None:
        try:
            async with self._pool.freezing(slot, after_s=_SETTLE_S) as sandbox:
                try:
                    await self.keep(sandbox, tree, node)
                except NotFreezableError as reason:
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

    def prospect(self, snapshot: Snapshot, node: Node | None) -> Prospect:
        """Return what is known of a snapshot's worth. node: where it belongs; None if that is gone."""
        if node is None:
            return Prospect(snapshot.id, 0.0, 0.0, snapshot.size_bytes)
        held = "pinned" if node.pinned else "leased" if snapshot.leases else ""
        return self._describe(node, snapshot.tree, snapshot.driver, snapshot_kind(snapshot), snapshot, held)

    def outlook(self, node: Node, tree: Tree) -> str:
        """Say in words why node's state is kept, or why not."""
        snapshot = self._snapshots.get(node.snapshot)
        if snapshot is not None:
            return f"kept: {why(self.prospect(snapshot, node))}"
        if node.unfreezable:
            return f"not kept: it cannot be frozen: {node.unfreezable}"
        if tree.spec.cache == "never":
            return "not kept: the task's calls are never cached"
        prospect = self._describe(node, tree.id, tree.spec.driver, kind_of(node), None, "")
        if not prospect.reproducible:
            return "not kept, and no replay reaches it: it lives in its sandbox only, if at all"
        cost_s = self.costs[tree.spec.driver].of(kind_of(node)).freeze.seconds
        return f"not kept: {why(prospect)}, and keeping it takes {cost_s:.3g} s; it is rebuilt by replay"

    def _worth_freezing(self, node: Node, tree: Tree) -> bool:
        if node.snapshot is not None or node.detached or node.unfreezable:
            return False
        kind, driver = kind_of(node), tree.spec.driver
        if not node.weighed:
            node.weighed = True
            self.reuse = self.reuse.made(self._behind(node, tree.id))
        prospect = self._describe(node, tree.id, driver, kind, None, "")
        return worth_keeping(prospect, cost_s=self.costs[driver].of(kind).freeze.seconds)

    def _describe(
        self, node: Node, tree_id: int, driver: str, kind: SnapshotKind, snapshot: Snapshot | None, held: str
    ) -> Prospect:
        without = self._way_without(node, driver)
        restore_s = self.costs[driver].of(kind).restore.seconds
        saved_s = 0.0
        if without is not None:
            counts = self._counts
            stake_s = 0.0
            if without.suffix:
                stake_s = at_stake_s(
                    replayed=counts.replayed_calls,
                    diverged=counts.divergences,
                    doubtful=sum(record.doubtful for record in without.suffix),
                )
            saved_s = max(0.0, without.cost_s + stake_s - restore_s)
        return Prospect(
            "" if snapshot is None else snapshot.id,
            saved_s=saved_s,
            uses=expected_uses(self.reuse, behind=self._behind(node, tree_id), visits=node.visits, demand=node.demand),
            size_bytes=0 if snapshot is None else snapshot.size_bytes,
            reproducible=without is not None,
            held=held,
        )

    def _behind(self, node: Node, tree_id: int) -> int:
        """Return how many running rollouts may still come to node: those that stand above it."""
        standing = Counter(rollout.node for rollout in self._walkers.of(tree_id) if rollout.node is not node)
        behind, above = 0, node.origin
        # A path may be long, and most who walk a tree are found on its way up soon, or are none.
        while standing and above is not None:
            behind += standing.pop(above.source, 0)
            above = above.source.origin
        return behind

    def _way_without(self, node: Node, driver: str) -> RestorePlan | None:
        """Return how to get to node without its own snapshot and without luck; None where that is the only way."""
        return plan_restore(node, standing=lambda _: False, costs=self.costs[driver], avoid=(node,))

    def _evict(self, name: str, find: FindNode) -> None:
        snapshot = self._snapshots.get(name)
        if snapshot is not None:
            node = find(snapshot.tree, snapshot.node)
            if node is not None and node.snapshot == name:
                node.snapshot = None
            self._snapshots.drop(snapshot)
