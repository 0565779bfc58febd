"""Alerts: conditions of the metrics that need somebody's attention (pure).

The page shows those that hold. Prometheus has the same rules: `docs/monitoring/alerts.yml` is written from this table.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

EVERY_S = 15.0
"""Interval of the readings, as Prometheus' usual one."""
_KEPT_S = 3600
"""How long readings are kept: the longest window of a rule."""
_MINUTE = 60

MetricValues = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
"""The values of metrics at one time, by name and labels."""


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """Series of one metric: all, or those whose label has one of some values."""

    metric: str
    label: str = ""
    values: tuple[str, ...] = ()
    window_s: int = 0  # Of which the increase counts; 0 for the values as they are.

    def of(self, reading: MetricValues, by: str) -> dict[str, float]:
        """Return the values of a reading by a label, as sums of counters or the highest one of gauges."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        for (metric, labels), value in reading.items():
            known = dict(labels)
            if metric == self.metric and (not self.label or known.get(self.label) in self.values):
                found[known.get(by, "")].append(value)
        return {name: sum(values) if self.window_s else max(values) for name, values in found.items()}


@dataclass(frozen=True, slots=True)
class AlertRule:
    """When an alert is raised: `series` is more than `above`, or than so many times `beside`, for some time."""

    name: str
    severity: Literal["critical", "warning"]
    summary: str
    what_to_do: str
    series: MetricSeries
    above: float = 0.0
    beside: MetricSeries | None = None
    by: str = ""  # A label whose values raise alerts of their own; the summary names it as {by}.
    for_s: int = 0
    each_s: bool = True  # Whether a window's increase is divided by its seconds.

    def met(self, readings: "Readings") -> set[str]:
        """Return the values of the label `by` for which the condition holds; the empty text without such a label."""
        left = self._values(self.series, readings)
        right = {} if self.beside is None else self._values(self.beside, readings)
        return {
            name for name, value in left.items()
            if value > self.above * (1.0 if self.beside is None else right.get(name, 0.0))
        }  # fmt: skip

    def _values(self, series: MetricSeries, readings: "Readings") -> dict[str, float]:
        at, now = readings[-1]
        values = series.of(now, self.by)
        if not series.window_s:
            return values
        first = next(reading for since, reading in readings if since >= at - series.window_s)
        before = series.of(first, self.by)
        # Of a window that has only begun, what is missing counts as 0, nearly as in Prometheus.
        span_s = series.window_s if self.each_s else 1.0
        return {name: (value - before.get(name, 0.0)) / span_s for name, value in values.items()}


Readings = deque[tuple[float, MetricValues]]
"""Readings with their times in seconds, oldest first."""


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert that is raised, and since when its condition holds, in the time of the readings."""

    rule: AlertRule
    group: str
    since: float

    @property
    def summary(self) -> str:
        """What is wrong."""
        return self.rule.summary.replace("{by}", self.group)


class Alerts:
    """The alerts that are raised now, from a reading of the metrics every `EVERY_S`."""

    def __init__(self) -> None:
        self._readings = Readings()
        self._since: dict[tuple[AlertRule, str], float] = {}

    def add(self, at: float, reading: MetricValues) -> None:
        """Take a reading."""
        self._readings.append((at, {key: value for key, value in reading.items() if key[0] in _METRICS}))
        while self._readings[0][0] < at - _KEPT_S:
            self._readings.popleft()
        met = [(rule, group) for rule in RULES for group in rule.met(self._readings)]
        self._since = {each: self._since.get(each, at) for each in met}

    def raised(self) -> Iterator[Alert]:
        """Yield the alerts that are raised as of the last reading."""
        for (rule, group), since in self._since.items():
            if self._readings[-1][0] - since >= rule.for_s:
                yield Alert(rule, group, since)


