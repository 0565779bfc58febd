"""The snapshot cache: a snapshot belongs to one node, is lent for restores, and is evicted by value within budgets."""

import asyncio
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.driver import FrozenState
from sandboxes.errors import SandboxError, StateGoneError
from snapshots import cache as module
from snapshots.cache import DiskQuota, SnapshotCache
from snapshots.policy import Prospect
from snapshots.snapshot import Snapshot
from snapshots.store import SnapshotStore
from tests.machine import snapshot_files
from tests.sandboxes.memory_driver import MemoryDriver
from tests.snapshots.nodes import FakeNode, Tally


class Rig:
    """A cache over a store on disk and the memory driver, and the nodes that it serves."""

    def __init__(
        self,
        directory: Path,
        *,
        budget_bytes: int = 1 << 30,
        checkpoint_bytes: int = 1 << 30,
        quota_of: Callable[[int], DiskQuota | None] = lambda _: None,
    ) -> None:
        self.store, self.tally = SnapshotStore(directory), Tally()
        self.store.open()
        self.cache = SnapshotCache(
            self.store, {"memory": MemoryDriver()}, self.tally,
            budget_bytes=budget_bytes, checkpoint_bytes=checkpoint_bytes, quota_of=quota_of,
        )  # fmt: skip
        self.nodes: dict[int, FakeNode] = {}
        self.held: dict[int, str] = {}
        # Numbers of nodes that no replay has reached yet, and of those that none reaches.
        self.unproven: set[int] = set()
        self.lost: set[int] = set()
        self.needed: set[int] = set()
        self.given_up: list[int] = []

    def add(self, number: int, size_bytes: int, *, kind: str = "files", tree: int = 1) -> FakeNode:
        """Attach a snapshot of this size to a new node."""
        node = self.nodes[number] = FakeNode(number)
        frozen = FrozenState("memory", kind, {}, size_bytes, None, (f"part{number}-{size_bytes}",))
        self.cache.attach(self.cache.save(frozen, tree=tree, node=number, cost_s=0.01), node)
        return node

    def fit(self) -> int:
        """Evict within the budgets; a node's number is the value of its snapshot."""
        return asyncio.run(self.cache.fit(self))

    async def read_back(self, snapshots: list[Snapshot]) -> bool:
        """All nodes are in memory."""
        del snapshots
        return False

    def node(self, snapshot: Snapshot) -> FakeNode | None:
        """Return the node of a snapshot."""
        return self.nodes.get(snapshot.node)

    def give_up(self, snapshot: Snapshot) -> None:
        """Note that a node's snapshot goes."""
        self.given_up.append(snapshot.node)

    def prospects(self, snapshots: list[Snapshot]) -> list[Prospect]:
        """Return what the sets of this rig say."""
        return [self._prospect(snapshot, self.nodes.get(snapshot.node)) for snapshot in snapshots]

    def attached(self) -> set[int]:
        """Return the numbers of the nodes that have a snapshot."""
        return {node.id for node in self.nodes.values() if node.snapshot is not None}

    def _prospect(self, snapshot: Snapshot, node: FakeNode | None) -> Prospect:
        worth = 0.0 if node is None else float(node.id)
        held = "leased" if snapshot.leases else self.held.get(snapshot.node, "")
        return Prospect(
            snapshot.id, worth, 1.0, snapshot.size_bytes, reproducible=snapshot.node not in self.lost,
            proven=snapshot.node not in self.unproven | self.lost, needed=snapshot.node in self.needed, held=held,
        )  # fmt: skip


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=8), st.integers(0, 12_000))
def test_least_valuable_snapshots_are_evicted(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], budget_bytes: int
) -> None:
    """Snapshots are evicted in the order of their value until the budget holds, and nodes and store agree."""
    rig = Rig(tmp_path_factory.mktemp("snapshots"), budget_bytes=budget_bytes)
    for number, size_bytes in enumerate(sizes, start=1):
        rig.add(number, size_bytes)
    evicted = rig.fit()
    kept = rig.attached()
    assert evicted == rig.tally.evictions
    assert kept == set(range(evicted + 1, len(sizes) + 1)), "a higher number is a higher value"
    assert rig.cache.used_bytes == sum(sizes[number - 1] for number in kept) <= budget_bytes
    assert {snapshot.node for snapshot in rig.store} == kept
    assert not rig.cache.over_budget


