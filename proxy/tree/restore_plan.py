"""Restore plans: the cheapest way to a sandbox in a node's state.

A plan has a start, where a sandbox can be had, and a suffix of recorded calls to replay from there. Going up from the
target, each node offers up to three ways: a sandbox that is there (free), a snapshot, and at the root a fresh sandbox.
Each step up adds one replayed call. The search ends as soon as the replay alone costs more than the best plan.
"""

import math
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from enum import Enum

from proxy.tree.polling import agree
from proxy.tree.rollout import is_moving
from proxy.tree.tree import Node, Record, Tree
from sandboxes.effects import Effect
from sandboxes.spec import OUTSIDE_DRIVERS
from snapshots.costs import Costs, SnapshotKind

DOUBT_S = 60.0
"""Seconds by which a replay of a doubtful call counts as dearer: if it diverges, the rollout is lost. The least that
`snapshots.policy.at_stake_s` reckons for a lost rollout: some ten calls and the thinking between them."""


class Way(Enum):
    """How the sandbox of a plan is obtained, before anything is replayed in it."""

    IDLE = "idle"
    """An idle sandbox is there."""
    SNAPSHOT = "snapshot"
    """A snapshot is restored."""
    FRESH = "fresh"
    """A sandbox is started in the root state."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """One way to a sandbox in a node's state."""

    way: Way  # How the sandbox is obtained, at `start`.
    start: Node
    suffix: tuple[Record, ...]  # Records to replay, in this order.
    cost_s: float  # Expected seconds of both.


def plan_restore(
    target: Node,
    *,
    idle_at: Callable[[Node], bool],
    costs: Costs,
    avoid: Collection[Node] = (),
    proven: bool = False,
) -> RestorePlan | None:
    """Return the plan with the fewest expected seconds; None if no way leads to the target.

    A doubtful replay counts as `DOUBT_S` dearer, so a snapshot behind it is preferred to a sandbox before it. A record
    whose replay is known to diverge ends the search. `idle_at` returns whether an idle sandbox at a node may be taken.
    No snapshot of the nodes to `avoid` is used. `proven` replays only records whose target a replay has reached before.
    """
    if idle_at(target):
        # Nothing is cheaper. Most calls of a rollout end here.
        return RestorePlan(Way.IDLE, target, (), 0.0)
    best: RestorePlan | None = None
    suffix: list[Record] = []
    replay_s, risk_s, best_s, node = 0.0, 0.0, 0.0, target
    while best is None or replay_s + risk_s < best_s:
        for way, acquire_s in _ways(node, idle_at, costs, avoid):
            if best is None or replay_s + risk_s + acquire_s < best_s:
                best = RestorePlan(way, node, tuple(reversed(suffix)), replay_s + acquire_s)
                best_s = best.cost_s + risk_s
        origin = node.origin
        if origin is None or not origin.reproducible or (proven and not origin.proven):
            break
        suffix.append(origin)
        replay_s += origin.seconds + costs.replay_overhead.seconds
        risk_s += DOUBT_S if origin.doubtful else 0.0
        node = origin.source
    return best


def arrival_age_s(record: Record) -> float:
    """Return for how long processes have run when a rollout arrives at a record's target; see `Rollout.age_s`."""
    known = is_moving(record.source) and record.age_s != math.inf
    return record.age_s + record.seconds if known else 0.0


def recorded_dwell_s(node: Node) -> float:
    """Return how long the quickest recorded rollout stayed at a node before its next call; infinity if none is known.

    A scratch fork waits so long before its call: then its processes are as old as those that a recorded call found.
    Without such a call they finish starting, because a person may look at any time later.
    """
    if node.origin is None:
        return math.inf
    age_s = min((record.age_s for record in node.records.values()), default=math.inf)
    return max(0.0, age_s - arrival_age_s(node.origin))


def has_way_back(record: Record, tree: Tree, stored: Container[int] = ()) -> bool:
    """Return whether a rollout that is answered from a record can go on from its target, whatever becomes of others.

    There must be a snapshot of the target, or a replay from a snapshot above it or from the root, each call of which is
    proven. Beside live processes a proof is not needed where the driver could not save them and the call left the shell
    as it was, or left nothing random (`tree.doubtful`): no state behind a server could be shared otherwise. Live
    processes in the snapshot must be as old as those that the rollout would find alone. An observation leads nowhere.
    `stored` are the numbers of nodes whose states a store has that members of a cluster share.
    """
    node = record.target
    if node is record.source or tree.spec.driver in OUTSIDE_DRIVERS:
        return True
    if node.snapshot is not None and is_moving(node):
        return agree(node.kept_age_s, arrival_age_s(record))
    while node.snapshot is None and node.id not in stored:
        origin = node.origin
        if origin is None:
            return not node.detached
        # Shell variables often differ from run to run: a loop that waits for a server leaves how often it has looked.
        may_differ = origin.doubtful and (node.unfreezable == "" or bool(origin.effect & Effect.SESSION))
        unsaved = node.state is None and not may_differ
        if not (origin.reproducible and (origin.proven or unsaved)):
            return False
        node = origin.source
    return True


def _ways(
    node: Node, idle_at: Callable[[Node], bool], costs: Costs, avoid: Collection[Node]
) -> list[tuple[Way, float]]:
    ways = []
    if idle_at(node):
        ways.append((Way.IDLE, 0.0))
    if node.snapshot is not None and node not in avoid:
        ways.append((Way.SNAPSHOT, costs.of(kind_of(node)).restore.seconds))
    if node.origin is None and not node.detached:
        ways.append((Way.FRESH, costs.fresh.seconds))
    return ways


def kind_of(node: Node) -> SnapshotKind:
    """Return what a snapshot of the node holds or would hold. Only a state with live processes has a witness."""
    return "processes" if node.witness is not None else "files"
