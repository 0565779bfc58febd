"""Pages of rollouts in a real browser: nothing in them runs, and the keyboard opens calls."""

from pathlib import Path

from playwright.sync_api import Page, expect

from proxy.cli.rendering.replay_page import rollout_page
from tests.proxy.cli.test_replay_page import hostile


def test_hostile_page_runs_nothing_and_has_its_style(page: Page, tmp_path: Path) -> None:
    """The `page` fixture fails for what the policy refuses, so the style's hash is right too."""
    file = tmp_path / "rollout.html"
    file.write_text("".join(rollout_page(hostile())), encoding="utf-8")
    page.goto(file.as_uri())
    expect(page.locator("details")).to_have_count(6)
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("getComputedStyle(document.querySelector('summary')).cursor") == "pointer"


def test_keyboard_opens_a_call(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "rollout.html"
    file.write_text("".join(rollout_page(hostile())), encoding="utf-8")
    page.goto(file.as_uri())
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    opened = page.locator("details[open]")
    expect(opened).to_have_count(1)
    expect(opened.locator("summary")).to_be_focused()
