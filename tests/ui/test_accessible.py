"""Every page passes axe-core, in light and dark and as a phone shows it."""

import re
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.proxy.serving import Running, serving

PHONE = {"width": 390, "height": 844}
DESK = {"width": 1440, "height": 900}
_TOO_WIDE = "document.documentElement.scrollWidth > innerWidth"


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        for rollout, commands in (
            ("first", ["echo 1 > f", "cat f", "echo 2 > f", "false"]),
            ("second", ["echo 1 > f", "cat f", "echo 3 > g", "ls"]),
        ):
            for command in commands:
                running.exec(rollout, command, task="demo")
        for rollout, reward in (("first", 1.0), ("second", 0.0)):
            labels = {"run": "r7", "step": 3, "group": "g1", "reward": reward}
            running.client.patch(f"/api/v1/tasks/demo/rollouts/{rollout}/labels", json=labels).raise_for_status()
        yield running


def addresses(proxy: Running) -> list[str]:
    """Return the address of each view, and of a node that shows all of its parts."""
    node = proxy.exec("second", "echo 4 > h", task="demo").headers["x-forkpoint-node"]
    return [
        "#/", "#/runs", "#/system", "#/sandboxes", "#/snapshots", "#/nowhere", "#/t/demo",
        f"#/t/demo?view=table&node={node}",
        "#/t/demo/rollouts", "#/t/demo/audit", "#/t/demo/r/first", "#/t/demo/compare?r=first,second",
        "#/t/demo/compare?r=first,second", "#/t/demo?lanes=1&colour=reward", f"#/t/demo/n/{node}",
        f"#/t/demo/n/{node}/terminal",
    ]  # fmt: skip


def violations(page: Page) -> list[str]:
    """Return what axe-core finds on the page: the rule, and the first elements that break it."""
    result = Axe().run(page).response["violations"]
    return [f"{one['id']}: {[node['target'] for node in one['nodes'][:3]]}" for one in result]


def visit(page: Page, address: str) -> None:
    """Go to a view, and wait until it is whole."""
    page.evaluate("address => (location.hash = address)", address)
    expect(page.locator("main[data-ready]")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_passes_axe(proxy: Running, page: Page, scheme: str) -> None:
    """axe-core's rules, among them names, roles and contrast; the description of the REST API is a view too."""
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page.set_viewport_size(DESK)  # type: ignore[arg-type]
    entries = {}
    page.goto(f"{proxy.client.base_url}/docs")
    expect(page.locator("main details").first).to_be_visible()
    entries["/docs"] = violations(page)
    page.goto(f"{proxy.client.base_url}/ui/")
    for address in addresses(proxy):
        visit(page, address)
        entries[address] = violations(page)
    assert {address: broken for address, broken in entries.items() if broken} == {}


def test_no_view_is_wider_than_a_phone(proxy: Running, page: Page) -> None:
    """A view never scrolls sideways as a whole; wide tables scroll inside their panels."""
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    page.goto(f"{proxy.client.base_url}/ui/")
    wide = []
    for address in addresses(proxy):
        visit(page, address)
        if page.evaluate(_TOO_WIDE):
            wide.append(address)
    assert wide == []


def test_phone_shows_tree_as_table(proxy: Running, page: Page) -> None:
    """The map has no room for calls there; the address asks for it all the same."""
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    page.goto(f"{proxy.client.base_url}/ui/#/t/demo")
    expect(page.get_by_role("treegrid")).to_be_visible()
    page.get_by_role("button", name="Map").click()
    expect(page.get_by_role("treegrid")).to_be_hidden()
    expect(page).to_have_url(re.compile("view=map"))


def test_pause_holds_the_view_until_resumed(proxy: Running, page: Page) -> None:
    page.goto(f"{proxy.client.base_url}/ui/#/t/paused?view=table")
    proxy.exec("a", "echo 1 > f", task="paused")
    page.reload()
    grid = page.get_by_role("treegrid")
    expect(grid).to_contain_text("echo 1 > f")
    page.keyboard.press("p")
    expect(page.get_by_role("button", name="resume live updates")).to_be_visible()
    proxy.exec("a", "echo 2 > f", task="paused")
    proxy.exec("a", "echo 3 > f", task="paused")
    page.keyboard.press("p")
    expect(grid).to_contain_text("echo 3 > f")
