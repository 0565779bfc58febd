"""Rollouts: each agent's run of a task has a position in the task's tree and a pace of its own."""

import math
from dataclasses import dataclass, field
from enum import IntEnum

from proxy.tree.keys import CallKey
from proxy.tree.tree import Node, Record, Tree


class Outcome(IntEnum):
    """How a call of a rollout was answered. The numbers are on disk: never change one."""

    HIT = 0
    """The tree had a record of the call."""
    MISS = 1
    """The call was executed and recorded."""
    WAIT = 2
    """The call waited for the same call of another rollout and shares its record."""
    BYPASS = 3
    """The call was executed, and its record serves this rollout alone."""


def is_moving(node: Node) -> bool:
    """Return whether a node's state may change by itself. The digest of a root is known later than the root itself."""
    return node.state is None and node.origin is not None and not node.still


@dataclass(slots=True, eq=False)
class Rollout:
    """One agent's run of a task. All times, such as `now`, are seconds of the proxy's monotonic clock."""

    id: int
    name: str  # Unique among the running rollouts of its task.
    task: str
    tree: Tree
    node: Node
    run: str = ""  # Value of its label `run`; empty without one.
    # Whether records of other rollouts may answer its calls. False if the task's `cache` setting forbids it.
    cached: bool = True
    calls: int = 0  # Number of calls answered so far, which is also the turn of the next one.
    finished: bool = False
    waiting: int = 0  # Number of calls that have arrived and are not answered yet.
    used_at: float = 0.0  # When the last call was answered, or when the rollout began.
    # When the rollout arrived at its node. A hit takes no time but counts as long as the recorded call took:
    # `arrived_at` is moved back by that. 0.0 means long ago.
    arrived_at: float = 0.0
    # When the oldest unanswered call arrived; 0.0 without one. Time that a call waits for the proxy is not the
    # agent's, so it does not count as dwell time.
    requested_at: float = 0.0
    # Since when the state that the rollout sees moves by itself: when it left the last node that has a digest. It is
    # moved back by the time of hits, too, and time that calls wait for the proxy does not count.
    live_from: float = 0.0
    # Keys of observations already answered at this node while background processes were running (see
    # `polling.key_for`).
    polled_keys: set[CallKey] = field(default_factory=set)

    def dwell_s(self, now: float) -> float:
        """Return how many seconds the rollout had been at its node when its current call arrived."""
        return (self.requested_at or now) - self.arrived_at

    def age_s(self, now: float) -> float:
        """Return for how many seconds background processes had been running when the current call arrived.

        The time counts over all nodes with live processes since the last node without, where it is 0, as at the root.
        """
        return max(0.0, (self.requested_at or now) - self.live_from) if is_moving(self.node) else 0.0

    def begin(self, now: float) -> None:
        """Arrive at the node that the rollout begins at, or that it continues at after a restart."""
        self.used_at = now
        # As old as the processes were for the rollout that came here first.
        origin = self.node.origin if is_moving(self.node) else None
        known = origin is not None and origin.age_s != math.inf
        self.live_from = now - (origin.age_s + origin.seconds if origin is not None and known else 0.0)

    def note_all_polled(self) -> None:
        """Take each observation at a node with live processes for one that this rollout was answered before."""
        if self.node.state is None:
            self.polled_keys |= {record.key for record in self.node.records.values() if record.observation}

    def advance(self, record: Record, outcome: Outcome, now: float) -> None:
        """Take the step that a record describes. O(1)."""
        self.calls += 1
        # The agent's time, and the call's own. What the call waited for the proxy is left out.
        self.live_from = now - (self.age_s(now) + record.seconds if is_moving(self.node) else 0.0)
        self.used_at, self.requested_at = now, 0.0
        if outcome is Outcome.HIT or outcome is Outcome.WAIT:
            record.hits += 1
        if record.target is not self.node:
            self.node, self.arrived_at = record.target, now
            self.polled_keys.clear()
            record.target.visits += 1
            return
        if outcome is Outcome.HIT:
            self.arrived_at -= record.seconds
        if self.node.state is None:
            self.polled_keys.add(record.key)
