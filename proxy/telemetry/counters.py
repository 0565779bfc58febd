"""Counters: totals of what happened, incremented where it happens (pure)."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from proxy.telemetry.histogram import FAST, Histogram
from proxy.telemetry.run_counters import RunCounters
from proxy.tree.rollout import Outcome


@dataclass(slots=True)
class Counters:
    """Totals since this process started. Seconds of tools do not include restores and replays.

    Attributes:
        outcomes: Answered calls by `Outcome`.
        executed_s: Seconds that tools ran for misses and bypasses.
        saved_s: Seconds that tools would have run for hits and waits.
        replayed_calls: Calls that were replayed.
        replayed_s: Seconds that replays took.
        restores: Sandboxes restored from snapshots.
        starts: Sandboxes started afresh.
        snapshots: Snapshots taken.
        evictions: Snapshots evicted.
        divergences: Replays that reached another state than the recorded one.
        root_changes: Trees whose base, archive, image or database changed while the proxy ran.
        audit_checked: Recorded calls that audits ran again.
        audit_differing: Calls that audits ran again and that differ from their records.
        warm_made: Warm forks made.
        warm_used: Warm forks that a rollout used.
        speculated: Calls that were executed and recorded before any rollout made them.
        speculated_used: Of these, calls that a rollout made later.
        speculated_cancelled: Calls whose execution ahead was ended before they had ended.
        speculated_cpu_s: CPU seconds of the sandboxes in which calls were executed ahead.
        speculated_saved_s: Seconds that the tools of used calls ran.
        endpoints: Answered calls by endpoint, and by `Outcome`.
        runs: Answered calls of rollouts with the label `run`.
        hit_s: Seconds from the last byte of a hit's request to its response.
        start_s: Seconds that sandboxes took to start.
        restore_s: Seconds that restores took.
        replay_s: Seconds that replays of whole suffixes took.
        freeze_s: Seconds that captures took.
        failures: Failures of the infrastructure by kind. Such a call is not recorded.
        refusals: Requests that could not be served, by problem type.
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
    root_changes: int = 0
    audit_checked: int = 0
    audit_differing: int = 0
    warm_made: int = 0
    warm_used: int = 0
    speculated: int = 0
    speculated_used: int = 0
    speculated_cancelled: int = 0
    speculated_cpu_s: float = 0.0
    speculated_saved_s: float = 0.0
    endpoints: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * len(Outcome)))
    runs: RunCounters = field(default_factory=RunCounters)
    hit_s: Histogram = field(default_factory=lambda: Histogram(FAST))
    start_s: Histogram = field(default_factory=Histogram)
    restore_s: Histogram = field(default_factory=Histogram)
    replay_s: Histogram = field(default_factory=Histogram)
    freeze_s: Histogram = field(default_factory=Histogram)
    failures: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def answered(self, outcome: Outcome, tool_s: float) -> None:
        """Count an answered call.

        Args:
            outcome: How it was answered.
            tool_s: Seconds that the tool ran when the call was recorded.
        """
        self.outcomes[outcome] += 1
        if outcome is Outcome.HIT or outcome is Outcome.WAIT:
            self.saved_s += tool_s
        else:
            self.executed_s += tool_s

    def failure(self, kind: str) -> None:
        """Count a failure of the infrastructure."""
        self.failures[kind] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return the totals as `GET /api/v1/stats` shows them."""
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
            "root_changes": self.root_changes,
            "audit_checked": self.audit_checked,
            "audit_differing": self.audit_differing,
            "warm_made": self.warm_made,
            "warm_used": self.warm_used,
            "speculated": self.speculated,
            "speculated_used": self.speculated_used,
            "speculated_cancelled": self.speculated_cancelled,
            "speculated_cpu_s": self.speculated_cpu_s,
            "speculated_saved_s": self.speculated_saved_s,
            "errors": sum(self.failures.values()),
            "failures": dict(self.failures),
            "refusals": dict(self.refusals),
        }
