"""The snapshot: one kept sandbox state, what is known of its worth, and the node that it belongs to."""

from dataclasses import dataclass
from typing import Protocol

from sandboxes.effects import StateDigest
from snapshots.costs import SnapshotKind


@dataclass(slots=True, eq=False)
class Snapshot:
    """A kept sandbox state."""

    id: str  # Name of the snapshot and of its file.
    tree: int  # The tree's number.
    node: int  # Number of the node whose state it holds.
    driver: str
    kind: str  # What the driver calls it; "processes" if it holds live processes.
    parts: tuple[str, ...]  # The driver's storage units that it needs. Snapshots share most of theirs.
    size_bytes: int  # Bytes that it added to the states it was built on.
    cost_s: float  # Seconds that the freeze took.
    created_at: float  # Unix time of the freeze.
    age_s: float = 0.0  # For how long its live processes had run.
    uses: int = 0  # Number of restores.
    leases: int = 0  # Number of restores in progress; it is not evicted meanwhile.
    restore_s: float = 0.0  # Seconds that the last restore took; 0 before the first.


class StateNode(Protocol):
    """What the snapshot rooms know of a node: the holder of at most one snapshot. `proxy.tree.tree.Node` is one."""

    @property
    def id(self) -> int:
        """Number of the node."""
        ...

    state: StateDigest | None  # None if the state has no digest.
    snapshot: str | None  # Id of the attached snapshot; None without one.
    kept_age_s: float  # For how long the live processes of the snapshot had run when it was taken.
    unfreezable: str  # Why the driver cannot freeze the state; empty if nothing is known against it.
    detached: bool  # Whether the node has been forgotten.


def snapshot_kind(snapshot: Snapshot) -> SnapshotKind:
    # Drivers have more kinds of their own, such as copies or layers; for costs and budgets only processes differ.
    """Return what a snapshot holds: files, whatever the driver calls it, unless it holds live processes."""
    return "processes" if snapshot.kind == "processes" else "files"
