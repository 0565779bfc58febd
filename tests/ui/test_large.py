"""A tree of 50,000 nodes opens and moves. The bounds here are lenient: machines of CI are; `bench/ui.py` measures."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.machine import wait_until
from tests.proxy.serving import Running, serving
from tests.ui.forest import plant
from tests.ui.measure import frames_per_s, open_tree, zoom

NODES = 50_000


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data = tmp_path_factory.mktemp("data")
    plant(data, "big", NODES)
    with serving(data) as running:
        # Read back from disk once, as it is while rollouts run.
        running.client.get("/api/v1/tasks/big/columns?limit=1", timeout=60).raise_for_status()
        yield running


@pytest.fixture
def ui(proxy: Running, page: Page) -> Page:
    page.set_default_timeout(60_000)
    open_tree(page, str(proxy.client.base_url), "big")
    return page


def test_large_tree_opens_and_pans(proxy: Running, page: Page) -> None:
    opened = open_tree(page, str(proxy.client.base_url), "big")
    expect(page.locator(".counts")).to_contain_text("50,000 nodes")
    assert opened["ready"] < 30
    page.get_by_role("button", name="Show all").click()
    for steps in (0, 4, 20):
        zoom(page, steps)
        # Other processes may hold up some frames.
        wait_until(lambda: frames_per_s(page, 1.5) > 12, "the map moves too slowly")


def test_search_shows_a_deep_call(ui: Page) -> None:
    ui.get_by_label("Search calls").fill("git commit -am 'step 77")
    expect(ui.locator(".finds li").first).to_be_visible()
    ui.keyboard.press("Enter")
    expect(ui.locator(".side .command")).to_contain_text("git commit -am 'step 77")


def test_only_visible_rows_are_in_document(ui: Page) -> None:
    ui.get_by_role("button", name="Table", exact=True).click()
    grid = ui.get_by_role("treegrid")
    grid.focus()
    ui.keyboard.press("End")
    rows = int(grid.get_attribute("aria-rowcount") or 0)
    expect(grid.locator(f"[aria-rowindex='{rows}']")).to_be_visible()
    assert rows > 20_000
    assert grid.get_by_role("row").count() < 100


_LAYOUT = """async ({ parents, fold }) => {
    const { Model } = await import("/ui/js/tree/model.js");
    const model = new Model();
    model.folding = fold;
    const zeros = parents.map(() => 0);
    const names = ["seconds", "hits", "saved", "seen", "seen_hits", "effect", "marks", "passes"];
    const columns = { id: parents.map((_, i) => i + 1), parent: parents };
    for (const name of names) columns[name] = zeros;
    model.append(columns, []);
    model.layout();
    const { items } = model;
    const pick = (name) => Array.from(items[name].subarray(0, items.size));
    return { ...Object.fromEntries(["kind", "node", "count", "col", "row", "up"].map((n) => [n, pick(n)])),
        rows: items.rows, sorted: Array.from(items.byRow), of: Array.from(model.itemOf) };
}"""


@pytest.mark.parametrize("fold", [True, False])
def test_nodes_do_not_overlap(proxy: Running, page: Page, fold: bool) -> None:
    """The layout, on trees drawn at random: nothing is lost, and no two things lie on one another."""
    page.goto(f"{proxy.client.base_url}/ui/")
    for seed in range(6):
        assert_apart(page, seed, fold=fold)


def assert_apart(page: Page, seed: int, *, fold: bool) -> None:
    state = seed * 7919 + 1
    parents = [0]
    for number in range(1, 400):
        state = (state * 1103515245 + 12345) % 2**31
        # Mostly the last one, so that there are chains; now and then any.
        parents.append(number if state % 10 < 8 else 1 + state % number)
    result = page.evaluate(_LAYOUT, {"parents": parents, "fold": fold})
    places = list(zip(result["col"], result["row"], strict=True))
    assert len(set(places)) == len(places)
    assert sum(result["count"]) == 400
    assert all(item >= 0 for item in result["of"])
    assert sorted(result["sorted"]) == list(range(len(places)))
    assert [result["row"][item] for item in result["sorted"]] == sorted(result["row"])
    for item, up in enumerate(result["up"]):
        if item:
            assert result["col"][item] == result["col"][up] + 1
            assert result["row"][item] >= result["row"][up]
    folded = [count for kind, count in zip(result["kind"], result["count"], strict=True) if kind]
    assert all(count >= 7 for count in folded)
    assert bool(folded) == fold
