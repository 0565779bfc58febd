"""What can be done at a node, done by buttons."""

import re
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.proxy.serving import Running


def at(proxy: Running, page: Page, task: str, *commands: str) -> tuple[str, Locator]:
    """Run commands, and open the page at the node that they lead to; return the node, and its panel."""
    node = "n1"
    for command in commands:
        node = proxy.exec("agent", command, task=task).headers["x-forkpoint-node"]
    page.goto(f"{proxy.client.base_url}/ui/#/t/{task}?node={node}")
    panel = page.locator(".side")
    expect(panel.locator(".actions")).to_be_visible()
    return node, panel


def detail(proxy: Running, task: str, node: str) -> Any:
    return proxy.client.get(f"/api/v1/tasks/{task}/nodes/{node}").json()


def press(panel: Locator, name: str) -> None:
    """Press a button of a node, which may be in its menu."""
    button = panel.locator(f"[data-act='{name.lower()}']")
    if panel.locator(f".menu-items [data-act='{name.lower()}']").count():
        panel.locator(".menu summary").click()
    button.click()


def test_rollout_is_forked_at_a_node(proxy: Running, page: Page) -> None:
    node, panel = at(proxy, page, "fork", "echo 1 > f")
    proxy.exec("agent", "echo 2 > f", task="fork")
    press(panel, "Fork")
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("branch")
    dialog.get_by_role("button", name="Fork").click()
    address = f"{str(proxy.client.base_url).rstrip('/')}/t/fork/r/branch"
    expect(page.get_by_label("Base URL")).to_have_value(address)
    page.get_by_role("button", name="Show it").click()
    expect(page).to_have_url(re.compile("#/t/fork/r/branch$"))
    assert proxy.exec("branch", "cat f", task="fork").json()["stdout"] == "1\n"
    assert node == proxy.client.get("/api/v1/tasks/fork/rollouts/branch").json()["start"]


def test_fork_with_running_name_is_refused(proxy: Running, page: Page) -> None:
    _, panel = at(proxy, page, "twice", "echo 1 > f")
    press(panel, "Fork")
    page.get_by_label("Name").fill("agent")
    page.get_by_role("dialog").get_by_role("button", name="Fork").click()
    expect(page.get_by_role("status").filter(has_text="is running")).to_be_visible()


def test_node_is_pinned_and_unpinned(proxy: Running, page: Page) -> None:
    node, panel = at(proxy, page, "pin", "echo 1 > f")
    press(panel, "Pin")
    expect(panel.locator("[data-act=unpin]")).to_be_attached()
    assert detail(proxy, "pin", node)["flags"] == ["pinned"]
    press(panel, "Unpin")
    expect(panel.locator("[data-act=pin]")).to_be_attached()
    assert detail(proxy, "pin", node)["flags"] == []


def test_snapshot_is_taken_or_refused_with_reason(proxy: Running, page: Page) -> None:
    node, panel = at(proxy, page, "snapshot", "echo 1 > f")
    press(panel, "Snapshot")
    expect(page.get_by_role("status").filter(has_text="has a snapshot now")).to_be_visible()
    assert detail(proxy, "snapshot", node)["snapshot"]
    _, panel = at(proxy, page, "unkept", "sleep 60 &")
    press(panel, "Snapshot")
    expect(page.get_by_role("status").filter(has_text="no snapshot of")).to_be_visible()


def test_answer_is_downloaded_unchanged(proxy: Running, page: Page) -> None:
    _, panel = at(proxy, page, "download", "echo 1 > f")
    answer = proxy.exec("other", "echo 1 > f", task="download")
    with page.expect_download() as download:
        press(panel, "Download answer")
    assert Path(download.value.path()).read_bytes() == answer.content
    assert download.value.suggested_filename.endswith(".json")


