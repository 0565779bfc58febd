"""Reports sum the steps of chosen rollouts, in groups, and compare with other caches."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from proxy.cli.main import app
from proxy.cli.rendering.report_page import page
from proxy.control.reports import ReportPart, quantile, report_of
from tests.proxy.serving import Running, serving

ATTACK = "<script>alert(1)</script>"
GROUPS = {
    # Two rollouts make the same calls; the third writes something else, and then reads the same file.
    "run=a,step=2,reward=1": ["echo one > f", "cat f"],
    "run=a,step=10,reward=0": ["echo one > f", "cat f"],
    "run=b,step=2": ["echo two > f", "cat f", "ls"],
}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        for number, (labels, commands) in enumerate(GROUPS.items()):
            for command in commands:
                answer = running.client.post(
                    f"/t/demo/r/r{number}/shell/exec", json={"command": command},
                    headers={"x-forkpoint-labels": labels},
                )  # fmt: skip
                answer.raise_for_status()
        at = "/api/v1/tasks/hostile/rollouts"
        running.client.post(at, json={"rollout": "x", "labels": {"run": ATTACK}}).raise_for_status()
        running.exec("x", "echo one > f", task="hostile").raise_for_status()
        # It made no call, so it is in no report.
        running.client.post(at, json={"rollout": "y", "labels": {"run": "unused"}}).raise_for_status()
        yield running


def report(proxy: Running, query: str = "", task: str = "") -> Any:
    path = f"tasks/{task}/report" if task else "report"
    return proxy.client.get(f"/api/v1/{path}?{query}").raise_for_status().json()


def test_groups_have_their_calls_seconds_and_rewards(proxy: Running) -> None:
    view = report(proxy, "by=run&price=7200", "demo")
    a, b = view["rows"]
    assert (a["group"], a["rollouts"], a["calls"], a["hits"], a["misses"]) == ("a", 2, 4, 2, 2)
    assert (a["hit_rate"], a["reward"], a["rewarded"]) == (0.5, 0.5, 2)
    assert (b["group"], b["rollouts"], b["calls"], b["hits"], b["reward"]) == ("b", 1, 3, 0, None)
    assert a["saved_s"] == pytest.approx(a["executed_s"])
    assert a["saved_cost"] == pytest.approx(2 * a["saved_s"])
    assert (a["paid_p50_s"], a["paid_p95_s"] > 0, a["replayed_s"] is not None) == (0.0, True, True)
    total = view["total"]
    assert (total["calls"], total["rollouts"], total["hits"]) == (7, 3, 2)


def test_numbers_are_in_their_order(proxy: Running) -> None:
    assert [row["group"] for row in report(proxy, "by=step")["rows"]] == ["2", "10", None]


def test_labels_and_task_choose_rollouts(proxy: Running) -> None:
    assert [row["calls"] for row in report(proxy, "by=step&label=run=a")["rows"]] == [2, 2]
    assert [row["calls"] for row in report(proxy, "by=step&label=run=a&label=step=10")["rows"]] == [2]
    assert [row["group"] for row in report(proxy, "by=run", "hostile")["rows"]] == [ATTACK]
    assert [row["group"] for row in report(proxy, "by=task")["rows"]] == ["demo", "hostile"]


def test_endpoints_are_groups(proxy: Running) -> None:
    view = report(proxy, "by=endpoint", "demo")
    assert [(row["group"], row["calls"]) for row in view["rows"]] == [("shell", 7)]
    assert view["total"]["rollouts"] == 3


def test_endpoints_have_what_calls_took_beside_their_tools(proxy: Running) -> None:
    """All calls went to one endpoint, so it has what the rows of the rollouts sum up."""
    by_task, by_endpoint = (report(proxy, f"by={by}", "demo")["rows"][0] for by in ("task", "endpoint"))
    for name in ("restored_s", "replayed_s", "waited_s"):
        assert by_endpoint[name] == pytest.approx(by_task[name])
    assert by_endpoint["restored_s"] > 0


def test_other_caches_are_computed_from_the_records(proxy: Running) -> None:
    """A stateless cache answers `cat f` with what another rollout wrote: one wrong answer."""
    none, stateless, stateful = report(proxy, "", "demo")["arms"]
    assert [arm["executed"] for arm in (none, stateless, stateful)] == [7, 4, 5]
    assert [arm["wrong"] for arm in (none, stateless, stateful)] == [0, 1, 0]
    assert none["tool_s"] > stateful["tool_s"] > stateless["tool_s"] > 0


@pytest.mark.parametrize("query", ["by=a%20b", "by=%24.x", "label=run", "label=step=x", "price=-1"])
def test_malformed_report_is_refused(proxy: Running, query: str) -> None:
    assert proxy.client.get(f"/api/v1/report?{query}").status_code == 422


def test_sum_of_finite_rewards_may_be_infinite(tmp_path: Path) -> None:
    """The worker that makes the report of all gets it, and shows no mean."""
    with serving(tmp_path) as running:
        for rollout in ("a", "b"):
            way = f"/t/demo/r/{rollout}/shell/exec"
            labels = {"x-forkpoint-labels": "run=huge,reward=1.5e308"}
            running.client.post(way, json={"command": "ls"}, headers=labels).raise_for_status()
        part = ReportPart.unpacked(running.client.get("/api/v1/report/part").raise_for_status().content)
        (row,) = report_of([part, part]).rows
        assert (row.rewarded, row.reward) == (4, float("inf"))
        assert report(running)["rows"][0]["reward"] is None


def test_token_of_one_task_reports_that_task(tmp_path: Path) -> None:
    whole, own = "0123456789abcdef", "fedcba9876543210"
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{whole} *\n{own} demo\n")
    with serving(tmp_path / "data", token_file=tokens) as running:
        sent = {"x-forkpoint-token": own}
        running.client.put("/api/v1/tasks/demo", json={"driver": "memory"}, headers=sent).raise_for_status()
        statuses = [
            running.client.get(f"/api/v1/{path}", headers=sent).status_code
            for path in ("tasks/demo/report", "tasks/other/report", "report")
        ]
    assert statuses == [200, 403, 403]


def command(proxy: Running, *words: str) -> str:
    environment = {"FORKPOINT_URL": str(proxy.client.base_url), "COLUMNS": "200"}
    result = CliRunner().invoke(app, ["report", *words], env=environment)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_command_compares_two_runs(proxy: Running, tmp_path: Path) -> None:
    runs = ("--label", "run=a", "--against", "run=b")
    text = command(proxy, "demo", "--by", "step", *runs, "--html", str(tmp_path / "r"))
    assert "run=a, task demo, by step" in text
    assert "run=b, task demo, by step" in text
    assert "stateless" in text
    shown = (tmp_path / "r").read_text()
    assert shown.count("<svg") == 4
    assert shown.count("<polyline") == 8
    assert [each["total"]["calls"] for each in json.loads(command(proxy, *runs, "--json"))] == [4, 3]


def test_unknown_label_is_an_error_that_names_the_known_ones(proxy: Running) -> None:
    environment = {"FORKPOINT_URL": str(proxy.client.base_url), "COLUMNS": "200"}
    result = CliRunner().invoke(app, ["report", "--by", "nosuch"], env=environment)
    assert result.exit_code == 2
    assert all(name in result.output for name in ("run", "step", "task", "endpoint"))


def test_names_have_bars_and_steps_a_line(proxy: Running) -> None:
    names, steps = page([report(proxy, "by=run", "demo")]), page([report(proxy, "by=step&label=run=a", "demo")])
    assert ("<polyline" in names, "<rect" in names) == (False, True)
    assert ("<polyline" in steps, "<rect" in steps) == (True, False)
    assert ">100</text>" in names


def test_page_has_no_script_and_escapes_labels(proxy: Running) -> None:
    shown = page([report(proxy, "by=run"), report(proxy, "by=task")])
    assert "<script" not in shown
    assert "&lt;script&gt;alert(1)" in shown
    assert re.search(r"\ssrc=|\shref=|url\(|\son\w+=", shown) is None


def test_tokens_have_columns_where_models_were_asked(proxy: Running) -> None:
    """Most reports have no tokens, and no columns for them."""
    view = report(proxy, "by=run", "demo")
    assert "saved tokens" not in page([view])
    view["total"]["saved_tokens"] = 1234
    assert [text in page([view]) for text in ("saved tokens", "1,234")] == [True, True]


@pytest.mark.parametrize(
    ("weighted", "share", "value"),
    [([], 0.5, 0.0), ([(2.0, 1)], 0.95, 2.0), ([(1.0, 1), (2.0, 1)], 0.5, 1.0), ([(0.0, 9), (5.0, 1)], 0.95, 5.0),
     ([(5.0, 1), (0.0, 19)], 0.95, 0.0)],
)  # fmt: skip
def test_quantile_weighs_values(weighted: list[tuple[float, int]], share: float, value: float) -> None:
    assert quantile(weighted, share) == value
