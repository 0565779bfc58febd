"""A terminal in a fork of a node, in a real sandbox."""

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest
from playwright.sync_api import Page, expect

from sandboxes.linux.files import remove_tree
from tests.machine import require_sandboxes
from tests.proxy.serving import Running, serving
from tests.sandboxes.box import local_driver


@pytest.fixture(scope="module")
def proxy() -> Iterator[Running]:
    # Before the browser: what looks at the machine runs an event loop, and the browser's driver is one.
    require_sandboxes()
    folder = Path(mkdtemp(prefix="forkpoint-test-", dir="/var/tmp"))
    with serving(folder, drivers={"local": local_driver(folder / "local")}) as running:
        running.client.put("/api/v1/tasks/term", json={"driver": "local"}).raise_for_status()
        yield running
    remove_tree(folder)


def recorded(proxy: Running) -> dict[str, list[int]]:
    """Return what the tree holds; snapshots of it come and go."""
    columns = proxy.client.get("/api/v1/tasks/term/columns").json()["columns"]
    return {name: columns[name] for name in ("id", "parent", "hits", "seen", "seen_hits", "passes")}


def test_terminal_does_not_change_the_tree(proxy: Running, page: Page) -> None:
    node = proxy.exec("agent", "cd /tmp; echo here > f", task="term").headers["x-forkpoint-node"]
    before = recorded(proxy)
    page.goto(f"{proxy.client.base_url}/ui/#/t/term?node={node}")
    page.locator(".side").get_by_role("link", name="Terminal").click()
    expect(page.get_by_text("connected", exact=True)).to_be_visible()
    screen = page.locator(".xterm-rows")
    expect(screen).to_contain_text("/tmp#")
    page.keyboard.type("cat f; printf '\\033[38;2;9;200;90mco%s\\033[0m\\n' lour; stty size; rm f\n")
    expect(screen).to_contain_text("here")
    expect(screen).to_contain_text("colour")
    expect(screen).to_contain_text(re.compile(r"colour(?!24 80)\d+ \d+"))
    page.keyboard.type("exit\n")
    expect(page.get_by_text("the shell has ended")).to_be_visible()
    assert recorded(proxy) == before
    assert proxy.exec("agent", "cat f", task="term").json()["stdout"] == "here\n"
