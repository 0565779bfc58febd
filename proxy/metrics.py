"""The totals in Prometheus' terms. The one door to prometheus-client."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.engine import Engine
from proxy.forest import Outcome

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Totals(Collector):
    """Reads the engine's counts when it is asked; counting itself costs an addition."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        counts, engine = self._engine.counts, self._engine
        outcomes = {outcome.name.lower(): counts.outcomes[outcome] for outcome in Outcome}
        yield _labelled("forkpoint_calls", "Calls answered.", "outcome", outcomes.items())
        seconds = {"executed": counts.executed_s, "saved": counts.saved_s, "replayed": counts.replayed_s}
        yield _labelled("forkpoint_tool_seconds", "Seconds of tools: run, not run, run again.", "kind", seconds.items())
        yield _labelled("forkpoint_failures", "Infrastructure failures.", "kind", counts.failures.items())
        yield _labelled("forkpoint_refusals", "Requests refused.", "kind", counts.refusals.items())
        for name, value in (
            ("replayed_calls", counts.replayed_calls),
            ("restores", counts.restores),
            ("starts", counts.starts),
            ("snapshots_taken", counts.snapshots),
            ("evictions", counts.evictions),
            ("divergences", counts.divergences),
            ("warm_made", counts.warm_made),
            ("warm_used", counts.warm_used),
        ):
            yield CounterMetricFamily(f"forkpoint_{name}", f"{name.replace('_', ' ').capitalize()}.", value=value)
        for name, gauge in (
            ("sandboxes", len(engine.pool.roster)),
            ("sandboxes_budget", engine.settings.max_sandboxes),
            ("warm_sandboxes", len(engine.warm.standing())),
            ("checkpoint_bytes", engine.keeper.checkpoint_bytes),
            ("checkpoint_budget_bytes", engine.settings.checkpoint_bytes),
            ("snapshots", len(engine.snapshots)),
            ("snapshot_bytes", engine.keeper.used_bytes),
            ("snapshot_budget_bytes", engine.settings.snapshot_bytes),
        ):
            yield GaugeMetricFamily(f"forkpoint_{name}", f"{name.replace('_', ' ').capitalize()}.", value=gauge)


def _labelled(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values:
        family.add_metric([key], value)
    return family


class Metrics:
    """The `/metrics` page of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Totals(engine))

    def render(self) -> bytes:
        return generate_latest(self._registry)
