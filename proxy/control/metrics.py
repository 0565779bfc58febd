"""The `/metrics` page in Prometheus' text format. No other module imports prometheus-client."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from proxy.audit.confidence import clopper_pearson
from proxy.control.parts import ControlPlane
from proxy.telemetry.alerts import MetricValues
from proxy.telemetry.run_counters import OTHERS
from proxy.tree.rollout import Outcome
from sandboxes.pool.lifecycle import SandboxState
from sandboxes.video.driver import VideoDriver

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """The `/metrics` page: reads the engine's counters at each scrape, so counting costs an addition and no lock."""

    def __init__(self, control: ControlPlane) -> None:
        self._control, self._registry = control, CollectorRegistry()
        self._registry.register(self)

    def values(self) -> MetricValues:
        """Return the values of all metrics."""
        samples = (sample for family in self._registry.collect() for sample in family.samples)
        return {(name, tuple(labels.items())): value for name, labels, value, *_ in samples}

    def render(self) -> bytes:
        """Return the page."""
        return generate_latest(self._registry)

    @override
    def collect(self) -> Iterator[Metric]:
        control, counts = self._control, self._control.counts
        named = (
            "replayed_calls", "restores", "starts", "snapshots_taken", "evictions", "divergences", "root_changes",
            "warm_made", "warm_used", "model_tokens_saved",
        )  # fmt: skip
        values = {name: getattr(counts, name) for name in named}
        values |= {"states_sent": counts.states.sent, "states_fetched": counts.states.fetched}
        values |= {"state_bytes_sent": counts.states.bytes_sent, "state_bytes_fetched": counts.states.bytes_fetched}
        for name, value in values.items():
            yield CounterMetricFamily(f"forkpoint_{name}", f"{name.replace('_', ' ').capitalize()}.", value=value)
        text = "Sandboxes that were closed for room before their rollouts had ended."
        yield CounterMetricFamily("forkpoint_sandboxes_evicted", text, value=control.pool.evicted)
        video = control.drivers.get("video")
        if isinstance(video, VideoDriver):
            text = "Tokens that models of video tools counted."
            yield CounterMetricFamily("forkpoint_model_tokens", text, value=video.models.tokens)
        seconds = {"executed": counts.executed_s, "saved": counts.saved_s, "replayed": counts.replayed_s}
        text = "Tool seconds by kind: executed for misses, saved by hits, replayed."
        yield _labelled("tool_seconds", text, "kind", seconds)
        text = "Known calls that ran again: their states had no way back."
        yield _labelled("hits_refused", text, "reason", counts.hits_refused)
        # A kind that an alert waits for is there before the first one: nothing has increased where a series begins.
        failures = {"store": 0, **counts.failures}
        yield _labelled("failures", "Failures of the infrastructure.", "kind", failures)
        yield _labelled("refusals", "Requests that could not be served.", "kind", counts.refusals)
        egress = counts.egress
        yield _labelled("egress_requests", "Requests of sandboxes to hosts outside.", "outcome", egress.requests)
        yield _labelled("egress_bytes", "Bytes that these brought into sandboxes.", "outcome", egress.size_bytes)
        yield _labelled("calls", "Calls answered.", "outcome", _by_outcome(counts.outcomes))
        endpoints = {name: _by_outcome(outcomes) for name, outcomes in sorted(counts.endpoints.items())}
        yield _by_two("endpoint_calls", "Calls answered over HTTP.", ("endpoint", "outcome"), endpoints)
        # What rollouts with the label `run` did: the runs used last, and all others together.
        runs = {OTHERS: counts.runs.others, **dict(sorted(counts.runs.totals.items()))}
        outcomes = {run: _by_outcome(totals.outcomes) for run, totals in runs.items()}
        yield _by_two("run_calls", "Calls answered, by the label run.", ("run", "outcome"), outcomes)
        spent = {run: {"executed": totals.executed_s, "saved": totals.saved_s} for run, totals in runs.items()}
        text = "Tool seconds executed and saved, by the label run."
        yield _by_two("run_tool_seconds", text, ("run", "kind"), spent)
        yield from self._times()
        yield from self._gauges()
        yield from self._audits()

    def _times(self) -> Iterator[Metric]:
        counts = self._control.counts
        for name, text, times in (
            ("hit", "Hits: from the last byte of the request to the response.", counts.hit_s),
            ("start", "Starting a sandbox from nothing.", counts.start_s),
            ("restore", "Restoring a sandbox from a snapshot.", counts.restore_s),
            ("replay", "Replaying recorded calls until a sandbox is in the state of a node.", counts.replay_s),
            ("freeze", "Taking a snapshot, while the model thinks.", counts.freeze_s),
        ):
            family = HistogramMetricFamily(f"forkpoint_{name}_seconds", text)
            family.add_metric([], list(times.cumulative()), times.total_s)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        control = self._control
        for name, gauge in (
            ("sandboxes", len(control.pool.roster)),
            ("sandboxes_budget", control.pool.bound.most),
            ("warm_sandboxes", len(control.warm.forks())),
            ("checkpoint_bytes", control.cache.checkpoint_bytes),
            ("checkpoint_budget_bytes", control.settings.checkpoint_bytes),
            ("snapshots", len(control.snapshots)),
            ("snapshot_bytes", control.cache.used_bytes),
            ("snapshots_full", len(control.cache.full)),
            ("snapshots_unproven", len(control.cache.unproven)),
            ("damaged_rows", control.store.trees.damaged + sum(control.store.database.damaged.values())),
            ("snapshot_budget_bytes", control.settings.snapshot_bytes),
            ("answer_bytes", control.answers.used_bytes),
            ("answer_budget_bytes", control.settings.answer_memory_bytes),
            ("store_bytes", control.store.database.size_bytes()),
            ("tree_records", control.trees.size),
            ("tree_records_budget", control.settings.tree_memory_records),
            ("rollouts", len(control.tasks.rollouts.running)),
            ("calls_under_way", len(control.step.calls)),
            ("sandbox_waiters", control.pool.waiting),
            ("visits", control.scratch_forks.open),
            ("listeners", len(control.activity.listeners)),
        ):
            yield GaugeMetricFamily(f"forkpoint_{name}", f"{name.replace('_', ' ').capitalize()}.", value=gauge)
        states = GaugeMetricFamily("forkpoint_sandboxes_by_state", "Live sandboxes.", labels=["state"])
        slots = Counter(slot.state for slot in control.pool.roster.slots)
        for state in SandboxState:
            if state is not SandboxState.CLOSED:
                states.add_metric([state.value], slots[state])
        yield states
        text = "Calls of each quota here: that run, that wait, and that may run at once."
        quotas = GaugeMetricFamily("forkpoint_quota_calls", text, labels=["tasks", "state"])
        for pattern, quota in () if control.executor.quotas is None else control.executor.quotas.each.items():
            for name, calls in (*quota.usage._asdict().items(), ("share", quota.share)):
                quotas.add_metric([pattern, name], calls)
        yield quotas

    def _audits(self) -> Iterator[Metric]:
        counts = self._control.counts
        text = "Recorded calls that audits ran again."
        yield CounterMetricFamily("forkpoint_audit_checked", text, value=counts.audit_checked)
        text = "Recorded calls that audits ran again and that differ from their records."
        yield CounterMetricFamily("forkpoint_audit_differing", text, value=counts.audit_differing)
        text = "Rate of wrong answers over all audits: seen, and 95 % confidence bounds (Clopper-Pearson)."
        rate = GaugeMetricFamily("forkpoint_wrong_answer_rate", text, labels=["sample", "bound"])
        for estimate in wrong_answers(self._control):
            for bound, value in (("low", estimate.low), ("seen", estimate.seen), ("high", estimate.high)):
                rate.add_metric([estimate.sample, bound], value)
        yield rate