_FAILURES, _HITS = "forkpoint_failures_total", "forkpoint_hit_seconds"
RULES = (
    AlertRule(
        "ForkpointWrongAnswers", "critical", "An audit ran recorded calls again and received other answers.",
        "GET /api/v1/tasks/{task}/audit lists the calls. Mask known noise there. Quarantined calls run again for every "
        "rollout.",
        MetricSeries("forkpoint_audit_differing_total", window_s=60 * _MINUTE), each_s=False,
    ),
    AlertRule(
        "ForkpointWrongAnswerRate", "critical",
        "With 97.5 % confidence, more than one in a thousand audited answers differ.",
        "Look at the findings of the tasks. Exclude nondeterministic calls from the cache.",
        MetricSeries("forkpoint_wrong_answer_rate", "bound", ("low",)), 0.001, for_s=5 * _MINUTE,
    ),
    AlertRule(
        "ForkpointInfrastructureFailures", "warning", "Sandboxes, snapshots or the store fail ({by}).",
        "Read the proxy's log. Check disk space, memory and `forkpoint doctor`.",
        MetricSeries(_FAILURES, window_s=5 * _MINUTE), 0.1, by="kind", for_s=5 * _MINUTE,
    ),
    AlertRule(
        "ForkpointStoreFails", "critical", "The store cannot be written, so calls are answered with errors.",
        "Free disk space on the file system of `data`.",
        MetricSeries(_FAILURES, "kind", ("store",), 5 * _MINUTE), each_s=False,
    ),
    AlertRule(
        "ForkpointNoSandboxFree", "warning", "Calls have been waiting for a sandbox for two minutes.",
        "Run fewer rollouts at once, or raise max_sandboxes.",
        MetricSeries("forkpoint_sandbox_waiters"), for_s=2 * _MINUTE,
    ),
    AlertRule(
        "ForkpointSandboxesLeave", "warning",
        "Sandboxes are closed for room before their rollouts' next calls, which restore their states.",
        "Run fewer rollouts at once, or raise the limit that `forkpoint stats` names.",
        MetricSeries("forkpoint_sandboxes_evicted_total", window_s=5 * _MINUTE), 0.2,
        MetricSeries("forkpoint_calls_total", window_s=5 * _MINUTE), for_s=10 * _MINUTE,
    ),
    AlertRule(
        "ForkpointRefusals", "warning", "Calls are refused because there are too many ({by}).",
        "Raise max_requests or max_sandboxes, or slow the agents down.",
        MetricSeries("forkpoint_refusals_total", "kind", ("too-many-requests", "overloaded"), 5 * _MINUTE), by="kind",
        for_s=5 * _MINUTE,
    ),
    AlertRule(
        "ForkpointDivergences", "warning",
        "More than one in twenty replayed calls reaches another state than was recorded.",
        "Some commands are not reproducible, so their states depend on snapshots. Raise snapshot_bytes, or look at the "
        "tasks.",
        MetricSeries("forkpoint_divergences_total", window_s=15 * _MINUTE), 0.05,
        MetricSeries("forkpoint_replayed_calls_total", window_s=15 * _MINUTE), for_s=15 * _MINUTE,
    ),
    AlertRule(
        "ForkpointSnapshotsOverBudget", "warning",
        "The states that running rollouts need exceed their budget. A quarter beyond it, no new state is kept.",
        "Raise snapshot_bytes or the owner's disk, end rollouts that are over, or unpin nodes.",
        MetricSeries("forkpoint_snapshots_full"), for_s=5 * _MINUTE,
    ),
    AlertRule(
        "ForkpointSlowHits", "warning", "One hit in a hundred takes more than 5 ms.",
        "The machine has too little CPU, or another program runs on the proxy's core.",
        MetricSeries(f"{_HITS}_count", window_s=5 * _MINUTE), 1.0102,
        MetricSeries(f"{_HITS}_bucket", "le", ("0.005",), 5 * _MINUTE), for_s=10 * _MINUTE,
    ),
)  # fmt: skip
_METRICS = {series.metric for rule in RULES for series in (rule.series, rule.beside) if series is not None}
