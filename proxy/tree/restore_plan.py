"""Which way to a sandbox at a node is the cheapest (pure)."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

from proxy.tree.tree import Node, Record
from snapshots.costs import Costs, SnapshotKind

DOUBT_S = 60.0
"""What is at stake where a replayed call may reach another state: the least that `snapshots.policy.at_stake_s` has."""


class Way(Enum):
    """How a sandbox is got before anything is replayed in it."""

    STANDING = "standing"
    SNAPSHOT = "snapshot"
    FRESH = "fresh"


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


def kind_of(node: Node) -> SnapshotKind:
    """Return what a snapshot of node holds, or would hold: only a state with live processes has a witness."""
    return "processes" if node.witness is not None else "files"
