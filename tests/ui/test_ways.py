"""The tree's view of rollouts: lanes, lit ways, colours by labels, merges, and the list of matches."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.proxy.serving import Running, serving

MODULES = """async ([view, away]) => {
    const { Model } = await import("/ui/js/tree/model.js");
    const { Ways, shared } = await import("/ui/js/tree/ways.js");
    const { Colours } = await import("/ui/js/tree/colours.js");
    const { corners, litWay } = await import("/ui/js/tree/routes.js");
    const model = new Model();
    model.append(view.columns, view.meets);
    const ways = new Ways("");
    ways.take(away.items, "demo");
    return (%s)({ model, ways, shared, Colours, corners, litWay });
}"""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A group of two rollouts that part after one call, and a third whose way goes over a merge."""
    with serving(tmp_path_factory.mktemp("data")) as running:
        for rollout, reward, commands in (
            ("good", 1, ["echo 1 > f", "echo 2 > g"]),
            ("bad", 0, ["echo 1 > f", "echo 3 > h"]),
            ("other", 0.5, ["echo 5 > x", "rm x", "echo 1 > f"]),
        ):
            for command in commands:
                running.exec(rollout, command, task="demo")
            labels = {"group": "pair" if rollout != "other" else "<b>lone</b>", "reward": reward}
            running.client.patch(f"/api/v1/tasks/demo/rollouts/{rollout}/labels", json=labels).raise_for_status()
        yield running


@pytest.fixture
def ui(proxy: Running, page: Page) -> Page:
    page.goto(f"{proxy.client.base_url}/ui/#/t/demo")
    expect(page.locator("main[data-ready]")).to_be_visible()
    return page


def modules(ui: Page, proxy: Running, function: str) -> Any:
    """Call a function of JavaScript with the page's modules and the task's tree and ways."""
    data = [proxy.client.get(f"/api/v1/tasks/demo/{name}").json() for name in ("columns", "ways")]
    return ui.evaluate(MODULES % function, data)


def test_lanes_are_grouped_by_labels(ui: Page) -> None:
    """A cell for each call; the mark shows where a group parts; labels are text, whatever they say."""
    ui.get_by_role("button", name="Rollouts").click()
    lanes = ui.locator(".side .lanes")
    expect(lanes).to_have_count(2)
    pair = lanes.filter(has_text="group pair")
    expect(pair).to_contain_text("reward 0.500")
    expect(pair.locator(".lane")).to_have_count(2)
    expect(pair.locator(".lane").first.locator(".cells i").nth(1)).to_have_class(re.compile("parts"))
    expect(lanes.filter(has_text="<b>lone</b>")).to_have_count(1)
    expect(ui).to_have_url(re.compile("lanes=1"))


def test_lane_lights_way_of_its_rollout(ui: Page, proxy: Running) -> None:
    """A way has each node once, and the merge that its rollout took."""
    lit = modules(
        ui, proxy,
        """({ model, ways, litWay }) => ["good", "other"].map((name) => {
            const lit = litWay(model, ways.byName.get(name));
            return [lit.nodes.size, lit.edges.length, lit.edges.filter(([a, b]) => model.parent[b] !== a).length];
        })""",
    )  # fmt: skip
    assert lit[0] == [3, 2, 0]
    assert lit[1][1] >= 3


def test_nodes_are_coloured_by_rewards_and_labels(ui: Page, proxy: Running) -> None:
    told = modules(
        ui, proxy,
        """({ model, ways, Colours }) => {
            const colours = new Colours(model, ways);
            const of = (by, name) => {
                colours.by = by;
                colours.theme((property) => property);
                return colours.of(model.index.get(ways.byName.get(name).nodes.at(-1)));
            };
            return [of("reward", "good"), of("reward", "bad"), of("label:group", "good"), colours.scale.length];
        }""",
    )  # fmt: skip
    assert told == ["--w4", "--w0", "--c0", 4]


def test_merge_runs_beside_rows_and_columns(ui: Page) -> None:
    """Each part of the line is horizontal or vertical, and it ends at the node's left side."""
    lines = ui.evaluate(
        """async () => {
            const { corners } = await import("/ui/js/tree/routes.js");
            return [[[500, 40], [100, 200]], [[100, 200], [500, 40]], [[100, 40], [500, 40]], [[500, 40], [100, 40]]]
                .map(([a, b]) => corners(a, b, 40, 6));
        }"""
    )
    for line in lines:
        assert all(a[0] == b[0] or a[1] == b[1] for a, b in itertools.pairwise(line)), line
    assert [line[-1] for line in lines] == [[94, 200], [494, 40], [494, 40], [94, 40]]


def test_matches_are_a_list_that_stays(ui: Page) -> None:
    ui.keyboard.press("/")
    ui.keyboard.type("echo")
    ui.get_by_text(re.compile(r"Show all \d+ as a list")).click()
    rows = ui.locator(".side .results button")
    expect(rows.first).to_be_visible()
    rows.filter(has_text="echo 2 > g").first.click()
    expect(ui.locator(".side .command")).to_have_text("echo 2 > g")


def test_colour_is_in_the_address_and_legend(ui: Page) -> None:
    ui.locator("label", has_text="Colour").locator("select").select_option("reward")
    expect(ui.locator(".key .scale")).to_contain_text("Colour: reward")
    expect(ui.locator(".key .scale")).to_contain_text("no reward")
    expect(ui).to_have_url(re.compile("colour=reward"))
    ui.locator("label", has_text="Colour").locator("select").select_option("label:group")
    expect(ui.locator(".key .scale")).to_contain_text("<b>lone</b>")


def test_reads_are_no_parting_of_lanes(ui: Page, proxy: Running) -> None:
    """A lane's mark is at the call that leaves the common states, whatever was read before it."""
    told = modules(
        ui, proxy,
        """({ shared }) => [
            [[1, 1, 2, 3], [2, 2, 4]], [[2], [2, 2]], [[2, 3], [2, 3]],
        ].map((nodes) => [...shared(nodes.map((each) => ({ start: 1, nodes: each }))).values()])""",
    )  # fmt: skip
    assert told == [[3, 2], [1, 2], [2, 2]]