def test_live_processes_have_a_budget_of_their_own(tmp_path: Path) -> None:
    rig = Rig(tmp_path, checkpoint_bytes=1000)
    rig.add(1, 5000)
    rig.add(2, 900, kind="processes")
    rig.add(3, 900, kind="processes")
    assert rig.cache.over_budget
    assert rig.fit() == 1
    assert rig.attached() == {1, 3}
    assert rig.cache.checkpoint_bytes == 900


def test_leased_snapshots_are_not_evicted(tmp_path: Path) -> None:
    rig = Rig(tmp_path, budget_bytes=0)
    node, other = rig.add(1, 100), rig.add(2, 100)
    with rig.cache.leased(node) as frozen:
        assert frozen.size_bytes == 100
        rig.fit()
        assert rig.attached() == {1}
    assert rig.fit() == 1
    assert other.snapshot is None


def test_all_snapshots_of_a_tree_can_be_leased(tmp_path: Path) -> None:
    rig = Rig(tmp_path, budget_bytes=0)
    rig.add(1, 100)
    rig.add(2, 100)
    with rig.cache.leased_all(1) as snapshots:
        assert rig.fit() == 0
        assert {snapshot.node for snapshot in snapshots} == {1, 2}
    assert rig.fit() == 2


def test_snapshots_taken_during_a_collection_stay(tmp_path: Path) -> None:
    """Each driver keeps the parts of all snapshots of that moment, also of those taken while another driver deletes."""
    rig, kept = Rig(tmp_path), []

    class Collecting(MemoryDriver):
        async def collect(self, keep: Iterable[str]) -> int:
            kept.append(set(keep))
            await asyncio.sleep(0)
            rig.add(len(kept), 100)
            return 0

    rig.cache = SnapshotCache(
        rig.store, {"first": Collecting(), "second": Collecting()}, rig.tally,
        budget_bytes=1 << 30, checkpoint_bytes=1 << 30,
    )  # fmt: skip
    rig.fit()
    assert kept == [set(), {"part1-100"}]


