"""A task's trees on the page: one is chosen by its environment, and whatever is linked is shown in its own."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.proxy.control.test_tree_listing import begin, get, two_trees
from tests.proxy.serving import Running, serving


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data"), any_image=True) as running:
        yield running


def go(proxy: Running, page: Page, address: str) -> Page:
    page.goto(f"{proxy.client.base_url}/ui/#/t/{address}")
    return page


def test_tree_is_chosen_by_keyboard(proxy: Running, page: Page) -> None:
    root, _, other_root, other = two_trees(proxy, "chosen")
    go(proxy, page, "chosen?view=table")
    grid, choice = page.get_by_role("treegrid"), page.get_by_role("combobox", name="Environment")
    expect(grid).to_contain_text("echo own > f")
    expect(choice).to_have_value(root)
    expect(choice.locator("option")).to_have_text(
        [f"memory · 2 nodes · current · {root}", f"memory · env X · 2 nodes · {other_root}"]
    )
    choice.focus()
    page.keyboard.press("ArrowDown")
    expect(grid).to_contain_text("echo $X > f")
    expect(grid).not_to_contain_text("echo own > f")
    expect(page).to_have_url(re.compile(f"root={other_root}"))
    expect(page.locator(".counts")).to_have_text("2 nodes · 1 rollout here")
    page.get_by_label("Search calls").fill("> F")
    expect(page.locator(".finds").get_by_role("option")).to_have_text(re.compile(f"{other} "))
    page.keyboard.press("Enter")
    expect(page.locator(".side .command")).to_have_text("echo $X > f")
    page.reload()
    expect(page.locator(".side .command")).to_have_text("echo $X > f")
    expect(choice).to_have_value(other_root)
    choice.select_option(root)
    expect(grid).to_contain_text("echo own > f")
    expect(page.locator(".side")).to_be_hidden()
    expect(page).not_to_have_url(re.compile("node="))
    expect(page).not_to_have_url(re.compile("root="))
    choice.select_option(other_root)
    expect(grid).to_contain_text("echo $X > f")
    page.locator("body").press("t")
    expect(choice).to_have_value(root)


def test_updates_belong_to_the_shown_tree(proxy: Running, page: Page) -> None:
    _, _, other_root, _ = two_trees(proxy, "news")
    proxy.exec("other", "cat nothing", task="news")
    go(proxy, page, f"news?view=table&root={other_root}")
    grid = page.get_by_role("treegrid")
    expect(grid).to_contain_text("▸ other")
    expect(grid).to_contain_text("a read failed")
    proxy.exec("own", "echo elsewhere > f", task="news")
    proxy.exec("other", "echo here > f; false", task="news")
    row = grid.get_by_role("row", name=re.compile("echo here > f"))
    expect(row).to_contain_text("▸ other")
    expect(row.locator(".failed")).to_be_visible()
    expect(grid).not_to_contain_text("elsewhere")


def test_links_open_the_tree_of_their_node(proxy: Running, page: Page) -> None:
    root, one, other_root, other = two_trees(proxy, "links")
    go(proxy, page, f"links?node={other}")
    expect(page.locator(".side .command")).to_have_text("echo $X > f")
    choice = page.get_by_role("combobox", name="Environment")
    expect(choice).to_have_value(other_root)
    page.keyboard.press("Escape")
    expect(page).to_have_url(re.compile(f"#/t/links\\?.*root={other_root}"))
    expect(page).not_to_have_url(re.compile("node="))
    page.evaluate("address => (location.hash = address)", f"#/t/links?node={one}")
    expect(page.locator(".side .command")).to_have_text("echo own > f")
    expect(choice).to_have_value(root)
    page.evaluate("address => (location.hash = address)", "#/t/links/rollouts")
    expect(page.locator("tr[data-rollout=own]")).to_contain_text("memory")
    page.locator("tr[data-rollout=other]").get_by_role("link", name="memory · env X").click()
    expect(choice).to_have_value(other_root)
    page.evaluate("address => (location.hash = address)", "#/t/links/r/other")
    page.locator(".waterfall").get_by_role("link", name=other).first.click()
    expect(page.locator(".side .command")).to_have_text("echo $X > f")
    go(proxy, page, f"links/n/{other}")
    expect(page.locator("h1")).to_have_text(other)
    expect(page.locator(".command")).to_have_text("echo $X > f")
    expect(page.locator(".changes")).to_contain_text("/root/f")
    go(proxy, page, f"links/diff/{one}/{other}")
    expect(page.locator("main")).to_contain_text("are in different trees")
    go(proxy, page, "links/compare?r=own,other")
    expect(page.locator("tr.fork")).to_contain_text(f"They began at different nodes, {root} and {other_root}")
    expect(page.get_by_role("link", name="Compare states")).to_have_count(0)


def test_empty_current_tree_gives_way(proxy: Running, page: Page) -> None:
    begin(proxy, "docker", "a", "X=1")
    go(proxy, page, "docker?view=table")
    current, other = get(proxy, "docker/trees")["items"]
    choice = page.get_by_role("combobox", name="Environment")
    expect(choice).to_have_value(current["root"])
    proxy.exec("a", "echo $X > f", task="docker")
    # It is shown once something is recorded in it, without a choice of anybody.
    expect(page.get_by_role("treegrid")).to_contain_text("echo $X > f")
    expect(choice).to_have_value(other["root"])
    page.reload()
    expect(page.get_by_role("treegrid")).to_contain_text("echo $X > f")
    go(proxy, page, f"docker?view=table&root={current['root']}")
    expect(choice).to_have_value(current["root"])
    expect(page.get_by_role("treegrid")).not_to_contain_text("echo $X > f")


def test_single_tree_has_no_select_box(proxy: Running, page: Page) -> None:
    proxy.exec("a", "echo 1 > f", task="one")
    go(proxy, page, "one?view=table")
    expect(page.get_by_role("treegrid")).to_contain_text("echo 1 > f")
    expect(page.locator(".counts")).to_have_text("2 nodes · 1 rollout here")
    expect(page.get_by_label("Environment")).to_be_hidden()
    go(proxy, page, "one/rollouts")
    expect(page.locator("tr[data-rollout=a]")).to_be_visible()
    expect(page.get_by_role("columnheader", name="Environment")).to_be_hidden()


def test_other_tree_is_audited_from_its_node(proxy: Running, page: Page) -> None:
    root, _, other_root, other = two_trees(proxy, "audited")
    go(proxy, page, f"audited?node={other}")
    page.locator(".side .menu summary").click()
    page.locator(".side").get_by_role("button", name="Verify").click()
    expect(page.get_by_role("row", name=re.compile("recorded calls 2 0"))).to_be_visible()
    choice = page.get_by_role("combobox", name="Environment")
    expect(choice).to_have_value(other_root)
    choice.select_option(root)
    expect(page.get_by_role("row", name=re.compile("recorded calls"))).to_have_count(0)
    page.get_by_role("button", name="Verify").click()
    expect(page.get_by_role("row", name=re.compile("recorded calls 1 0"))).to_be_visible()


def test_other_tree_is_exported_and_imported(
    proxy: Running, page: Page, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, _, other_root, _ = two_trees(proxy, "saved")
    go(proxy, page, f"saved?root={other_root}")
    with page.expect_download() as download:
        page.get_by_role("link", name="Export").click()
    file = Path(download.value.path())
    with serving(tmp_path_factory.mktemp("other"), any_image=True) as there:
        there.exec("own", "echo own > f", task="taken")
        page.goto(f"{there.client.base_url}/ui/")
        page.get_by_label("File to import").set_input_files(file)
        page.get_by_role("dialog").get_by_label("Task").fill("taken")
        page.get_by_role("dialog").get_by_role("button", name="Import").click()
        expect(page).to_have_url(re.compile(r"#/t/taken\?root=n\d+"))
        page.get_by_role("button", name="Table").click()
        expect(page.get_by_role("treegrid")).to_contain_text("echo $X > f")


def test_a_shared_tree_of_reads_opens_as_a_list_of_one_task_or_of_all(
    page: Page, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its map would be one dot. The address opens the lanes of a tree that is shown already, too."""
    with serving(tmp_path_factory.mktemp("data")) as proxy:
        for task, reads in (("a", 5), ("b", 7)):
            proxy.client.put(f"/api/v1/tasks/{task}", json={"driver": "memory", "share": "on"}).raise_for_status()
            for number in range(reads):
                proxy.exec("1", f"cat f{number}", task=task)
        page.goto(f"{proxy.client.base_url}/ui/#/t/a")
        expect(page.get_by_role("treegrid")).to_be_visible()
        expect(page.locator(".reads li")).to_have_count(7)
        page.get_by_role("button", name="Only this task (shared with 1)").click()
        expect(page.locator(".reads li")).to_have_count(5)
        expect(page).to_have_url(re.compile("own=1"))
        page.evaluate("location.hash = '#/t/a?lanes=1'")
        expect(page.locator(".lane")).to_have_count(2)
