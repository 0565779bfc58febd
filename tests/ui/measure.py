"""What a page measures of itself: how long a tree takes to open, and how many frames a second it pans with."""

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
