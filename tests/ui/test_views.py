"""Each view shows what the proxy knows, and goes on showing it while rollouts run."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from sandboxes.calls import EgressExchange
from tests.proxy.serving import Running, serving

SPEC = {"driver": "memory"}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        for rollout, commands in (
            ("first", ["echo 1 > f", "cat f", "echo 2 > f", "false"]),
            ("second", ["echo 1 > f", "cat f", "echo 3 > g", "ls"]),
        ):
            for command in commands:
                running.exec(rollout, command, task="demo")
        yield running


@pytest.fixture
def ui(proxy: Running, page: Page) -> Page:
    page.goto(f"{proxy.client.base_url}/ui/")
    return page


def go(ui: Page, address: str) -> Page:
    ui.evaluate("address => (location.hash = address)", address)
    return ui


def figure(ui: Page, title: str) -> Locator:
    return ui.locator(".figure", has=ui.get_by_text(title, exact=True)).locator(".value")


def test_overview_shows_tasks_live(proxy: Running, ui: Page) -> None:
    row = ui.locator("tr[data-task=demo]")
    expect(row).to_contain_text("25 %")
    expect(ui.locator(".figure", has_text="Calls").first).to_contain_text("8")
    before = figure(ui, "Calls").inner_text()
    for rollout in ("third", "fourth"):
        proxy.exec(rollout, "echo 1 > f", task="live")
    expect(ui.locator("tr[data-task=live]")).to_contain_text("50 %")
    expect(figure(ui, "Calls")).to_have_text(str(int(before) + 2))
    expect(ui.locator("svg.timeline rect").first).to_be_attached()


def test_frame_is_painted_before_its_view(proxy: Running, page: Page) -> None:
    """The first paint waits for no view: here the file of the overview comes only after the frame was seen."""
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/js/overview.js", hold)
    page.goto(f"{proxy.client.base_url}/ui/", wait_until="commit")
    expect(page.get_by_role("link", name="Runs")).to_be_visible()
    expect(page.get_by_role("heading", name="Overview")).not_to_be_attached()
    for route in held:
        route.continue_()
    expect(page.locator("tr[data-task=demo]")).to_be_visible()


def test_filter_and_order_are_in_the_address(ui: Page) -> None:
    expect(ui.locator("tr[data-task=live]")).to_be_visible()
    ui.keyboard.press("/")
    ui.keyboard.type("dem")
    expect(ui.locator("tbody tr")).to_have_count(1)
    ui.get_by_role("button", name="Hit rate").click()
    expect(ui.locator("th[aria-sort]")).to_have_text("Hit rate")
    expect(ui).to_have_url(re.compile("q=dem"))
    expect(ui).to_have_url(re.compile("sort=rate"))
    ui.reload()
    expect(ui.get_by_label("Filter tasks")).to_have_value("dem")
    expect(ui.locator("tbody tr")).to_have_count(1)


def test_map_is_used_by_keys_and_pointer(ui: Page) -> None:
    go(ui, "#/t/demo")
    canvas = ui.locator("canvas")
    expect(ui.locator("main[data-ready]")).to_be_visible()
    canvas.focus()
    ui.keyboard.press("ArrowRight")
    ui.keyboard.press("Enter")
    expect(ui.locator(".side")).to_contain_text("echo 1 > f")
    ui.keyboard.press("Escape")
    expect(ui.locator(".side")).to_be_hidden()
    canvas.click(position={"x": 36, "y": 36})
    expect(ui.locator(".side")).to_contain_text("the task's root state")
    expect(ui).to_have_url(re.compile(r"node=n\d+"))


def test_map_label_omits_parts_that_do_not_fit(ui: Page) -> None:
    told = ui.evaluate(
        """async () => {
            const { whole } = await import("/ui/js/tree/near.js");
            const parts = ["12 ms", "3 hits", "1 read"];
            return [100, 23, 22, 15, 14, 5, 4, 0].map((room) => whole(parts, (text) => text.length <= room));
        }"""
    )
    every, two = "12 ms  ·  3 hits  ·  1 read", "12 ms  ·  3 hits"
    assert told == [every, two, two, "12 ms", "12 ms", "12 ms", "", ""]


def test_table_has_the_nodes_of_the_map(ui: Page) -> None:
    go(ui, "#/t/demo?view=table")
    rows = ui.get_by_role("treegrid").get_by_role("row")
    expect(rows).to_have_count(5)
    expect(rows.nth(2)).to_contain_text("echo 1 > f")
    expect(rows.nth(2)).to_have_attribute("aria-expanded", "true")
    expect(rows.nth(3)).to_have_attribute("aria-level", "2")
    expect(ui.get_by_role("treegrid")).to_contain_text("▸ second")
    grid = ui.get_by_role("treegrid")
    grid.focus()
    ui.keyboard.press("ArrowDown")
    ui.keyboard.press("ArrowLeft")
    expect(rows).to_have_count(3)
    expect(rows.nth(2)).to_contain_text("+2")
    ui.keyboard.press("ArrowRight")
    expect(rows).to_have_count(5)
    ui.keyboard.press("End")
    ui.keyboard.press("Enter")
    expect(ui.locator(".side")).to_contain_text(re.compile("echo [23] > "))


def test_tree_grows_while_rollouts_run(proxy: Running, ui: Page) -> None:
    proxy.exec("a", "echo 1 > f", task="growing")
    go(ui, "#/t/growing?view=table")
    grid = ui.get_by_role("treegrid")
    expect(grid).to_contain_text("▸ a")
    proxy.exec("a", "echo new > file", task="growing")
    expect(grid).to_contain_text("echo new > file")
    proxy.exec("b", "echo 1 > f", task="growing")
    expect(grid).to_contain_text("▸ b")
    proxy.client.delete("/api/v1/tasks/growing/rollouts/a")
    last = grid.get_by_role("row").last.get_by_text("echo new > file")
    node = proxy.exec("c", "echo 1 > f", task="growing").headers["x-forkpoint-node"]
    expect(last).to_be_visible()
    answer = proxy.client.delete(f"/api/v1/tasks/growing/nodes/{node}?end_rollouts=true")
    assert answer.status_code == 200
    proxy.exec("d", "echo other > f", task="growing")
    expect(grid).to_contain_text("echo other > f")
    expect(grid).not_to_contain_text("echo new > file")


def test_chains_fold_and_unfold(proxy: Running, ui: Page) -> None:
    for number in range(30):
        proxy.exec("walker", f"echo {number} > f", task="chain")
    go(ui, "#/t/chain?view=table")
    grid = ui.get_by_role("treegrid")
    expect(grid).to_contain_text("29 calls in a chain")
    expect(grid).to_have_attribute("aria-rowcount", "4")
    grid.get_by_text("29 calls in a chain").click()
    expect(grid).to_have_attribute("aria-rowcount", "32")
    expect(grid).to_contain_text("echo 7 > f")
    ui.get_by_role("button", name="Fold chains").click()
    ui.get_by_role("button", name="Fold chains").click()
    expect(grid).to_have_attribute("aria-rowcount", "4")


def test_link_to_folded_node_unfolds_chain(proxy: Running, ui: Page) -> None:
    nodes = [proxy.exec("w", f"echo {n} > f", task="link").headers["x-forkpoint-node"] for n in range(20)]
    go(ui, f"#/t/link?node={nodes[9]}&view=table")
    expect(ui.locator(".side")).to_contain_text("echo 9 > f")
    expect(ui.locator(".trow.on")).to_contain_text("echo 9 > f")


def test_search_finds_calls_by_text(ui: Page) -> None:
    go(ui, "#/t/demo")
    expect(ui.locator("main[data-ready]")).to_be_visible()
    ui.keyboard.press("/")
    ui.keyboard.type("3 > G")
    expect(ui.locator(".finds").get_by_role("option")).to_have_count(1)
    ui.keyboard.press("Enter")
    expect(ui.locator(".side .command")).to_have_text("echo 3 > g")
    ui.keyboard.press("/")
    ui.get_by_label("Search calls").fill("no such call")
    expect(ui.get_by_text("No call contains this text.")).to_be_visible()


def test_node_shows_answer_state_and_rollouts(ui: Page) -> None:
    go(ui, "#/t/demo?view=table")
    ui.get_by_role("treegrid").get_by_text("echo 1 > f").click()
    side = ui.locator(".side")
    expect(side.locator(".command")).to_have_text("echo 1 > f")
    expect(side).to_contain_text("changed files")
    expect(side).to_contain_text("kept: ")
    expect(side.get_by_role("link", name="second")).to_have_attribute("href", re.compile("#/t/demo/r/second"))
    expect(side.locator(".reads li")).to_have_count(1)
    side.get_by_role("button", name="cat f").click()
    expect(side.locator(".part", has_text="Read-only calls").locator(".output")).to_have_text("1")


def test_changes_since_parent_are_shown(ui: Page) -> None:
    go(ui, "#/t/demo?view=table")
    ui.get_by_role("treegrid").get_by_text("echo 3 > g").click()
    expect(ui.locator(".changes")).to_contain_text("/root/g")
    expect(ui.locator(".changes td.add", has_text="3")).to_be_visible()
    ui.get_by_role("button", name="Unified").click()
    expect(ui.locator(".changes .add", has_text="+3")).to_be_visible()
    ui.get_by_role("button", name="Side by side").click()


def test_rollout_is_a_waterfall_of_calls(proxy: Running, ui: Page) -> None:
    go(ui, "#/t/demo/r/second")
    rows = ui.locator(".waterfall tbody tr")
    expect(rows).to_have_count(4)
    outcomes = [rows.nth(i).get_attribute("data-outcome") for i in range(4)]
    assert outcomes == ["hit", "hit", "miss", "miss"]
    expect(rows.nth(2).locator(".bars")).to_have_attribute("title", re.compile("ran"))
    ui.get_by_role("button", name="Real time").click()
    expect(rows.nth(1).locator(".bars")).to_have_attribute("title", re.compile("the agent thinks .*saved"))
    ui.get_by_role("button", name="cat f").click()
    expect(ui.locator(".answer-row .output")).to_have_text("1")
    ui.get_by_role("button", name="cat f").click()
    expect(ui.locator(".answer-row")).to_have_count(0)
    proxy.exec("second", "echo later > h", task="demo")
    expect(rows).to_have_count(5)


def test_a_miss_says_why(proxy: Running, ui: Page) -> None:
    for rollout, command in (("first", "echo a > f"), ("second", "echo b > f")):
        proxy.exec(rollout, command, task="why")
        node = proxy.exec(rollout, "cat f", task="why").headers["x-forkpoint-node"]
    go(ui, "#/t/why/r/second")
    ui.get_by_role("button", name="cat f").click()
    row = ui.locator(".answer-row")
    expect(row).to_contain_text("other-state")
    expect(row).to_contain_text(re.compile(r"after n\d+, here echo b > f, there echo a > f"))
    row.get_by_role("link", name="What differs").click()
    expect(ui).to_have_url(re.compile(rf"#/t/why/diff/n\d+/{node}$"))


def test_task_says_what_makes_its_states_dear(ui: Page) -> None:
    """Such as missing checkpoints. The driver of this test has no advice, so the response is given one."""

    def advise(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), "advice": "branches are slow here"})

    ui.route("**/api/v1/tasks/demo", advise)
    go(ui, "#/t/demo/rollouts")
    expect(ui.get_by_text("branches are slow here")).to_be_visible()


def test_two_rollouts_are_compared(ui: Page) -> None:
    go(ui, "#/t/demo/rollouts")
    ui.get_by_label("Compare first").check()
    ui.get_by_label("Compare second").check()
    ui.get_by_role("button", name="Compare").click()
    expect(ui.get_by_text("1 change in common")).to_be_visible()
    rows = ui.locator("table.group-compare tbody tr")
    expect(rows.nth(1)).to_contain_text("They part at n")
    expect(rows.nth(0)).to_have_class("same")
    expect(rows.nth(2)).to_contain_text("echo 2 > f")
    expect(rows.nth(2)).to_contain_text("echo 3 > g")
    expect(ui.get_by_role("link", name="Compare states")).to_be_visible()


def test_group_is_compared_where_it_parts(proxy: Running, ui: Page) -> None:
    """Changes in common fold; where the states part, each answer is shown. Reads move no rollout to another row."""
    for rollout, commands in (("x", ["a", "b", "c", "d", "echo 1"]), ("y", ["a", "b", "c", "d", "echo 2"])):
        for command in commands:
            proxy.exec(rollout, f"echo {command} > {command[0]}", task="group")
    proxy.exec("z", "cat nothing", task="group")
    for command in ("ls", "echo a > a", "cat a", "echo b > b", "echo c > c", "echo d > d", "echo echo 1 > e"):
        proxy.exec("reader", command, task="group")
    for rollout, reward in (("x", 1), ("y", 0)):
        proxy.client.patch(f"/api/v1/tasks/group/rollouts/{rollout}/labels", json={"reward": reward})
    go(ui, "#/t/group/compare?r=x,y,reader")
    table = ui.locator("table.group-compare")
    expect(table.get_by_role("button", name="4 changes in common: show")).to_be_visible()
    expect(table).to_contain_text("They part at n")
    expect(table.locator(".answer-row .inline-answer")).to_have_count(3)
    expect(ui.get_by_text("x, reader end at n")).to_be_visible()
    won = ui.locator("section.panel", has_text="What only winners did")
    expect(won).to_contain_text("1 rollout with a reward above 0.5")
    expect(won).to_contain_text("echo echo 1 > e")
    go(ui, "#/t/group/rollouts")
    for rollout in "xyz":
        ui.get_by_label(f"Compare {rollout}").check()
    ui.get_by_role("button", name="Compare 3").click()
    expect(table.locator("thead th")).to_have_count(4)
    expect(table.locator("tr.fork").first).to_contain_text("They part at n")
    expect(table.locator(".answer-row")).to_contain_text("No output.")


def test_diff_has_two_sides(ui: Page) -> None:
    """Lines are paired and numbered; a hunk without removed lines has an empty side; source is coloured as text."""
    told = ui.evaluate(
        """async () => {
            const { rowsOf } = await import("/ui/js/sides.js");
            const { coloured } = await import("/ui/js/syntax.js");
            const text = "--- a\\n+++ b\\n@@ -1,2 +1,3 @@\\n one\\n-two\\n+2\\n+three\\n";
            const line = coloured("return '<b>' # 1", "py").map((p) => (typeof p === "string" ? p : [p.className, p.textContent]));
            return [rowsOf(text), line];
        }"""  # noqa: E501
    )
    assert told[0] == [["@@ -1,2 +1,3 @@"], [[1, "one"], [1, "one"]], [[2, "two"], [2, "2"]], [None, [3, "three"]]]
    assert [piece for piece in told[1] if piece not in ("", " ")] == [
        ["y-k", "return"], ["y-s", "'<b>'"], ["y-c", "# 1"],
    ]  # fmt: skip


def test_real_time_has_thinking_between_calls(ui: Page) -> None:
    told = ui.evaluate(
        """async () => {
            const { realTime } = await import("/ui/js/waterfall.js");
            const steps = [{ turn: 0, outcome: "miss", seconds: 2 }, { turn: 1, outcome: "hit", seconds: 9 }];
            const none = { wait_s: 0, restore_s: 0, replay_s: 0, tool_s: 0 };
            const timings = { 0: { ...none, answered_at: "1970-01-01T00:01:43.000000Z", restore_s: 1, tool_s: 1 }, 1: { ...none, answered_at: "1970-01-01T00:01:47.000000Z" } };
            return [realTime(steps, timings, "1970-01-01T00:01:40.000000Z"), realTime(steps, { 0: timings[0] }, null)];
        }"""  # noqa: E501
    )
    rows = [[row["from"], [part for part in row["parts"] if part[1] > 0]] for row in told[0]["rows"]]
    assert rows == [[0, [["o-think", 1], ["o-restore", 1], ["o-miss", 1]]], [3, [["o-think", 4]]]]
    assert (told[0]["span"], told[1]) == (7, None)


def test_sandboxes_and_snapshots_show_reasons(ui: Page) -> None:
    go(ui, "#/snapshots")
    expect(ui.locator("tbody tr", has_text="demo").first).to_contain_text("uses expected")
    go(ui, "#/sandboxes")
    expect(ui.locator("tbody tr", has_text="demo").first).to_contain_text(
        re.compile("reserved for rollout|available to any rollout")
    )


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("#/t/none", "there is no task 'none'"),
        ("#/t/none/rollouts", "there is no task 'none'"),
        ("#/t/demo/r/none", "no rollout 'none'"),
        ("#/t/demo/n/n999999", "has no node n999999"),
        ("#/t/demo?node=n999999", "The tree has no node n999999."),
        ("#/t/demo/n/%3Cscript%3E", "string_pattern_mismatch|should match"),
        ("#/nowhere", "There is no page at this address."),
    ],
)
def test_unknown_address_has_a_message(ui: Page, address: str, told: str) -> None:
    go(ui, address)
    expect(ui.locator("body")).to_contain_text(re.compile(told))


def test_shortcuts_are_listed_and_theme_is_kept(ui: Page) -> None:
    ui.keyboard.press("?")
    expect(ui.get_by_role("dialog", name="Keys")).to_contain_text("map or table")
    ui.keyboard.press("Escape")
    background = "getComputedStyle(document.body).backgroundColor"
    light = ui.evaluate(background)
    ui.get_by_role("button", name="Theme: auto").click()
    ui.get_by_role("button", name="Theme: light").click()
    assert ui.evaluate(background) != light
    ui.reload()
    expect(ui.get_by_role("button", name="Theme: dark")).to_be_visible()
    ui.get_by_role("button", name="Theme: dark").click()
    ui.emulate_media(color_scheme="dark")
    assert ui.evaluate(background) != light
    ui.emulate_media(color_scheme="light")
    assert ui.evaluate(background) == light


@pytest.mark.parametrize(
    "address", ["#/", "#/t/demo", "#/t/demo?view=table&node=n1", "#/t/demo/rollouts", "#/t/demo/r/first"]
)
def test_every_control_has_a_name(ui: Page, address: str) -> None:
    go(ui, address)
    expect(ui.locator("main > *").first).to_be_visible()
    for landmark in ("banner", "main", "navigation"):
        expect(ui.get_by_role(landmark)).to_have_count(1)
    unnamed = ui.evaluate(
        """() => [...document.querySelectorAll("button, a[href], input, select, canvas")].filter((one) =>
            !(one.getAttribute("aria-label") || one.title || one.textContent.trim() || one.labels?.length)
        ).map((one) => one.outerHTML)"""
    )
    assert unnamed == []
    expect(ui.get_by_role("heading", level=1)).to_have_count(1)


def test_node_shows_hosts_outside(proxy: Running, ui: Page) -> None:
    """Requests of the calls made at a node are shown there as text, and at no other node."""
    tree, node = (rollout := proxy.engine.tasks.rollouts.running["demo", "first"]).tree, rollout.node
    root = tree.root
    request = EgressExchange("GET", "http://host.example/<b>bold</b>", "recorded", 200, 2048)
    proxy.engine.counts.egress.note([request], tree.id, root.id, "first", 0.0)
    go(ui, f"#/t/demo/n/n{root.id}")
    part = ui.locator("section.part", has_text="Requests to hosts outside")
    expect(part).to_contain_text("GET http://host.example/<b>bold</b>")
    expect(part).to_contain_text("recorded · 200 · 2")
    go(ui, f"#/t/demo/n/n{node.id}")
    expect(ui.get_by_role("heading", name=f"n{node.id}")).to_be_visible()
    expect(part).to_have_count(0)


def test_files_of_a_node_are_listed(proxy: Running, ui: Page) -> None:
    """Read without a sandbox, once somebody asks; a directory opens, and a file is downloaded."""
    proxy.exec("files", "mkdir d", task="files")
    node = proxy.exec("files", "echo text > f", task="files").headers["x-forkpoint-node"]
    go(ui, f"#/t/files/n/{node}")
    part = ui.locator("section.part", has=ui.get_by_role("heading", name="Files"))
    for name in ("Show files", "root/", "d/", ".."):
        part.get_by_role("button", name=name, exact=True).click()
    expect(part).to_contain_text("/root")
    with ui.expect_download() as download:
        part.get_by_role("button", name="f", exact=True).click()
    assert download.value.suggested_filename == "f"
    assert download.value.path().read_bytes() == b"text\n"


def test_runs_say_why_calls_ran(ui: Page) -> None:
    go(ui, "#/runs")
    calls = ui.locator("section.panel", has_text="Calls whose executions took longest")
    # Which of the tasks has the slowest one depends on the machine.
    expect(calls.locator("tbody tr", has_text="cat f").first).to_contain_text(re.compile("new-call|other-state"))
