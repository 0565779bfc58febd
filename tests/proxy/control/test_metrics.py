"""The metrics page with its dashboards and alerts, traces, and log lines."""

import asyncio
import io
import json
import logging
import re
from pathlib import Path

import pytest
import structlog
import yaml
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from proxy.execution.tracing import Traces
from proxy.logs import setup
from proxy.telemetry.histogram import Histogram
from proxy.tree.rollout import Outcome
from tests.proxy.rig import ask, engine
from tests.proxy.serving import Running, serving

DOCS = Path(__file__).parents[3] / "docs" / "monitoring"
_NAME = re.compile(r"forkpoint_[a-z_]+")


def scrape(proxy: Running) -> dict[tuple[str, ...], float]:
    """Return the samples of the page by name and label values."""
    page = proxy.client.get("/metrics")
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], float]:
    with serving(tmp_path_factory.mktemp("data")) as proxy:
        for rollout in ("a", "b", "c"):
            proxy.exec(rollout, "echo 1 > f")
            proxy.exec(rollout, "cat f")
        proxy.client.put("/t/task/r/a/shell/files/g", content=b"x")
        proxy.client.get("/t/task/r/a/nothing/x")
        proxy.client.post("/api/v1/tasks/task/verify", json={"sample": None})
        while proxy.client.get("/api/v1/tasks/task/audit").json()["running"] is not None:
            pass
        return scrape(proxy)


def test_calls_are_counted_by_endpoint_and_outcome(samples: dict[tuple[str, ...], float]) -> None:
    assert samples["forkpoint_endpoint_calls_total", "shell", "hit"] == 4
    assert samples["forkpoint_endpoint_calls_total", "shell", "miss"] == 3
    assert samples["forkpoint_calls_total", "hit"] == 4
    assert samples["forkpoint_refusals_total", "no-such-endpoint"] == 1


def test_calls_are_counted_by_run(tmp_path: Path) -> None:
    """A label that is set later counts from then on; so does one that an earlier process read."""
    attack = 'a"} 1\\'
    with serving(tmp_path) as proxy:
        for rollout in ("a", "b"):
            sent = {"x-forkpoint-labels": "run=r7"}
            proxy.client.post(
                f"/t/task/r/{rollout}/shell/exec", json={"command": "X=1"}, headers=sent
            ).raise_for_status()
        proxy.exec("c", "X=1").raise_for_status()
        proxy.client.patch("/api/v1/tasks/task/rollouts/c/labels", json={"run": attack}).raise_for_status()
        proxy.exec("c", "cat seed").raise_for_status()
        result = scrape(proxy)
    assert [result["forkpoint_run_calls_total", kind, "r7"] for kind in ("hit", "miss")] == [1, 1]
    assert result["forkpoint_run_tool_seconds_total", "saved", "r7"] > 0
    assert result["forkpoint_run_calls_total", "miss", attack] == 1
    assert result["forkpoint_run_calls_total", "miss", "(other)"] == 0
    with serving(tmp_path) as proxy:
        proxy.exec("c", "cat seed").raise_for_status()
        assert scrape(proxy)["forkpoint_run_calls_total", "hit", attack] == 1


def test_hits_and_sandbox_operations_are_timed(samples: dict[tuple[str, ...], float]) -> None:
    assert samples["forkpoint_hit_seconds_count",] == 4
    assert 0 < samples["forkpoint_hit_seconds_sum",] < 1
    assert samples["forkpoint_hit_seconds_bucket", "+Inf"] == 4
    assert samples["forkpoint_start_seconds_count",] >= 1
    assert samples["forkpoint_freeze_seconds_count",] >= 1


def test_budgets_states_and_audits_are_exported(samples: dict[tuple[str, ...], float]) -> None:
    states = ("starting", "leased", "freezing", "idle")
    assert (
        sum(samples["forkpoint_sandboxes_by_state", state] for state in states) == samples["forkpoint_sandboxes",] >= 1
    )
    assert samples["forkpoint_answer_bytes",] > 0
    assert samples["forkpoint_store_bytes",] > 0
    assert samples["forkpoint_audit_checked_total",] == 3
    assert samples["forkpoint_wrong_answer_rate", "seen", "records"] == 0
    assert 0 < samples["forkpoint_wrong_answer_rate", "high", "records"] < 1


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yml"])
def test_dashboards_and_alerts_name_existing_metrics(file: str, samples: dict[tuple[str, ...], float]) -> None:
    text = (DOCS / file).read_text()
    assert json.loads(text) if file.endswith("json") else yaml.safe_load(text)
    named = set(_NAME.findall(text)) - {"forkpoint_"}
    # A counter by label has no sample before it counts.
    there = {name for name, *_ in samples} | {"forkpoint_failures_total"}
    assert named <= there, named - there
    assert len(named) > 8


def test_each_alert_says_what_to_do() -> None:
    rules = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"][0]["rules"]
    assert all(rule["annotations"].keys() == {"summary", "what_to_do"} for rule in rules)


@given(st.lists(st.floats(0, 100), max_size=50))
def test_histogram_counts_each_observation_once(seconds: list[float]) -> None:
    times = Histogram()
    for value in seconds:
        times.observe(value)
    buckets = list(times.cumulative())
    assert buckets[-1] == ("+Inf", len(seconds))
    assert all(below == sum(value <= float(bound) for value in seconds) for bound, below in buckets)
    assert times.total_s == pytest.approx(sum(seconds))


def test_call_is_a_span_with_parts(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()

    async def go() -> None:
        async with engine(tmp_path) as running:
            traces = Traces(running.store.records, "", exporter)
            running.step.notes._traces = traces
            task = await running.tasks.open("task")
            for name in ("a", "b"):
                rollout = running.tasks.rollouts.begin(task, name, task.tree, task.tree.root)
                await ask(running, rollout, "echo 1 > f")
            traces.close()

    asyncio.run(go())
    spans = exporter.get_finished_spans()
    calls = [span for span in spans if span.parent is None]
    assert [(span.name, (span.attributes or {})["forkpoint.outcome"]) for span in calls] == [
        ("shell exec", Outcome.MISS.name.lower()), ("shell exec", Outcome.HIT.name.lower()),
    ]  # fmt: skip
    assert {(span.attributes or {})["forkpoint.rollout"] for span in calls} == {"a", "b"}
    parts = {span.name for span in spans if span.parent is not None}
    assert {"tool", "restore"} <= parts
    missed = calls[0]
    inner = [span for span in spans if span.parent is not None]
    for part in inner:
        times = (missed.start_time, part.start_time, part.end_time, missed.end_time)
        assert list(times) == sorted(time or 0 for time in times)


def test_log_lines_name_task_rollout_and_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level

    async def go() -> str:
        # First, as in a proxy that starts: the engine's loggers are bound to it.
        setup("debug", json=True)
        async with engine(tmp_path) as running:
            task = await running.tasks.open("demo")
            rollout = running.tasks.rollouts.begin(task, "r7", task.tree, task.tree.root)
            await ask(running, rollout, "echo 1 > f")
            return f"n{task.tree.root.id}"

    try:
        root = asyncio.run(go())
    finally:
        structlog.reset_defaults()
        logging.getLogger().handlers[:] = handlers
        logging.getLogger().setLevel(level)
    lines = [json.loads(line) for line in written.getvalue().splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line["event"] == "answered"]
    assert (line["task"], line["rollout"], line["node"], line["outcome"]) == ("demo", "r7", root, "miss")
