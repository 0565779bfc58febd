"""Costs of snapshots: running means of what freezing and restoring took."""

from dataclasses import dataclass, replace
from typing import Literal

SnapshotKind = Literal["files", "processes"]
"""What a snapshot holds: files and dumped sessions, or live processes too."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A running mean of seconds. Until something was measured it is the guess that it was made with.

    One slow moment of the machine must not decide what is done from then on, above all where what is not done is not
    measured again: a measurement counts as at most four times the mean. One that is lasting is followed all the same.
    """

    seconds: float
    samples: int = 0

    def then(self, seconds: float) -> "Mean":
        """Return the mean after another measurement: exact over the first ten, then the newest counts a tenth."""
        weight = max(0.1, 1 / (self.samples + 1))
        counted_s = min(seconds, 4 * self.seconds + 1e-4)
        return Mean(self.seconds + weight * (counted_s - self.seconds), self.samples + 1)


@dataclass(frozen=True, slots=True)
class KindCosts:
    """What a snapshot of one kind costs: freezing it with its writing, and restoring it."""

    freeze: Mean
    restore: Mean


@dataclass(frozen=True, slots=True)
class Costs:
    """What ways to a sandbox cost with one driver, as measured here. One that stands at the node costs nothing.

    replay_overhead is what each replayed call takes beside the tool. The guesses are medians of `bench/sandboxes` for
    `local` on two cores; each gives way to the first measurement.
    """

    fresh: Mean = Mean(0.0065)
    replay_overhead: Mean = Mean(0.004)
    files: KindCosts = KindCosts(Mean(0.0006), Mean(0.006))
    processes: KindCosts = KindCosts(Mean(0.05), Mean(0.04))

    def of(self, kind: SnapshotKind) -> KindCosts:
        return self.processes if kind == "processes" else self.files

    def started(self, seconds: float) -> "Costs":
        """Return what is known after a start from nothing."""
        return replace(self, fresh=self.fresh.then(seconds))

    def replayed(self, overhead_s: float) -> "Costs":
        """Return what is known after a call was replayed."""
        return replace(self, replay_overhead=self.replay_overhead.then(overhead_s))

    def froze(self, kind: SnapshotKind, seconds: float) -> "Costs":
        """Return what is known after a snapshot was taken."""
        return self._with(kind, replace(self.of(kind), freeze=self.of(kind).freeze.then(seconds)))

    def restored(self, kind: SnapshotKind, seconds: float) -> "Costs":
        """Return what is known after a snapshot was restored."""
        return self._with(kind, replace(self.of(kind), restore=self.of(kind).restore.then(seconds)))

    def _with(self, kind: SnapshotKind, costs: KindCosts) -> "Costs":
        return replace(self, processes=costs) if kind == "processes" else replace(self, files=costs)
