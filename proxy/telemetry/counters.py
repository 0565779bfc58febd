"""What happened, counted where it happens (pure)."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from proxy.telemetry.histogram import FAST, Histogram
from proxy.tree.rollout import Outcome


@dataclass(slots=True)
class Counters:
    """Totals since this process started. Seconds are those of tools, without restoring.

    warm_made, warm_used: sandboxes made ahead of their use, and those of them that were then used.
    audit_checked, audit_differing: recorded calls run again by audits, and those of them that did not come again.
    endpoints: calls answered by endpoint, and by outcome in their order. hit_s … freeze_s: how long hits took from
    their last byte to their answer, sandboxes to start and to restore, replays of whole suffixes, freezes.
    saved_s: what the hits and waits would have run. failures: infrastructure failures by kind, none of them recorded.
    refusals: requests that could not be served as they were.
    """

    outcomes: list[int] = field(default_factory=lambda: [0] * len(Outcome))
    executed_s: float = 0.0
    saved_s: float = 0.0
    replayed_calls: int = 0
    replayed_s: float = 0.0
    restores: int = 0
    starts: int = 0
    snapshots: int = 0
    evictions: int = 0
    divergences: int = 0
    audit_checked: int = 0
    audit_differing: int = 0
    warm_made: int = 0
    warm_used: int = 0
    endpoints: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * len(Outcome)))
    hit_s: Histogram = field(default_factory=lambda: Histogram(FAST))
    start_s: Histogram = field(default_factory=Histogram)
    restore_s: Histogram = field(default_factory=Histogram)
    replay_s: Histogram = field(default_factory=Histogram)
    freeze_s: Histogram = field(default_factory=Histogram)
    failures: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def answered(self, outcome: Outcome, tool_s: float) -> None:
        """Count a call of a rollout; tool_s is what the tool took when it ran."""
        self.outcomes[outcome] += 1
        if outcome is Outcome.HIT or outcome is Outcome.WAIT:
            self.saved_s += tool_s
        else:
            self.executed_s += tool_s

    def failure(self, kind: str) -> None:
        self.failures[kind] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return the totals as the `stats` view shows them."""
        hits, misses, waits, bypasses = self.outcomes
        calls = sum(self.outcomes)
        return {
            "calls": calls,
            "hits": hits,
            "waits": waits,
            "misses": misses,
            "bypasses": bypasses,
            "hit_rate": (hits + waits) / calls if calls else 0.0,
            "executed_s": self.executed_s,
            "saved_s": self.saved_s,
            "replayed_calls": self.replayed_calls,
            "replayed_s": self.replayed_s,
            "restores": self.restores,
            "starts": self.starts,
            "snapshots_taken": self.snapshots,
            "evictions": self.evictions,
            "divergences": self.divergences,
            "audit_checked": self.audit_checked,
            "audit_differing": self.audit_differing,
            "warm_made": self.warm_made,
            "warm_used": self.warm_used,
            "errors": sum(self.failures.values()),
            "failures": dict(self.failures),
            "refusals": dict(self.refusals),
        }
