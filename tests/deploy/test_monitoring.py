"""The alert rules and the dashboard are understood by Prometheus itself, which scrapes a running proxy."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from forkpoint.ephemeral_proxy import free_port
from tests.machine import wait_until
from tests.proxy.serving import serving

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"


def program(name: str) -> str:
    """Return the path of a program of Prometheus, or skip."""
    result = shutil.which(name)
    if result is None:
        if os.environ.get("FORKPOINT_NEEDS_PROMETHEUS"):
            raise RuntimeError(f"{name} is missing, and FORKPOINT_NEEDS_PROMETHEUS is set")
        pytest.skip(f"needs {name} of Debian's package prometheus")
    return result


def check_rules(rules: Path) -> str:
    """Return what promtool says of a file of rules, which must be right."""
    checked = subprocess.run(
        [program("promtool"), "check", "rules", rules], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    return checked.stdout


def test_alerts_are_rules_of_prometheus() -> None:
    assert "10 rules found" in check_rules(MONITORING / "alerts.yml")


def test_expressions_of_the_dashboard_are_right(tmp_path: Path) -> None:
    """Each panel's expression becomes a rule, so that promtool reads it."""
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    expressions = [target["expr"].replace("$instance", ".+") for panel in panels for target in panel["targets"]]
    rules = [{"record": f"panel:{number}", "expr": expression} for number, expression in enumerate(expressions)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(expressions)} rules found" in check_rules(tmp_path / "rules.yml")
    assert len(expressions) > 30


def lost_members(written: Any, understood: Any, place: str = "") -> list[str]:
    """Return the places where a document has something that another one lacks or has otherwise."""
    if isinstance(written, dict) and isinstance(understood, dict):
        return [
            lost
            for name, value in written.items()
            for lost in (
                lost_members(value, understood[name], f"{place}/{name}") if name in understood else [f"{place}/{name}"]
            )
        ]
    if isinstance(written, list) and isinstance(understood, list) and len(written) == len(understood):
        pairs = enumerate(zip(written, understood, strict=True))
        return [lost for at, (one, other) in pairs for lost in lost_members(one, other, f"{place}/{at}")]
    return [] if written == understood else [place]


def understood(dashboard: Any) -> Any:
    """Return a dashboard as the models that Grafana Labs generates from its schema read and write it."""
    register_default_plugins()
    return json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(dashboard)))


def test_dashboard_follows_grafanas_schema() -> None:
    """No registry has Grafana itself. Its published models know each member, and would drop one that they do not."""
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    assert lost_members(dashboard, understood(dashboard)) == []
    dashboard["panels"][1]["optionz"] = {}
    assert lost_members(dashboard, understood(dashboard)) == ["/panels/1/optionz"]


def test_alert_fires_on_a_wrong_answer(tmp_path: Path) -> None:
    """An audit that finds one differing call raises the alert, and one that finds none does not."""
    series = "forkpoint_audit_differing_total{instance='a'}"
    quiet = [{"eval_time": "30m", "alertname": "ForkpointWrongAnswers", "exp_alerts": []}]
    rule = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"][0]
    raised = {"exp_labels": {"severity": "critical", "instance": "a"}, "exp_annotations": rule["annotations"]}
    alarm = [{"eval_time": "30m", "alertname": rule["alert"], "exp_alerts": [raised]}]
    case: dict[str, Any] = {"interval": "1m"}
    tests = [
        case | {"input_series": [{"series": series, "values": "0x60"}], "alert_rule_test": quiet},
        case | {"input_series": [{"series": series, "values": "0x20 1x40"}], "alert_rule_test": alarm},
    ]
    (tmp_path / "tests.yml").write_text(
        yaml.safe_dump({"rule_files": [str(MONITORING / "alerts.yml")], "evaluation_interval": "1m", "tests": tests})
    )
    tested = subprocess.run(
        [program("promtool"), "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """Run a Prometheus that scrapes one proxy each second, with the alert rules."""
    port = free_port()
    job = {"job_name": "forkpoint", "static_configs": [{"targets": [target]}]}
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(MONITORING / "alerts.yml")],
        "scrape_configs": [job],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30, trust_env=False) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


def test_prometheus_scrapes_a_proxy(tmp_path: Path) -> None:
    """The page has a form that Prometheus reads, and all rules are evaluated without an error."""
    program("prometheus")
    with serving(tmp_path / "data") as proxy:
        for rollout in ("a", "b"):
            proxy.exec(rollout, "echo 1 > f")
        with prometheus(tmp_path, f"{proxy.address[0]}:{proxy.address[1]}") as client:

            def value() -> float:
                try:
                    response = client.get("/query", params={"query": 'forkpoint_calls_total{outcome="hit"}'})
                    return float(response.json()["data"]["result"][0]["value"][1])
                except (httpx.TransportError, KeyError, IndexError, ValueError):
                    return 0

            def evaluated() -> list[str]:
                groups = client.get("/rules").json()["data"]["groups"]
                return [rule["health"] for group in groups for rule in group["rules"]]

            wait_until(lambda: value() == 1, "Prometheus has no sample of a hit", within_s=60)
            wait_until(lambda: "unknown" not in evaluated(), "rules were not evaluated", within_s=60)
            assert evaluated() == ["ok"] * 10
