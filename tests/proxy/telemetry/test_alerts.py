"""Alerts: one table of rules, for Prometheus' file and for the page.

Write the file anew: `python -m tests.proxy.telemetry.test_alerts`
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.telemetry.alerts import EVERY_S, RULES, AlertRule, Alerts, MetricSeries
from tests.deploy.test_monitoring import MONITORING, program
from tests.proxy.serving import get, serving

FILE = MONITORING / "alerts.yml"
Walk = dict[str, list[float]]
"""Values of series by their names in PromQL, one for each `EVERY_S`."""


def written() -> str:
    """Return the rules as Prometheus reads them."""
    rules = []
    for rule in RULES:
        summary = rule.summary.replace("{by}", f"{{{{ $labels.{rule.by} }}}}")
        wait = {"for": f"{rule.for_s // 60}m"} if rule.for_s else {}
        notes = {"summary": summary, "what_to_do": rule.what_to_do}
        labels = {"severity": rule.severity}
        rules.append({"alert": rule.name, "expr": condition(rule), **wait, "labels": labels, "annotations": notes})
    body = yaml.safe_dump({"groups": [{"name": "forkpoint", "rules": rules}]}, sort_keys=False, width=1000)
    head = (
        "# Prometheus alert rules for Forkpoint: `rule_files: [alerts.yml]`. Written from proxy/telemetry/alerts.py.\n"
    )
    return head + body


def condition(rule: AlertRule) -> str:
    """Return the condition of a rule in PromQL."""

    def side(series: MetricSeries) -> str:
        text = "|".join(series.values)
        chosen = f'{{{series.label}{"=~" if len(series.values) > 1 else "="}"{text}"}}' if series.label else ""
        named = series.metric + chosen + (f"[{series.window_s // 60}m]" if series.window_s else "")
        groups = f"by (instance{f', {rule.by}' if rule.by else ''})"
        if not series.window_s:
            return f"max {groups} ({named})"
        return f"sum {groups} ({'rate' if rule.each_s else 'increase'}({named}))"

    right = f"{rule.above:g}" + ("" if rule.beside is None else f" * {side(rule.beside)}")
    return f"{side(rule.series)} > {right}"


def test_prometheus_has_the_rules_of_the_page() -> None:
    assert FILE.read_text() == written()


def raising(rule: AlertRule, *, slope: float) -> Walk:
    """Return series that grow by so much more than the rule allows: raised for more than 1, never for less."""
    labels = [rule.by] * bool(rule.by)

    def name(series: MetricSeries) -> str:
        chosen = dict.fromkeys(labels, "x") | ({series.label: series.values[0]} if series.label else {})
        text = ",".join(f'{label}="{value}"' for label, value in {**chosen, "instance": "a"}.items())
        return f"{series.metric}{{{text}}}"

    steps, beside = range(280), {}
    grows = (
        slope * EVERY_S * (rule.above or 0.1)
        if slope > 1
        else (0.0 if not rule.above else slope * rule.above * EVERY_S)
    )
    if rule.beside is not None:
        beside = {name(rule.beside): [EVERY_S * step for step in steps]}
    if not rule.series.window_s:
        above = (rule.above or 1.0) * slope if slope > 1 or rule.above else 0.0
        return {name(rule.series): [above] * len(steps), **beside}
    return {name(rule.series): [grows * step for step in steps], **beside}


def readings(walk: Walk) -> Iterator[tuple[float, Any]]:
    """Yield what `Alerts` reads of series."""
    for step in range(len(next(iter(walk.values())))):
        values = {}
        for text, series in walk.items():
            metric, _, labels = text.removesuffix("}").partition("{")
            pairs = (label.split("=") for label in labels.split(","))
            values[metric, tuple((label, value.strip('"')) for label, value in pairs)] = series[step]
        yield step * EVERY_S, values


@pytest.mark.parametrize("slope", [0.9, 1.1])
def test_page_and_prometheus_agree(tmp_path: Path, slope: float) -> None:
    """Both raise each alert for series that are beyond its bound, at the same times, and neither for others."""
    cases = []
    for rule in RULES:
        walk = raising(rule, slope=slope)
        alerts, raised = Alerts(), dict[float, bool]()
        for at, values in readings(walk):
            alerts.add(at, values)
            raised[at] = rule in {alert.rule for alert in alerts.raised()}
        assert raised[0] is False or not rule.series.window_s
        assert raised[60 * 60] is (slope > 1), rule.name
        for at in (60, rule.for_s + 120, 60 * 60):
            labels = {"severity": rule.severity, "instance": "a"} | ({rule.by: _group(walk, rule)} if rule.by else {})
            notes = {"summary": rule.summary.replace("{by}", labels.get(rule.by, "")), "what_to_do": rule.what_to_do}
            alarm = [{"exp_labels": labels, "exp_annotations": notes}] if raised[at] else []
            checked = {"eval_time": f"{at}s", "alertname": rule.name, "exp_alerts": alarm}
            series = [{"series": name, "values": " ".join(map(repr, values))} for name, values in walk.items()]
            cases.append({"interval": "15s", "input_series": series, "alert_rule_test": [checked]})
    tests = {"rule_files": [str(FILE)], "evaluation_interval": "15s", "tests": cases}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))
    command = [program("promtool"), "test", "rules", str(tmp_path / "tests.yml")]
    tested = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def _group(walk: Walk, rule: AlertRule) -> str:
    return next(iter(walk)).partition(f'{rule.by}="')[2].partition('"')[0]


def test_raised_alerts_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails raises an alert at the next reading, which the page shows with what to do."""
    alerts = Alerts()
    alerts.add(1.0, {("forkpoint_failures_total", (("kind", "store"),)): 0.0})
    alerts.add(2.0, {("forkpoint_failures_total", (("kind", "store"),)): 1.0})
    raised = list(alerts.raised())
    with serving(tmp_path) as proxy:
        assert get(proxy, "system/alerts")["items"] == []
        monkeypatch.setattr(Alerts, "raised", lambda _: iter(raised))
        (alert,) = get(proxy, "system/alerts")["items"]
        assert (alert["alert"], alert["severity"]) == ("ForkpointStoreFails", "critical")
        assert alert["what_to_do"] == "Free disk space on the file system of `data`."


if __name__ == "__main__":
    FILE.write_text(written())
