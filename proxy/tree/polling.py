"""Polling: which key a repeated call has while background processes run beside it.

A node without a state digest has live processes, so the same call may be answered differently later:

1. A repeated call is usually a poll, and replaying its recorded answer would make the agent poll forever. The n-th
   identical call at a node therefore has a key of its own, shared by every rollout that polls n times.
2. While processes are still starting (a settling node), an answer also depends on when the call was made. An answer
   recorded early is not reused by a rollout that dwells at the node much longer: it gets the next key.
"""

from proxy.tree.keys import CallKey, again_key, private_key
from proxy.tree.rollout import Rollout
from sandboxes.driver import SETTLE_S

DWELL_TOLERANCE_S = 3.0
"""How much longer than the recording rollout another one may dwell at a settling node and still share its answer.

Chosen to absorb differences in the thinking time of agents that do the same; not measured. Halved, rollouts of one
group share fewer answers beside starting processes. Doubled, an agent that waited for a server to start may be given
the refused connection of an agent that did not wait.
"""


def key_for(rollout: Rollout, key: CallKey, now: float) -> CallKey:
    """Return the key under which a rollout looks up a call and records it.

    Args:
        rollout: The rollout that makes the call.
        key: Key of the call itself (see `keys.call_key`).
        now: Seconds of the proxy's monotonic clock.

    Returns:
        The key itself, a key for the n-th repetition, or a key of the rollout's own if it shares no records.
    """
    if not rollout.cached:
        return private_key(key, rollout.id, rollout.calls)
    repetition, candidate = 0, key
    while candidate in rollout.polled_keys or _is_outdated(rollout, candidate, now):
        repetition += 1
        candidate = again_key(key, repetition)
    return candidate


def _is_outdated(rollout: Rollout, key: CallKey, now: float) -> bool:
    """Return whether a record shows processes that were starting then and may have started since."""
    record = rollout.node.records.get(key) if rollout.node.settling else None
    if record is None or record.dwell_s >= SETTLE_S:
        return False
    return rollout.dwell_s(now) > record.dwell_s + DWELL_TOLERANCE_S
