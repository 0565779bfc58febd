"""What a page measures of itself: how long a tree takes to open, and how many frames a second it pans with."""

import contextlib
import os
import re
from collections import Counter
from pathlib import Path

from playwright.sync_api import Page

_PAN = """async ([seconds, step]) => {
    const canvas = document.querySelector("canvas");
    const box = canvas.getBoundingClientRect();
    canvas.setPointerCapture = () => {};
    const point = (type, x, y) => canvas.dispatchEvent(
        new PointerEvent(type, { clientX: box.left + x, clientY: box.top + y, pointerId: 1, bubbles: true }));
    let [x, y, frames] = [box.width / 2, box.height / 2, 0];
    point("pointerdown", x, y);
    const start = performance.now();
    while (performance.now() - start < seconds * 1000) {
        x += step * Math.sin(frames / 20);
        y -= step * Math.cos(frames / 33);
        point("pointermove", x, y);
        await new Promise(requestAnimationFrame);
        frames++;
    }
    point("pointerup", x, y);
    return frames / ((performance.now() - start) / 1000);
}"""
_VITALS = """async () => {
    const shifts = await new Promise((resolve) => {
        let sum = 0;
        new PerformanceObserver((list) => { for (const entry of list.getEntries()) sum += entry.value; })
            .observe({ type: "layout-shift", buffered: true });
        setTimeout(() => resolve(sum), 300);
    });
    const paint = performance.getEntriesByName("first-contentful-paint")[0];
    return { first_paint_s: paint.startTime / 1000, layout_shift: shifts };
}"""
_DRAWS = """async (rounds) => {
    const { TreeMap } = await import("./js/tree/canvas.js");
    const draw = TreeMap.prototype._draw;
    const times = [];
    TreeMap.prototype._draw = function () {
        const began = performance.now();
        draw.call(this);
        times.push(performance.now() - began);
    };
    const canvas = document.querySelector("canvas");
    for (let n = 0; n < rounds; n++) {
        canvas.dispatchEvent(new WheelEvent("wheel", { deltaX: n % 2 ? 40 : -40, shiftKey: true, cancelable: true }));
        await new Promise(requestAnimationFrame);
    }
    TreeMap.prototype._draw = draw;
    times.sort((a, b) => a - b);
    return times[times.length >> 1];
}"""
_MARK = "name => performance.getEntriesByName(name).at(-1).startTime"


def open_tree(page: Page, base: str, task: str) -> dict[str, float]:
    """Open a tree in a page that shows nothing yet; return seconds until its first picture, and until all of it.

    Counted from the navigation: the page's own files are among what is fetched.
    """
    page.goto("about:blank")
    page.goto(f"{base}/ui/#/t/{task}")
    page.wait_for_selector("main[data-ready]", timeout=60_000)
    return {name: page.evaluate(_MARK, f"tree-{name}") / 1000 for name in ("first", "ready")}


def frames_per_s(page: Page, seconds: float = 3.0, step: float = 12.0) -> float:
    """Drag the map about for so many seconds; return how many frames were drawn in each."""
    return float(page.evaluate(_PAN, [seconds, step]))


def zoom(page: Page, times: int) -> None:
    """Zoom in, or out where times is negative."""
    button = page.get_by_role("button", name="Zoom in" if times > 0 else "Zoom out")
    for _ in range(abs(times)):
        button.click()


def vitals(page: Page) -> dict[str, float]:
    """Return the first paint in seconds, the layout shift, and the heap in bytes of the page that is shown.

    The first paint is counted from the navigation, so the page must have been loaded with `goto` and shown since.
    """
    measured: dict[str, float] = page.evaluate(_VITALS)
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    measured["heap_bytes"] = float(session.send("Runtime.getHeapUsage")["usedSize"])
    session.detach()
    return measured


def process_bytes() -> Counter[str]:
    """Return the memory of Chromium's processes below this one, by their type: `renderer`, `gpu-process`, `browser` ….

    Memory that processes share counts in parts (PSS, proc_pid_smaps(5)). Pages run in renderers, one for each site, and
    Chromium keeps one more in reserve.
    """
    parents, used = dict[int, int](), Counter[str]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    for pid in parents:
        above = pid
        while above not in (0, os.getpid()):
            above = parents.get(above, 0)
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_text()
            if above and "chromium" in command.partition("\0")[0]:
                kind = re.search(r"--type=([a-z-]+)", command)
                pss = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
                used[kind[1] if kind else "browser"] += int(pss[1]) * 1024 if pss else 0
    return used


def seconds_per_draw(page: Page, rounds: int = 60) -> float:
    """Return the median seconds that drawing the map takes: what a frame costs, whatever else the machine does."""
    return float(page.evaluate(_DRAWS, rounds)) / 1000
