"""Counters: totals of what happened, incremented where it happens (pure)."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from typing import Any

from proxy.telemetry.egress_log import EgressLog
from proxy.telemetry.histogram import FAST, Histogram
from proxy.telemetry.run_counters import RunCounters
from proxy.tree.call_totals import CallTotals
from proxy.tree.rollout import Outcome


@dataclass(slots=True)
class StateCounters:
    """What a member of a cluster did with the store of kept states; bytes are of written objects and read units."""

    sent: int = 0
    fetched: int = 0
    bytes_sent: int = 0
    bytes_fetched: int = 0


@dataclass(slots=True)
class Counters(CallTotals):
    """Totals since this process started. `GET /api/v1/stats` shows the numbers; `StatsView` says what each counts.

    Attributes:
        hit_s: Seconds from the last byte of a hit's request to its response.
        states: Kept states that were sent to the store of a cluster, and fetched from there.
        hits_refused: Known calls that were executed all the same, by reason: their states had no way back.
        failures: Failures of the infrastructure by kind. Such a call is not recorded.
    """

    replayed_calls: int = 0
    replayed_s: float = 0.0
    restores: int = 0
    starts: int = 0
    snapshots_taken: int = 0
    evictions: int = 0
    divergences: int = 0
    root_changes: int = 0
    audit_checked: int = 0
    audit_differing: int = 0
    warm_made: int = 0
    warm_used: int = 0
    model_tokens_saved: int = 0
    endpoints: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * len(Outcome)))
    egress: EgressLog = field(default_factory=EgressLog)
    runs: RunCounters = field(default_factory=RunCounters)
    hit_s: Histogram = field(default_factory=lambda: Histogram(FAST))
    start_s: Histogram = field(default_factory=Histogram)
    restore_s: Histogram = field(default_factory=Histogram)
    replay_s: Histogram = field(default_factory=Histogram)
    freeze_s: Histogram = field(default_factory=Histogram)
    states: StateCounters = field(default_factory=StateCounters)
    hits_refused: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def failure(self, kind: str) -> None:
        """Count a failure of the infrastructure."""
        self.failures[kind] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return the totals as `GET /api/v1/stats` shows them."""
        return {
            **CallTotals.as_dict(self),
            **{name: getattr(self, name) for name in _NUMBERS},
            "errors": sum(self.failures.values()),
            "recovered": sum(self.failures[kind] for kind in _RECOVERED),
            "hits_refused": dict(self.hits_refused),
            "failures": dict(self.failures),
            "refusals": dict(self.refusals),
        }


_RECOVERED = ("audit", "compaction", "damaged-answer", "damaged-state", "restore", "store", "warm")
"""Failures after which the proxy took another way, so that no call failed for them."""
_NUMBERS = [each.name for each in fields(Counters) if each.type in (int, float)]
"""The totals that are plain numbers; the REST API shows them under the same names."""
