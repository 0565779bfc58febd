"""The snapshot cache: which snapshot belongs to which node, which restores hold it, and when it is evicted.

A snapshot is attached to its node (1), leased by restores (2), dropped after failures (3), and evicted when one of two
byte budgets is exceeded (4): one for all snapshots, and one for images of live processes. The steps are numbered below.

Owners of trees may have budgets of their own, of the bytes that their snapshots added.

An eviction costs time and never an answer. What goes first are snapshots of states that a replay has reached before.
Others are given time to be proven, until half of the room above the budget is used (`PATIENCE`). Then those go that no
running rollout needs: no rollout is led to their states any more before one of them has made the call again. What is
needed stays (`full`). Beyond a hard bound no further snapshot is taken (`accepts`), and none is given up for another.
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

import structlog

from sandboxes.driver import Driver, FrozenState
from sandboxes.errors import SandboxError, StateGoneError
from snapshots.costs import Costs, SnapshotKind
from snapshots.failures import RestoreFailures
from snapshots.policy import Prospect, unneeded, unproven, victims
from snapshots.snapshot import Snapshot, StateNode, snapshot_kind
from snapshots.store import SnapshotStore

log = structlog.get_logger()

HARD_SHARE = 1.25
"""Share of a budget beyond which no snapshot is taken, whatever could still be evicted: the bound on the disk.
Evictions follow freezes by some seconds and proofs by minutes. Nearer to 1, more states go without a snapshot
meanwhile. Farther from it, the disk must have more room than the budgets say."""
PATIENCE = 0.5
"""Share of the room between a budget and its hard bound that is left to states that wait for their proofs. A proof
takes seconds, and with 50 new states of 200 kB a second the least room lasts half a minute."""
HARD_BYTES = 256 << 20
"""Least room between a budget and its hard bound, in bytes, so that a small budget does not refuse the only ways."""


class SnapshotCounters(Protocol):
    """Totals that the snapshot rooms count. `proxy.telemetry.counters.Counters` has them."""

    snapshots_taken: int
    evictions: int

    @property
    def freeze_s(self) -> "Durations":
        """How long freezes took."""
        ...

    def failure(self, kind: str) -> None:
        """Count a failure of the machine."""
        ...


class Durations(Protocol):
    """Collects durations, as a histogram does."""

    def observe(self, seconds: float) -> None:
        """Add a duration."""
        ...


class Judge(Protocol):
    """Knows what snapshots are worth. `proxy.execution.snapshot_value.SnapshotValue` does."""

    async def read_back(self, snapshots: list[Snapshot]) -> bool:
        """Bring some of the trees of these snapshots into memory that are not there; return whether there were any."""
        ...

    def prospects(self, snapshots: list[Snapshot]) -> list[Prospect]:
        """Return what is known of the snapshots whose nodes are in memory, or have been forgotten."""
        ...

    def node(self, snapshot: Snapshot) -> StateNode | None:
        """Return the node of a snapshot; None if it is not in memory or has been forgotten."""
        ...

    def give_up(self, snapshot: Snapshot) -> None:
        """Lead no rollout to the node of a snapshot that goes, because no other way to it is known."""
        ...


class DiskQuota(NamedTuple):
    """The owner of some trees, and the most bytes that their snapshots may add to the disk; infinite for no limit."""

    owner: str
    most_bytes: float


class SnapshotCache:
    """Attaches snapshots to nodes, lends them for restores, and evicts them when their budgets are exceeded."""

    def __init__(
        self,
        store: SnapshotStore,
        drivers: Mapping[str, Driver],
        counters: SnapshotCounters,
        *,
        budget_bytes: int,
        checkpoint_bytes: int,
        quota_of: Callable[[int], DiskQuota | None] = lambda _: None,
    ) -> None:
        """Keep snapshots of a store within the budgets; `quota_of` names a tree's owner, if it has one."""
        self._store, self._drivers, self._counters = store, drivers, counters
        self._budget_bytes, self._checkpoint_bytes, self._quota_of = budget_bytes, checkpoint_bytes, quota_of
        # Bytes that the snapshots of each owner's trees have added, as last counted, with what was added since.
        self.owned = Counter[DiskQuota]()
        self.failures = RestoreFailures(store)  # The restores that failed.
        # Bytes that all snapshots take, as the drivers last counted them, with what was added since.
        self.used_bytes = 0
        # Names of the snapshots that can be evicted once a replay has reached their states, least value first; as of
        # the last `fit` that found too little to evict.
        self.unproven: list[str] = []
        # Budgets that states exceed which rollouts need, or which are held: kinds of snapshots, and owners (@name).
        self.full: set[str] = set()
        self._hopeless: set[str] = set()
        self._fitting = asyncio.Lock()
        # A tree may be older than the settings that turned its driver off, so any name has costs.
        # By driver, what freezing, restoring, starting and replaying cost here (see `snapshots.costs`).
        self.costs = defaultdict(Costs, dict.fromkeys(drivers, Costs()))

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the snapshots that hold live processes."""
        return self._store.checkpoint_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that the budget for all snapshots has left."""
        # Never negative: freezes add to the total before the next `fit` evicts.
        return max(0, self._budget_bytes - self.used_bytes)

    def accepts(self, kind: SnapshotKind, tree: int | None = None) -> bool:
        """Return whether a further snapshot of this kind may be taken; pins and roots are taken all the same.

        With a tree, its owner's budget counts too. What rollouts would be lost without is kept beyond that.
        """
        # Files count towards the budget for all snapshots, images towards both.
        if self.used_bytes > _hard_bound(self._budget_bytes):
            return False
        quota = None if tree is None else self._quota_of(tree)
        if quota is not None and self.owned[quota] > _hard_bound(quota.most_bytes):
            return False
        return kind == "files" or self.checkpoint_bytes <= _hard_bound(self._checkpoint_bytes)

    def give_up(self, name: str) -> None:
        """Note that no replay can be made to the state of a snapshot, so that nothing waits for its proof."""
        self._hopeless.add(name)

    @property
    def over_budget(self) -> bool:
        """Whether `fit` has something to evict."""
        is_over_quota = any(used_bytes > quota.most_bytes for quota, used_bytes in self._count_owned().items())
        return is_over_quota or self.used_bytes > self._budget_bytes or self.checkpoint_bytes > self._checkpoint_bytes

    @property
    def crowded(self) -> bool:
        """Whether `fit` has something to evict that no proof is waited for any more (`PATIENCE`)."""
        budgets = ((self.used_bytes, self._budget_bytes), (self.checkpoint_bytes, self._checkpoint_bytes))
        return any(used > budget + PATIENCE * (_hard_bound(budget) - budget) for used, budget in budgets)

    def of(self, node: StateNode) -> Snapshot | None:
        """Return the snapshot of a node; None if it has none."""
        return self._store.get(node.snapshot)

    def save(self, frozen: FrozenState, *, tree: int, node: int, cost_s: float, age_s: float = 0.0) -> Snapshot:
        """Write a frozen state to disk; see `SnapshotStore.save`."""
        return self._store.save(frozen, tree=tree, node=node, cost_s=cost_s, age_s=age_s)

    def load(self, snapshot: Snapshot) -> FrozenState:
        """Read what a snapshot holds; see `SnapshotStore.load`."""
        return self._store.load(snapshot)

    def attach(self, snapshot: Snapshot, node: StateNode) -> bool:
        """Make a saved snapshot the node's; drop it and return False if the node is forgotten or has one already."""
        # Counted even if it is dropped here: the driver still holds its storage until the next `collect`.
        self.used_bytes += snapshot.size_bytes
        if (quota := self._quota_of(snapshot.tree)) is not None:
            self.owned[quota] += snapshot.size_bytes
        # During the freeze the node may have been forgotten, or another sandbox at it may have been frozen. Between
        # `save` and this line an eviction may have chosen the snapshot: a node must not name one that is gone.
        if node.detached or node.snapshot is not None or self._store.get(snapshot.id) is None:
            self._store.drop(snapshot)
            return False
        # 1. A node has at most one snapshot. It holds the id and not the object: the store decides whether it still
        # exists.
        node.snapshot, node.kept_age_s = snapshot.id, snapshot.age_s
        return True

    def reattach(self, tree: int, nodes: Mapping[int, StateNode]) -> None:
        """Attach the snapshots on disk to the nodes of a tree that was read back; drop those of missing nodes."""
        for snapshot in self._store.of_tree(tree):
            node = nodes.get(snapshot.node)
            # A node that was forgotten just before a crash may have left its snapshot on disk.
            # A second snapshot of one node comes from a kill between saving it and attaching it.
            if node is None or node.snapshot is not None:
                self._store.drop(snapshot)
            else:
                node.snapshot, node.kept_age_s = snapshot.id, snapshot.age_s

    @contextmanager
    def leased(self, node: StateNode) -> Iterator[FrozenState]:
        """Lend the snapshot of a node for a restore; it is not evicted inside the block. StateGoneError if damaged."""
        snapshot = self.of(node)
        assert snapshot is not None
        try:
            # Read before the lease is counted: a damaged snapshot must not stay leased.
            frozen = self._store.load(snapshot)
        except (FileNotFoundError, ValueError) as error:
            # Missing files and broken JSON stay so: this snapshot is lost. Other errors of the disk may pass.
            raise StateGoneError(f"the snapshot of n{node.id} is damaged: {error}") from error
        except OSError as error:
            raise SandboxError(f"the snapshot of n{node.id} cannot be read: {error}") from error
        # 2. The files stay until the restore has ended. No await since the look-up, so `fit` cannot have evicted the
        # snapshot in between.
        snapshot.leases += 1
        snapshot.uses += 1
        try:
            yield frozen
        finally:
            # The count falls whatever the restore did; otherwise a cancelled restore would pin its snapshot for
            # ever.
            snapshot.leases -= 1

    def added_bytes(self, tree: int) -> int:
        """Return how many bytes the snapshots of a tree have added to the disk."""
        return self._store.tree_bytes[tree]

    @contextmanager
    def leased_all(self, tree: int | None = None) -> Iterator[list[Snapshot]]:
        """Lend all snapshots of a tree, or of all trees: they are not evicted inside the block."""
        # They go with a node that is forgotten.

        # A list of the moment: snapshots that are taken meanwhile are not lent.
        snapshots = list(self._store) if tree is None else self._store.of_tree(tree)
        for snapshot in snapshots:
            snapshot.leases += 1
        try:
            yield snapshots
        finally:
            for snapshot in snapshots:
                snapshot.leases -= 1

    def restored(self, node: StateNode, seconds: float) -> None:
        """Note how long a restore of the node's snapshot took."""
        # A node that is forgotten while its restore runs loses its snapshot, lease or not.
        snapshot = self.of(node)
        if snapshot is not None:
            snapshot.restore_s = seconds
            self.failures.end(snapshot.id)
            self.costs[snapshot.driver] = self.costs[snapshot.driver].restored(snapshot_kind(snapshot), seconds)

    def failed(self, node: StateNode, error: SandboxError, now: float, *, reproducible: bool) -> None:
        """Note that a restore of the node's snapshot failed, and drop the snapshot if it is of no further use."""
        # If the node cannot be reached without it (`reproducible`), the snapshot stays: the machine may recover.
        snapshot = self.of(node)
        if snapshot is None:
            # Another restore of the same snapshot may have failed before and dropped it.
            return
        failed_again = self.failures.note(snapshot.id, now) > 1
        # 3. A missing or damaged snapshot is dropped at once. One that only the machine failed to restore is
        # dropped at the second failure, and only if a replay reaches the node as well.
        if isinstance(error, StateGoneError) or (failed_again and reproducible):
            self.drop(node)

    def drop(self, node: StateNode) -> None:
        """Remove the snapshot of a node."""
        snapshot = self.of(node)
        # The node first, the files after it: from here on no plan can choose this snapshot.
        node.snapshot = None
        if snapshot is not None:
            self.failures.forget(snapshot.id)
            # 5. The file is removed here; the drivers free the storage that only it used (`Driver.collect`).
            self._store.drop(snapshot)

    def drop_tree(self, tree: int) -> None:
        """Remove every snapshot of a tree."""
        # Their nodes need no change: the tree has left the memory.
        for snapshot in self._store.of_tree(tree):
            self._store.drop(snapshot)

    async def fit(self, judge: Judge) -> int:
        """Evict snapshots until all budgets hold, free what no snapshot uses, and return how many were evicted."""
        # One at a time: two would evict for the same bytes.
        async with self._fitting:
            return await self._fit(judge)

    async def _fit(self, judge: Judge) -> int:
        self._hopeless.intersection_update(snapshot.id for snapshot in self._store)
        unproven_before, self.unproven = self.unproven, []
        # Owners first, then images: evicting them also counts towards the budget for all snapshots.
        evicted = 0
        for quota in list(self._count_owned()):
            while count := await self._evict_over("files", self.owned[quota], quota.most_bytes, judge, quota):
                evicted += count
                self._count_owned()
        # Images share nothing, so their bytes can be summed up without the drivers.
        evicted += await self._evict_over("processes", self.checkpoint_bytes, self._checkpoint_bytes, judge)
        self.used_bytes = await self._collect()
        # Snapshots share storage, so only the drivers know what an eviction freed: count again after each round.
        while count := await self._evict_over("files", self.used_bytes, self._budget_bytes, judge):
            evicted += count
            self.used_bytes = await self._collect()
        if self.unproven and not unproven_before:
            log.info("snapshots exceed their budget until replays prove their states", snapshots=len(self.unproven))
        self._counters.evictions += evicted
        return evicted

    def _count_owned(self) -> Counter[DiskQuota]:
        self.owned = Counter()
        for tree, size_bytes in self._store.tree_bytes.items():
            if (quota := self._quota_of(tree)) is not None:
                self.owned[quota] += size_bytes
        return self.owned

    async def _evict_over(
        self, kind: SnapshotKind, used_bytes: int, budget_bytes: float, judge: Judge, quota: DiskQuota | None = None
    ) -> int:
        """Evict what exceeds a budget, of all snapshots or of an owner's; return how many were evicted."""
        excess_bytes, full = used_bytes - budget_bytes, kind if quota is None else quota.owner
        if excess_bytes <= 0:
            self._note_full(full, is_full=False)
            return 0
        # Tree by tree, so that the rollouts of each are looked at once.
        trees = {tree for tree in self._store.tree_bytes if quota in (None, self._quota_of(tree))}
        snapshots = [s for s in self._store if kind in ("files", s.kind) and s.tree in trees]
        snapshots.sort(key=lambda snapshot: snapshot.tree)
        prospects: list[Prospect] = []
        for part in _slices(snapshots):
            prospects += self._judged(judge, part)
            await asyncio.sleep(0)
        # 4. Least value first, until the budget holds. Pinned and leased snapshots are never chosen.
        choose, waiting = victims, unproven(prospects)
        # In a thread: 40 us for each snapshot of a long path.
        chosen = await asyncio.to_thread(victims, prospects, excess_bytes=excess_bytes)
        if not chosen:
            choose, patience = unneeded, PATIENCE * (_hard_bound(budget_bytes) - budget_bytes)
            if not waiting or excess_bytes > patience:
                # Half of what was waited for stays, so that this does not begin again at once.
                freed_bytes = excess_bytes - patience / 2 if waiting else excess_bytes
                chosen = await asyncio.to_thread(unneeded, prospects, excess_bytes=freed_bytes)
                # Trees that are not in memory are looked at only where those that are have nothing to give.
                if not chosen and await judge.read_back(snapshots):
                    return await self._evict_over(kind, used_bytes, budget_bytes, judge, quota)
        evicted = 0
        for part in _slices([snapshot for name in chosen if (snapshot := self._store.get(name)) is not None]):
            # Looked at again, and without an await: what no rollout needs now is what goes.
            still = set(choose(self._judged(judge, part), excess_bytes=math.inf))
            for name in still:
                self._evict(name, judge, way_known=choose is victims)
                evicted += 1
            await asyncio.sleep(0)
        if not chosen:
            self.unproven += [name for name in waiting if name not in self.unproven]
        self._note_full(full, is_full=not chosen and (not waiting or used_bytes > _hard_bound(budget_bytes)))
        return evicted

    def _judged(self, judge: Judge, snapshots: list[Snapshot]) -> list[Prospect]:
        return [
            replace(prospect, reproducible=False) if prospect.name in self._hopeless else prospect
            for prospect in judge.prospects(snapshots)
        ]

    def _note_full(self, budget: str, *, is_full: bool) -> None:
        if is_full and budget not in self.full:
            log.warning(
                "states that running rollouts need exceed their budget. Beyond a quarter more none is taken. Raise "
                "the budget, or end the rollouts that are there.",
                budget=budget, bytes=self.used_bytes,
            )  # fmt: skip
        (self.full.add if is_full else self.full.discard)(budget)

    def _evict(self, name: str, judge: Judge, *, way_known: bool) -> None:
        # Another round, or a dropped tree, may have removed the snapshot already.
        snapshot = self._store.get(name)
        if snapshot is not None:
            # The node may have got another snapshot since; it keeps that one.
            node = judge.node(snapshot)
            if node is not None and node.snapshot == name:
                if not way_known:
                    judge.give_up(snapshot)
                node.snapshot = None
            self.failures.forget(snapshot.id)
            self._store.drop(snapshot)

    async def _collect(self) -> int:
        size_bytes = 0
        for driver in self._drivers.values():
            # Parts of live sandboxes stay as well; the drivers know them. Listed anew for each driver: while the one
            # before it deletes, a sandbox may freeze, go on and freeze again, and only this list has its first state.
            size_bytes += await driver.collect([part for snapshot in self._store for part in snapshot.parts])
        return size_bytes


def _slices(snapshots: list[Snapshot]) -> Iterator[list[Snapshot]]:
    return (snapshots[first : first + 250] for first in range(0, len(snapshots), 250))


def _hard_bound(budget_bytes: float) -> float:
    return max(HARD_SHARE * budget_bytes, budget_bytes + HARD_BYTES)
