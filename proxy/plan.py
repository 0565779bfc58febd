"""Which way to a sandbox at a node is the cheapest (pure)."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from proxy.tree import Node, Record

DOUBT_S = 60.0
"""What is at stake where a replayed call may reach another state: the least that `snapshots.policy.at_stake_s` has."""


class Way(Enum):
    """How a sandbox is got before anything is replayed in it."""

    STANDING = "standing"
    SNAPSHOT = "snapshot"
    FRESH = "fresh"


Kind = Literal["files", "processes"]
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

    def of(self, kind: Kind) -> KindCosts:
        return self.processes if kind == "processes" else self.files

    def started(self, seconds: float) -> "Costs":
        """Return what is known after a start from nothing."""
        return replace(self, fresh=self.fresh.then(seconds))

    def replayed(self, overhead_s: float) -> "Costs":
        """Return what is known after a call was replayed."""
        return replace(self, replay_overhead=self.replay_overhead.then(overhead_s))

    def froze(self, kind: Kind, seconds: float) -> "Costs":
        """Return what is known after a snapshot was taken."""
        return self._with(kind, replace(self.of(kind), freeze=self.of(kind).freeze.then(seconds)))

    def restored(self, kind: Kind, seconds: float) -> "Costs":
        """Return what is known after a snapshot was restored."""
        return self._with(kind, replace(self.of(kind), restore=self.of(kind).restore.then(seconds)))

    def _with(self, kind: Kind, costs: KindCosts) -> "Costs":
        return replace(self, processes=costs) if kind == "processes" else replace(self, files=costs)


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Get a sandbox at `start` by `way`, then run `suffix` in this order; it then stands where it is wanted."""

    way: Way
    start: Node
    suffix: tuple[Record, ...]
    cost_s: float


def plan_restore(
    target: Node, *, standing: Callable[[Node], bool], costs: Costs, avoid: Collection[Node] = ()
) -> RestorePlan | None:
    """Choose the way with the least acquire + replay seconds; None where no way leads to target.

    standing: says whether a sandbox at a node may be taken. avoid: nodes whose snapshots are not to be used.

    The walk goes from target towards the root. It ends where going on cannot be cheaper, or at a record whose replay is
    known to reach another state. A replay in doubt counts as `DOUBT_S` dearer: a snapshot behind it is preferred to a
    sandbox that stands before it. O(length of the suffix).
    """
    best: RestorePlan | None = None
    suffix: list[Record] = []
    replay_s, risk_s, best_s, node = 0.0, 0.0, 0.0, target
    while best is None or replay_s + risk_s < best_s:
        for way, acquire_s in _ways(node, standing, costs, avoid):
            if best is None or replay_s + risk_s + acquire_s < best_s:
                best = RestorePlan(way, node, tuple(reversed(suffix)), replay_s + acquire_s)
                best_s = best.cost_s + risk_s
        origin = node.origin
        if origin is None or not origin.reproducible:
            break
        suffix.append(origin)
        replay_s += origin.seconds + costs.replay_overhead.seconds
        risk_s += DOUBT_S if origin.doubtful else 0.0
        node = origin.source
    return best


def _ways(
    node: Node, standing: Callable[[Node], bool], costs: Costs, avoid: Collection[Node]
) -> list[tuple[Way, float]]:
    ways = []
    if standing(node):
        ways.append((Way.STANDING, 0.0))
    if node.snapshot is not None and node not in avoid:
        ways.append((Way.SNAPSHOT, costs.of(kind_of(node)).restore.seconds))
    if node.origin is None and not node.detached:
        ways.append((Way.FRESH, costs.fresh.seconds))
    return ways


def kind_of(node: Node) -> Kind:
    """Return what a snapshot of node holds, or would hold: only a state with live processes has a witness."""
    return "processes" if node.witness is not None else "files"