@dataclass(frozen=True, slots=True)
class WrongAnswers:
    """The rate of wrong answers over all audits of all tasks, from 0 to 1, with its 95 % bounds (Clopper-Pearson)."""

    sample: str
    checked: int
    differing: int
    low: float
    seen: float
    high: float

    @classmethod
    def of(cls, sample: str, checked: int, differing: int) -> "WrongAnswers":
        """Return the rate for a kind of sample."""
        interval = clopper_pearson(differing, checked)
        return cls(sample, checked, differing, interval.low, differing / checked if checked else 0.0, interval.high)


def wrong_answers(control: ControlPlane) -> Iterator[WrongAnswers]:
    """Return the rate of wrong answers for each kind of sample."""
    for kind, checked, differing, _, _ in control.store.audits.totals():
        yield WrongAnswers.of(kind, checked, differing)


def _by_outcome(outcomes: Sequence[int]) -> dict[str, int]:
    return {outcome.name.lower(): outcomes[outcome] for outcome in Outcome}


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"forkpoint_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _by_two(
    name: str, text: str, labels: tuple[str, str], values: Mapping[str, Mapping[str, float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"forkpoint_{name}", text, labels=labels)
    for key, each in values.items():
        for other, value in each.items():
            family.add_metric([key, other], value)
    return family
