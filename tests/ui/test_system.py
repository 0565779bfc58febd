"""The proxy itself on the page: its last day, budgets, warnings, settings and runs; and the palette that finds all."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from pydantic import SecretStr

from proxy import logs
from proxy.control.activity import Second
from proxy.control.history import DAY, History
from proxy.storage.store import Store
from proxy.telemetry.alerts import RULES, Alert, Alerts
from tests.proxy.serving import Running, serving


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        for task in ("fix-1", "fix-2", "other"):
            for rollout in "ab":
                running.exec(rollout, "echo 1 > f", task=task)
        running.client.patch("/api/v1/tasks/fix-1/rollouts/a/labels", json={"run": "r7", "reward": 1})
        yield running


@pytest.fixture
def ui(proxy: Running, page: Page) -> Page:
    page.goto(f"{proxy.client.base_url}/ui/")
    return page


def test_minutes_outlive_a_restart(tmp_path: Path) -> None:
    """Sixty seconds make a minute; what is written is read by the next process, and damage is no error."""
    store = Store(tmp_path / "forkpoint.sqlite")
    history = History(store)
    for second in range(5 * 60):
        history.add(Second(float(second), hits=2))
    assert [(minute.at, minute.hits) for minute in history.minutes][:2] == [(59.0, 120), (119.0, 120)]
    assert len(History(store).minutes) == 5
    assert History(store).minutes.maxlen == DAY
    store.database.put_mark("activity", "[[1]", durable=False)
    assert not History(store).minutes
    store.close()


def test_secrets_of_settings_are_never_shown(tmp_path: Path) -> None:
    with serving(tmp_path, token=SecretStr("s3cret-token-0123456789")) as running:
        headers = {"authorization": "Bearer s3cret-token-0123456789"}
        answer = running.client.get("/api/v1/system/settings", headers=headers)
        assert answer.status_code == 200
        assert "s3cret-token-0123456789" not in answer.text
        shown = {setting["name"]: setting for setting in answer.json()["items"]}
        assert (shown["token"]["value"], shown["token"]["usual"]) == ("set, not shown", False)
        assert shown["port"]["usual"]
        assert running.client.get("/api/v1/system/settings").status_code == 401


def test_warnings_are_kept_and_shown_as_text(ui: Page) -> None:
    """The latest first, with links to what they are about; what a tool said stays text."""
    logs.remember(None, "info", {"level": "info", "event": "nothing"})
    logs.remember(None, "warning", {"level": "warning", "event": "<b>odd</b>", "task": "fix-1", "node": "n2", "why": 3})
    ui.goto(ui.url + "#/system")
    row = ui.locator("#events tbody tr").first
    expect(row).to_contain_text("<b>odd</b>")
    expect(row).to_contain_text("why=3")
    expect(row.get_by_role("link", name="n2")).to_have_attribute("href", "#/t/fix-1/n/n2")
    expect(ui.locator("#budgets")).to_contain_text("Snapshots")
    expect(ui.locator("#settings")).to_contain_text("max_sandboxes")


def test_warnings_name_the_task_of_their_node(proxy: Running) -> None:
    """An audit runs for no rollout, so its warnings name a node alone; a node that is gone keeps its number."""
    node = proxy.client.get("/api/v1/tasks/fix-2/rollouts/a").json()["node"]
    for number in (int(node[1:]), 10**9):
        logs.remember(None, "warning", {"level": "warning", "event": "recorded call differs", "node": number})
    gone, found, *_ = proxy.client.get("/api/v1/system/warnings").json()["items"]
    assert (found["task"], found["node"]) == ("fix-2", node)
    assert ("task" in gone, gone["node"]) == (False, "n1000000000")


def test_history_has_steps_and_wrong_answers_bounds(proxy: Running) -> None:
    view = proxy.client.get("/api/v1/system/history?span_s=600").json()
    assert view["step_s"] == 5
    assert proxy.client.get("/api/v1/system/history?span_s=86400").json() == {"step_s": 600, "steps": []}
    assert proxy.client.get("/api/v1/system/wrong-answers").json()["next"] is None


def test_range_is_in_the_address(ui: Page) -> None:
    ui.get_by_role("button", name="24 h").click()
    expect(ui.get_by_text("12 h ago")).to_be_visible()
    expect(ui).to_have_url(re.compile("span=86400"))


def test_families_sum_up_tasks(ui: Page) -> None:
    ui.get_by_role("button", name="Families").click()
    rows = ui.locator("table.tasks tbody tr")
    expect(rows).to_have_count(2)
    family = rows.filter(has_text="fix…")
    expect(family).to_contain_text("2 tasks")
    expect(family.locator("td").nth(3)).to_have_text("4")
    family.get_by_role("button").click()
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("fix-")


def test_palette_finds_tasks_rollouts_and_views(ui: Page) -> None:
    ui.keyboard.press("Control+k")
    field = ui.get_by_role("combobox", name="Find a view")
    field.fill("fix-2")
    expect(ui.get_by_role("option").first).to_contain_text("fix-2")
    ui.keyboard.press("Enter")
    expect(ui.locator("main[data-ready] canvas")).to_be_visible()
    assert ui.url.endswith("#/t/fix-2")
    ui.keyboard.press("Control+k")
    expect(ui.get_by_role("option", name="a rollout")).to_be_visible()
    field.fill("runs")
    ui.keyboard.press("Enter")
    expect(ui.get_by_role("heading", name="Runs")).to_be_visible()
    expect(ui.get_by_role("row", name="r7")).to_contain_text("1.00")


def test_keys_go_to_views_and_rows(ui: Page) -> None:
    expect(ui.locator("tr[data-task=other]")).to_be_visible()
    ui.keyboard.press("j")
    ui.keyboard.press("j")
    expect(ui.locator("table.tasks tbody tr").nth(1).locator("a.mono")).to_be_focused()
    ui.keyboard.press("g")
    ui.keyboard.press("y")
    expect(ui.get_by_role("heading", name="System")).to_be_visible()


def test_overview_shows_alerts_and_since_when_it_counts(ui: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """An alert of Prometheus' rules is a notice, with what to do, and no other one is there."""
    alert = Alert(next(rule for rule in RULES if rule.name == "ForkpointStoreFails"), "", 1.0)
    monkeypatch.setattr(Alerts, "raised", lambda _: iter([alert]))
    ui.reload()
    expect(ui.locator(".alerts .notice")).to_have_count(1)
    expect(ui.locator(".alerts .notice")).to_contain_text("Free disk space on the file system of `data`.")
    expect(ui.locator("main")).to_contain_text("count since this proxy started")


def test_runs_are_grouped_by_any_label(proxy: Running, ui: Page) -> None:
    """The choice has each label that a rollout has, besides run, task and endpoint."""
    proxy.client.patch("/api/v1/tasks/fix-2/rollouts/a/labels", json={"teacher": "ada"})
    ui.goto(ui.url + "#/runs")
    ui.locator("main select").select_option("teacher")
    expect(ui.locator("main table").first).to_contain_text("ada")
