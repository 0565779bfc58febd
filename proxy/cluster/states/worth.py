"""Which states are worth sending, and which are worth fetching (pure)."""

import math
from collections.abc import Collection
from itertools import takewhile
from typing import NamedTuple

from proxy.tree.restore_plan import DOUBT_S, RestorePlan, Way
from proxy.tree.tree import Node, Record
from snapshots.costs import Costs

WORTH_S = 0.25
"""A state is sent if a replay from the states that were sent takes longer than this, in seconds."""
ROOT_S = 5.0
"""How long a fetch of a root state may take, in seconds, although a fresh one could be started.

Digests of states are relative to when their root state was built, so that states of one root compare best.
"""


UNPROVEN_S = 5.0
"""How long a fetch may take, in seconds, although a replay may be faster that is not known to reach the state."""


class StateCandidate(NamedTuple):
    """A state that could be fetched."""

    node: Node
    saved_s: float  # Seconds of replay that it saves; infinite if no replay leads to where it leads.


def replay_s(node: Node, sent: Collection[int], costs: Costs, *, proven: bool = False) -> float:
    """Return how long the next owner would replay to a node; infinite if it may not. O(calls in `WORTH_S`)."""
    seconds, at = 0.0, node
    while at.id not in sent and seconds <= WORTH_S:
        origin = at.origin
        if origin is None:
            # A root state that was not sent, which differs from any other one.
            return math.inf if at is node else seconds + costs.fresh.seconds
        if not origin.reproducible or origin.doubtful or (proven and not origin.proven):
            return math.inf
        seconds += _call_s(origin, costs)
        at = origin.source
    return seconds


def candidate(node: Node, plan: RestorePlan | None, kept: Collection[int], costs: Costs) -> StateCandidate | None:
    """Return the nearest kept state above a node that is better than a plan, which may be none; None without one."""
    below_s, at = 0.0, node
    while plan is None or at is not plan.start or plan.way is Way.FRESH:
        if at.id in kept and at.snapshot is None and not at.detached:
            return StateCandidate(at, math.inf if plan is None else _saved_s(plan, at, below_s))
        origin = at.origin
        if origin is None or not origin.reproducible:
            return None
        below_s += _call_s(origin, costs)
        at = origin.source
    return None


def _saved_s(plan: RestorePlan, node: Node, below_s: float) -> float:
    """Return what a state on the way of a plan saves, if the calls below it are replayed all the same."""
    if node.origin is None:
        return max(ROOT_S, plan.cost_s - below_s)
    above = list(takewhile(lambda record: record.source is not node, plan.suffix))
    risk_s = sum(DOUBT_S for record in above if record.doubtful)
    if not all(record.proven for record in above):
        risk_s += UNPROVEN_S
    return max(0.0, plan.cost_s - below_s) + risk_s


def _call_s(record: Record, costs: Costs) -> float:
    return record.seconds + costs.replay_overhead.seconds
