"""The snapshot: one kept sandbox state, what is known of its worth, and the node that it belongs to."""

from dataclasses import dataclass
from typing import Protocol

from sandboxes.effects import StateDigest
from snapshots.costs import SnapshotKind


@dataclass(slots=True, eq=False)
class Snapshot:
    """A kept sandbox state.

    Attributes:
        id: Name of the snapshot and of its file.
        tree: Number of the tree.
        node: Number of the node whose state it holds.
        driver: Name of the driver that took it.
        kind: What the driver calls it; "processes" if it holds live processes.
        parts: The driver's storage units that it needs. Snapshots share most of theirs.
        size_bytes: Bytes that it added to the states it was built on.
        cost_s: Seconds that the freeze took.
        created_at: Unix time of the freeze.
        uses: Number of restores.
        leases: Number of restores in progress; it is not evicted meanwhile.
        restore_s: Seconds that the last restore took; 0 before the first.
    """

    id: str
    tree: int
    node: int
    driver: str
    kind: str
    parts: tuple[str, ...]
    size_bytes: int
    cost_s: float
    created_at: float
    uses: int = 0
    leases: int = 0
    restore_s: float = 0.0


class StateNode(Protocol):
    """What the snapshot rooms know of a node: the holder of at most one snapshot. `proxy.tree.tree.Node` is one.

    Attributes:
        id: Number of the node.
        state: Digest of the state; None if it has none.
        snapshot: Id of the attached snapshot; None without one.
        unfreezable: Why the driver cannot freeze the state; empty if nothing is known against it.
        detached: Whether the node has been forgotten.
    """

    @property
    def id(self) -> int:
        """Number of the node."""
        ...

    state: StateDigest | None
    snapshot: str | None
    unfreezable: str
    detached: bool


def snapshot_kind(snapshot: Snapshot) -> SnapshotKind:
    # Drivers have more kinds of their own, such as copies or layers; for costs and budgets only processes differ.
    """Return what a snapshot holds: files, whatever the driver calls it, unless it holds live processes."""
    return "processes" if snapshot.kind == "processes" else "files"
