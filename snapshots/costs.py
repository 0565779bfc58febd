"""Costs: running means of what starting, freezing, restoring and replaying took with each driver."""

from dataclasses import dataclass, replace
from typing import Literal

SnapshotKind = Literal["files", "processes"]
"""What a snapshot holds: files and dumped sessions, or images of live processes too."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A running mean of seconds."""

    # A measurement counts as at most four times the mean: one slow moment of the machine must not decide what is done
    # from then on, because what is no longer done is no longer measured.

    seconds: float  # Before the first measurement the guess that it was made with.
    samples: int = 0  # Number of measurements.

    def then(self, seconds: float) -> "Mean":
        """Return the mean after another measurement: exact over the first ten, then the newest one counts a tenth."""
        # The first sample has weight 1 and replaces the guess. A tenth later on: costs change with the machine's
        # load.
        weight = max(0.1, 1 / (self.samples + 1))
        # The added 0.1 ms lets a mean of zero grow again.
        counted_s = min(seconds, 4 * self.seconds + 1e-4)
        return Mean(self.seconds + weight * (counted_s - self.seconds), self.samples + 1)


@dataclass(frozen=True, slots=True)
class KindCosts:
    """What freezing a sandbox into a snapshot of one kind (with writing it), and restoring one from it, cost."""

    freeze: Mean
    restore: Mean


@dataclass(frozen=True, slots=True)
class Costs:
    # Values are frozen, so a plan that is being made sees one consistent set of costs.
    """What the ways to a sandbox cost with one driver; first guesses are `bench/sandboxes`' medians for `local`."""

    fresh: Mean = Mean(0.0065)  # Starting a sandbox in the root state.
    replay_overhead: Mean = Mean(0.015)  # What each replayed call takes beside the tool itself.
    files: KindCosts = KindCosts(Mean(0.0006), Mean(0.006))  # Snapshots of files and sessions.
    processes: KindCosts = KindCosts(Mean(0.05), Mean(0.04))  # Snapshots of live processes too.

    def of(self, kind: SnapshotKind) -> KindCosts:
        """Return the costs of snapshots of one kind."""
        return self.processes if kind == "processes" else self.files

    def started(self, seconds: float) -> "Costs":
        """Return the costs after a fresh start was measured."""
        return replace(self, fresh=self.fresh.then(seconds))

    def replayed(self, overhead_s: float) -> "Costs":
        """Return the costs after a replayed call was measured."""
        return replace(self, replay_overhead=self.replay_overhead.then(overhead_s))

    def froze(self, kind: SnapshotKind, seconds: float) -> "Costs":
        """Return the costs after a freeze was measured."""
        return self._with(kind, replace(self.of(kind), freeze=self.of(kind).freeze.then(seconds)))

    def restored(self, kind: SnapshotKind, seconds: float) -> "Costs":
        """Return the costs after a restore was measured."""
        return self._with(kind, replace(self.of(kind), restore=self.of(kind).restore.then(seconds)))

    def _with(self, kind: SnapshotKind, costs: KindCosts) -> "Costs":
        return replace(self, processes=costs) if kind == "processes" else replace(self, files=costs)
