"""The page at `/ui`: the time to open and pan a tree of 50,000 nodes, and what ten open pages cost the hits.

`python -m bench.ui` needs Debian's chromium. Opening and panning are measured in the page itself. For the hits, ten
pages (overview, trees, tables) are open in one browser and follow the load that is measured; without them the same
browser shows empty pages. Both are measured in turn, and the ratio is the median over the pairs.
"""

import tempfile
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from bench.client import Server, by_own
from bench.hotpath import standing_at
from bench.machine import console, median, table
from forkpoint.ephemeral_proxy import ephemeral_proxy
from tests.proxy.serving import serving
from tests.ui.browser import chromium
from tests.ui.forest import plant
from tests.ui.measure import frames_per_s, open_tree, process_bytes, seconds_per_draw, vitals, zoom

PAINTED = ("", "runs", "t/big", "t/big/rollouts", "system")
VIEWS = ("", "t/hotpath", "t/hotpath?view=table", "t/hotpath/rollouts", "sandboxes")
PAGES = 10


def large(nodes: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plant(Path(folder), "big", nodes)
        with serving(Path(folder)) as proxy, chromium() as browser:
            base, page = str(proxy.client.base_url), browser.pages[0]
            cold = open_tree(page, base, "big")
            opened = [open_tree(page, base, "big") for _ in range(rounds)]
            shown = table(f"{nodes:,} nodes in the page", "", "")
            shown.add_row("opens, its tree not in the proxy's memory, s", f"{cold['ready']:.2f}")
            shown.add_row("opens, s", f"{median([one['ready'] for one in opened]):.2f}")
            shown.add_row("… slowest of the rounds, s", f"{max(one['ready'] for one in opened):.2f}")
            shown.add_row("… first picture, s", f"{median([one['first'] for one in opened]):.2f}")
            page.get_by_role("button", name="Show all").click()
            for name, steps in (("all of it in sight", 0), ("nearer", 4), ("texts can be read", 20)):
                zoom(page, steps)
                shown.add_row(f"pans, frames/s, {name}", f"{frames_per_s(page):.0f}")
                shown.add_row("… a frame is drawn in, ms", f"{seconds_per_draw(page) * 1000:.1f}")
            shown.add_row("heap, MB", f"{vitals(page)['heap_bytes'] / 1e6:.0f}")
            used = process_bytes()
            shown.add_row("memory of the page's processes (PSS of renderers), MB", f"{used['renderer'] / 1e6:.0f}")
            shown.add_row("… of all of Chromium, MB", f"{used.total() / 1e6:.0f}")
            console.print(shown)
            _print_vitals(page, base, rounds)


def _print_vitals(page: Page, base: str, rounds: int) -> None:
    shown = table("Views, median of the rounds", "", "first paint, ms", "layout shift", "heap, MB")
    for view in PAINTED:
        results = []
        for _ in range(rounds):
            page.goto("about:blank")
            page.goto(f"{base}/ui/#/{view}")
            page.wait_for_selector("main[data-ready]", timeout=60_000)
            results.append(vitals(page))
        first, shift, heap = (median([one[name] for one in results]) for name in results[0])
        shown.add_row(f"#/{view}", f"{first * 1000:.0f}", f"{shift:.3f}", f"{heap / 1e6:.0f}")
    console.print(shown)


def hits(rounds: int, seconds: float, connections: int) -> None:
    with ephemeral_proxy() as proxy, chromium() as browser:
        server = Server(proxy.url, proxy.pid)
        standing = standing_at(server, 300, connections)
        pages = [browser.pages[0], *(browser.new_page() for _ in range(PAGES - 1))]
        pairs = []
        for number in range(rounds):
            # The order of the two alternates between rounds.
            both = {}
            for open_pages in (number % 2 == 0, number % 2 == 1):
                _show(pages, proxy.url if open_pages else "")
                both[open_pages] = _load(server, standing.requests, seconds)
            pairs.append((both[False], both[True]))
        _print_hits(pairs, connections)


def _show(pages: list[Page], base: str) -> None:
    for number, page in enumerate(pages):
        page.goto(f"{base}/ui/#/{VIEWS[number % len(VIEWS)]}" if base else "about:blank")
        if base:
            page.wait_for_selector("main > *")


def _load(server: Server, requests: Any, seconds: float) -> dict[str, Any]:
    result = by_own(server, requests, seconds)
    if result["failed"]:
        raise RuntimeError(f"{result['failed']} answers were not 200")
    return result


def _print_hits(pairs: list[tuple[dict[str, Any], dict[str, Any]]], connections: int) -> None:
    shown = table(f"Hits with ten pages open, {connections} connections", "", "none", "ten", "ten / none")
    for name in ("p50_us", "p99_us"):
        without, with_ten = ([one[name] for one in side] for side in zip(*pairs, strict=True))
        ratio = median([ten / none for none, ten in zip(without, with_ten, strict=True)])
        shown.add_row(name.replace("_us", " µs"), f"{median(without):,.0f}", f"{median(with_ten):,.0f}", f"{ratio:.2f}")
    console.print(shown)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement of hits")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--only", choices=("large", "hits"))
    options = parser.parse_args()
    if options.only != "hits":
        large(options.nodes, options.rounds)
    if options.only != "large":
        hits(options.rounds, options.seconds, options.connections)


if __name__ == "__main__":
    main()