def test_tried_command_is_not_recorded(proxy: Running, page: Page) -> None:
    node, panel = at(proxy, page, "try", "echo 1 > f")
    before = proxy.client.get("/api/v1/tasks/try/columns").json()
    press(panel, "Try")
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Command").fill("echo tried > f; cat f")
    dialog.get_by_label("Command").press("Enter")
    expect(dialog.locator(".output")).to_have_text("tried")
    expect(dialog).to_contain_text("the tree has no record of this call")
    dialog.get_by_role("button", name="Done").click()
    after = proxy.client.get("/api/v1/tasks/try/columns").json()
    assert (before["columns"]["id"], before["columns"]["seen"]) == (after["columns"]["id"], after["columns"]["seen"])
    assert proxy.exec("agent", "cat f", task="try").json()["stdout"] == "1\n"
    expect(page).to_have_url(re.compile(node))


def test_forget_asks_first_and_rollouts_continue(proxy: Running, page: Page) -> None:
    node, panel = at(proxy, page, "forget", "echo 1 > f", "echo 2 > f")
    press(panel, "Forget")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert detail(proxy, "forget", node)["id"] == node
    press(panel, "Forget")
    page.get_by_role("dialog").get_by_role("button", name="Forget").click()
    expect(
        page.get_by_role("status").filter(has_text="1 node forgotten, 1 rollout continuing without shared records")
    ).to_be_visible()
    expect(panel).to_be_hidden()
    listed = proxy.client.get("/api/v1/tasks/forget/tree").json()["nodes"]
    assert node not in [shown["id"] for shown in listed]


def test_forget_can_end_rollouts(proxy: Running, page: Page) -> None:
    node, panel = at(proxy, page, "end", "echo 1 > f", "echo 2 > f")
    press(panel, "Forget")
    page.get_by_role("dialog").get_by_label("End the rollouts in the subtree").check()
    page.get_by_role("dialog").get_by_role("button", name="Forget").click()
    expect(page.get_by_role("status").filter(has_text="1 node forgotten, 1 rollout ended")).to_be_visible()
    expect(panel).to_be_hidden()
    assert proxy.client.get(f"/api/v1/tasks/end/nodes/{node}").status_code == 404


def test_second_forget_of_same_node_is_refused(proxy: Running, page: Page) -> None:
    node, panel = at(proxy, page, "both", "echo 1 > f", "echo 2 > f")
    press(panel, "Forget")
    # Behind the open dialog: the page hears of it at once, and shows another node.
    proxy.client.delete(f"/api/v1/tasks/both/nodes/{node}?end_rollouts=true")
    page.get_by_role("dialog").get_by_role("button", name="Forget").click()
    expect(page.get_by_role("status").filter(has_text=f"has no node {node}")).to_be_visible()


def test_unavailable_terminal_shows_reason(proxy: Running, page: Page) -> None:
    node, _ = at(proxy, page, "none", "echo 1 > f")
    page.goto(f"{proxy.client.base_url}/ui/#/t/none/n/{node}/terminal")
    expect(page.get_by_role("status").filter(has_text="offers no terminals")).to_be_visible()


def test_menu_closes_by_key_and_click(proxy: Running, page: Page) -> None:
    """What destroys is in the menu, apart from what is done every day. Escape closes the menu and not the panel."""
    _, panel = at(proxy, page, "menu", "echo 1 > f")
    forget, summary = panel.get_by_role("button", name="Forget"), panel.locator(".menu summary")
    expect(forget).to_be_hidden()
    summary.click()
    expect(forget).to_be_visible()
    page.keyboard.press("Escape")
    expect(forget).to_be_hidden()
    expect(panel).to_be_visible()
    # A key that comes at once.
    summary.evaluate(
        "it => { it.click(); it.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true })); }"
    )
    expect(forget).to_be_hidden()
    expect(panel).to_be_visible()
    summary.click()
    expect(forget).to_be_visible()
    panel.locator(".command").click()
    expect(forget).to_be_hidden()
