"""Polling: which key a repeated call has while background processes run beside it.

A node without a state digest has live processes, so the same call may be answered differently later:

1. A repeated call is usually a poll, and replaying its recorded answer would make the agent poll forever. The n-th
   identical call at a node therefore has a key of its own, shared by every rollout that polls n times.
2. Processes move by themselves: a job ends, a server opens its port. So an answer holds for rollouts whose processes
   are about as old as those that gave it. Any other rollout gets the next key.
"""

import math

from proxy.tree.keys import CallKey, again_key, private_key
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Record

AGE_TOLERANCE_S = 3.0
"""By how much the ages of processes may differ for an answer to be shared. It absorbs differences in the thinking times
of agents that do the same. If it were much larger, an agent that waited for a server to start could be given the
refused connection of an agent that did not wait."""
AGE_TOLERANCE_SHARE = 0.5
"""By which share of the recorded age the ages may differ, if that is more: differences of thinking times add up."""


def agree(age_s: float, other_s: float) -> bool:
    """Return whether processes of one age may stand for processes of the other."""
    return abs(age_s - other_s) <= max(AGE_TOLERANCE_S, AGE_TOLERANCE_SHARE * other_s)


def key_for(rollout: Rollout, key: CallKey, now: float) -> CallKey:
    """Return the key under which a rollout looks up a call and records it, at a monotonic time.

    It is the call's own (`keys.call_key`), one of the n-th repetition, or the rollout's if it shares no records.
    """
    if not rollout.cached:
        return private_key(key, rollout.id, rollout.calls)
    repetition, candidate, records = 0, key, rollout.node.records
    while candidate in rollout.polled_keys or not holds(records.get(candidate), rollout, now):
        repetition += 1
        candidate = again_key(key, repetition)
    return candidate


def holds(record: Record | None, rollout: Rollout, now: float) -> bool:
    """Return whether an answer holds for a rollout now, by the age of processes; without a record, any does."""
    if record is None or record.source.state is not None or record.source.still or record.age_s == math.inf:
        return True
    return agree(rollout.age_s(now), record.age_s)
