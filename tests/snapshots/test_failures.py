"""Restores that failed: when a snapshot counts as lost, and how another one takes its place."""

from pathlib import Path

import pytest

from sandboxes.driver import FrozenState
from snapshots.failures import HOPELESS_FAILURES, HOPELESS_S, RestoreFailures
from snapshots.snapshot import Snapshot
from snapshots.store import SnapshotStore
from tests.snapshots.nodes import FakeNode


def opened(folder: Path) -> SnapshotStore:
    store = SnapshotStore(folder)
    store.open()
    return store


def saved(store: SnapshotStore) -> Snapshot:
    return store.save(FrozenState("memory", "files", {}, 1, None), tree=1, node=1, cost_s=0.0)


@pytest.mark.parametrize(
    ("times", "hopeless"),
    [
        ([0.0] * HOPELESS_FAILURES, False),
        ([0.0, HOPELESS_S], False),
        ([0.0] * (HOPELESS_FAILURES - 1) + [HOPELESS_S], True),
    ],
)
def test_only_lasting_failures_are_hopeless(tmp_path: Path, times: list[float], hopeless: bool) -> None:
    failures, node = RestoreFailures(opened(tmp_path)), FakeNode(1, snapshot="s")
    for now in times:
        failures.note("s", now)
    assert failures.is_hopeless(node) is hopeless
    failures.end("s")
    assert not failures.is_hopeless(node)


@pytest.mark.parametrize("taken", [True, False])
def test_a_renewal_leaves_one_snapshot(tmp_path: Path, taken: bool) -> None:
    store = opened(tmp_path)
    failures, old = RestoreFailures(store), saved(store)
    node = FakeNode(1, snapshot=old.id)
    with failures.renewing(node):
        assert (node.snapshot, old.leases) == (None, 1)
        if taken:
            node.snapshot = saved(store).id
    assert [kept.id for kept in store] == [node.snapshot]
    assert (node.snapshot == old.id, failures.is_renewal(node), old.leases) == (not taken, taken, 0)


def test_a_forgotten_node_is_given_nothing_back(tmp_path: Path) -> None:
    store = opened(tmp_path)
    node = FakeNode(1, snapshot=saved(store).id)
    with RestoreFailures(store).renewing(node):
        node.detached = True
    assert (node.snapshot, list(store)) == (None, [])
