"""What a snapshot is (pure)."""

from dataclasses import dataclass

from snapshots.costs import SnapshotKind


@dataclass(slots=True, eq=False)
class Snapshot:
    """A kept sandbox state, and what is known of its worth.

    parts: the driver's storage units that it needs; several snapshots share most of theirs.
    size_bytes: what it added to the states it was built on. cost_s: what taking it took. uses: restores so far.
    restore_s: what the last one took; 0 before the first.
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


def snapshot_kind(snapshot: Snapshot) -> SnapshotKind:
    """Return what a snapshot holds; what is no image of live processes is files, whatever its driver calls it."""
    return "processes" if snapshot.kind == "processes" else "files"