def test_a_node_has_at_most_one_snapshot(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    node = rig.add(1, 100)
    first = node.snapshot
    forgotten = FakeNode(2, detached=True)
    for late in (node, forgotten):
        snapshot = rig.cache.save(FrozenState("memory", "files", {}, 7, None, ()), tree=1, node=late.id, cost_s=0.0)
        assert not rig.cache.attach(snapshot, late)
    assert (node.snapshot, forgotten.snapshot, len(rig.store)) == (first, None, 1)


def test_a_missing_snapshot_is_dropped_at_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    node = rig.add(1, 100)
    assert node.snapshot is not None
    [path] = snapshot_files(tmp_path)
    path.unlink()
    with pytest.raises(StateGoneError, match="n1 is damaged") as caught, rig.cache.leased(node):
        pass
    rig.cache.failed(node, caught.value, 0.0, reproducible=False)
    assert not list(rig.store)
    assert rig.cache.of(node) is None


@pytest.mark.parametrize(("reproducible", "dropped"), [(True, True), (False, False)])
def test_a_second_failure_drops_only_reproducible_states(tmp_path: Path, *, reproducible: bool, dropped: bool) -> None:
    rig = Rig(tmp_path)
    node = rig.add(1, 100)
    rig.cache.failed(node, SandboxError("the mount failed"), 0.0, reproducible=reproducible)
    assert node.snapshot is not None
    rig.cache.failed(node, SandboxError("the mount failed"), 0.0, reproducible=reproducible)
    assert (node.snapshot is None) is dropped


def test_snapshot_evicted_before_attach_is_no_snapshot(tmp_path: Path) -> None:
    """A thread saves a snapshot, and an eviction may run before the event loop attaches it to its node."""
    rig = Rig(tmp_path, budget_bytes=10)
    node = rig.nodes[1] = FakeNode(1)
    saved = rig.cache.save(FrozenState("memory", "files", {}, 4000, None, ("part1-4000",)), tree=1, node=1, cost_s=0)
    assert rig.fit() == 1
    assert not rig.cache.attach(saved, node)
    assert node.snapshot is None


def test_snapshots_are_reattached_after_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.add(1, 100)
    rig.add(2, 100)
    again = Rig(tmp_path)
    survivor = FakeNode(2)
    again.cache.reattach(1, {2: survivor})
    snapshot = again.cache.of(survivor)
    assert snapshot is not None
    assert (snapshot.node, len(again.store)) == (2, 1)


def test_a_tree_goes_with_its_snapshots(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.add(1, 100)
    rig.cache.drop_tree(2)
    assert len(rig.store) == 1
    rig.cache.drop_tree(1)
    assert len(rig.store) == 0


def test_restores_teach_what_they_cost(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    node = rig.add(1, 100)
    rig.cache.restored(node, 0.02)
    assert rig.cache.costs["memory"].files.restore.samples == 1
    assert rig.cache.of(node).restore_s == 0.02  # type: ignore[union-attr]


numbers = st.sets(st.integers(1, 8))


@given(st.lists(st.integers(1, 4000), min_size=8, max_size=8), st.integers(0, 20_000), numbers, numbers, numbers)
def test_eviction_never_takes_the_last_way(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    budget_bytes: int,
    unproven: set[int],
    lost: set[int],
    needed: set[int],
) -> None:
    """What is evicted was proven, or no rollout needs it; what is refused is refused because nothing can be evicted.

    States that wait for a proof have half of the room above the budget (here more than there is) to themselves.
    """
    rig = Rig(tmp_path_factory.mktemp("snapshots"), budget_bytes=budget_bytes)
    for number, size_bytes in enumerate(sizes, start=1):
        rig.add(number, size_bytes)
    rig.unproven, rig.lost, rig.needed = unproven - lost, lost, needed
    rig.fit()
    gone = set(rig.nodes) - rig.attached()
    assert not gone & rig.unproven
    assert not gone & lost & needed
    assert set(rig.given_up) == gone & lost
    if gone & lost:
        assert not rig.attached() - lost, "states are forgotten only after all others were evicted"
    waits, over = rig.attached() & rig.unproven, rig.cache.used_bytes > budget_bytes
    assert (len(rig.cache.unproven) > 0) == (over and bool(waits))
    assert ("files" in rig.cache.full) == (over and not waits)
    assert rig.cache.accepts("files")


def test_a_quarter_over_budget_is_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an eviction has run, snapshots are taken up to the bound, and none beyond it."""
    monkeypatch.setattr(module, "HARD_BYTES", 0)
    rig = Rig(tmp_path, budget_bytes=1000, checkpoint_bytes=500)
    rig.add(1, 600, kind="processes")
    assert rig.cache.accepts("processes")
    rig.add(2, 100, kind="processes")
    assert not rig.cache.accepts("processes")
    assert rig.cache.accepts("files")
    rig.add(3, 600)
    assert not rig.cache.accepts("files")


@given(st.sets(st.integers(1, 40)), st.sets(st.integers(1, 40)))
def test_the_hard_bound_is_never_reached_by_what_no_rollout_needs(
    tmp_path_factory: pytest.TempPathFactory, needed: set[int], unproven: set[int]
) -> None:
    """States come faster than proofs. Half-way to the bound, those go that no rollout needs; what is needed stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "HARD_BYTES", 0)
        rig = Rig(tmp_path_factory.mktemp("snapshots"), budget_bytes=10_000)
        rig.needed, rig.unproven = needed, unproven
        for number in range(1, 41):
            rig.add(number, 500)
            if number > 15:
                rig.fit()
        kept = rig.attached()
        assert needed & unproven <= kept
        assert rig.cache.accepts("files") or len(needed & unproven) * 500 > 12_500
        assert ("files" in rig.cache.full) == (rig.cache.used_bytes > 10_000 and not rig.cache.accepts("files"))
        if not needed:
            assert 10_000 - 500 < rig.cache.used_bytes <= 11_250
        assert not set(rig.given_up) & needed


def test_owner_keeps_no_more_than_its_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its least valuable states go, and no other owner's. Beyond a quarter more, none is taken of its trees."""
    monkeypatch.setattr(module, "HARD_BYTES", 0)
    alice, bob = DiskQuota("@alice", 1000), DiskQuota("@bob", math.inf)
    rig = Rig(tmp_path, quota_of={1: alice, 2: bob}.get)
    for number in range(1, 4):
        rig.add(number, 400, tree=1)
        rig.add(10 + number, 400, tree=2)
    assert rig.cache.owned == {alice: 1200, bob: 1200}
    assert rig.cache.accepts("files", 1)
    rig.add(4, 400, tree=1)
    assert [rig.cache.accepts("files", tree) for tree in (1, 2, 3, None)] == [False, True, True, True]
    assert (rig.cache.over_budget, rig.fit(), rig.cache.over_budget) == (True, 2, False)
    assert {number for number, node in rig.nodes.items() if node.snapshot is None} == {1, 2}
    assert rig.cache.owned == {alice: 800, bob: 1200}
    rig.add(5, 400, tree=1)
    rig.held = dict.fromkeys(range(1, 6), "pinned")
    assert (rig.fit(), rig.cache.full) == (0, {"@alice"})
