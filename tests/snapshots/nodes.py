"""Nodes and trees as the snapshot rooms know them, without a proxy."""

from dataclasses import dataclass, field

from sandboxes.effects import StateDigest


@dataclass(slots=True, eq=False)
class FakeNode:
    """A `StateNode` with nothing else."""

    id: int
    state: StateDigest | None = None
    snapshot: str | None = None
    kept_age_s: float = 0.0
    unfreezable: str = ""
    detached: bool = False


@dataclass(slots=True, eq=False)
class FakeTree:
    """A `StateTree` of a root and nothing else."""

    id: int = 1
    root: FakeNode = field(default_factory=lambda: FakeNode(0))

    def set_root_state(self, state: StateDigest | None) -> None:
        """See `StateTree.set_root_state`."""
        self.root.state = state


@dataclass(slots=True)
class Tally:
    """`SnapshotCounters` that only count."""

    snapshots_taken: int = 0
    evictions: int = 0
    failures: list[str] = field(default_factory=list)
    freezes: list[float] = field(default_factory=list)

    @property
    def freeze_s(self) -> "Tally":
        """The tally itself: `observe` adds to `freezes`."""
        return self

    def observe(self, seconds: float) -> None:
        """Add a freeze."""
        self.freezes.append(seconds)

    def failure(self, kind: str) -> None:
        """Add a failure."""
        self.failures.append(kind)
