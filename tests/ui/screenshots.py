"""The pictures in docs/screenshots: `python -m tests.ui.screenshots`, on a machine where `local` sandboxes work.

Fonts are those of the machine; Debian's fonts-inter and fonts-jetbrains-mono look best.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import httpx
from playwright.sync_api import Page

from forkpoint.ephemeral_proxy import ephemeral_proxy
from tests.proxy.serving import serving
from tests.ui.browser import chromium
from tests.ui.demo import populate
from tests.ui.forest import plant
from tests.ui.measure import open_tree

FOLDER = Path(__file__).parents[2] / "docs" / "screenshots"
SIZE = (1440, 900)
PHONE = (390, 844)
SCHEMES = ("light", "dark")
SETTINGS = {"drivers": ["local", "sqlite", "video", "http"], "sandbox_idle_s": 3600.0}
"""Sandboxes are there until the last picture is taken."""


def shots(page: Page, base: str, scheme: str) -> None:
    """Take each view once."""

    def go(address: str, ready: str) -> None:
        page.goto("about:blank")
        page.goto(f"{base}/ui/#{address}")
        page.wait_for_selector(ready)

    def save(name: str) -> None:
        # Texts of calls come a moment after the picture that wants them.
        page.wait_for_timeout(700)
        page.screenshot(path=FOLDER / f"{name}-{scheme}.png")

    go("/", "tr[data-task]")
    save("overview")
    go("/t/fix-ledger", "main[data-ready]")
    save("tree")
    go("/t/fix-ledger?lanes=1&colour=reward", ".lane")
    page.locator("[data-rollout=policy-b-3]").hover()
    save("lanes")
    go("/runs", "tbody tr")
    save("runs")
    go("/system", "#settings tbody tr")
    save("system")
    go("/t/fix-ledger?view=table", "[role=row] .chip")
    page.get_by_text("sed -i 's/a - b/a + b/' ledger/money.py").first.click()
    page.wait_for_selector(".changes")
    save("node")
    go("/t/fix-ledger/r/policy-b-2?time=real", ".waterfall tbody tr")
    save("rollout")
    go("/t/fix-ledger/compare?r=policy-a-0,policy-a-1,policy-a-2,policy-a-3", ".answer-row .output")
    save("group")
    go("/t/fix-ledger/compare?r=policy-a-1,policy-b-2", ".group-compare tbody tr")
    save("compare")
    go("/t/fix-ledger/audit", "text=recorded calls")
    save("audit")
    go("/snapshots", "tbody tr")
    save("snapshots")
    go("/sandboxes", "main[data-ready]")
    save("sandboxes")
    go("/t/fix-ledger/rollouts", "tbody tr")
    save("rollouts")
    go("/t/fix-ledger/compare?r=policy-a-1,policy-b-2", ".group-compare tbody tr")
    page.get_by_role("link", name="Compare states").click()
    page.wait_for_selector(".changes")
    save("changes")
    go("/t/fix-ledger", "main[data-ready]")
    page.locator("canvas").focus()
    for key in ("ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.get_by_role("link", name="Terminal").click()
    page.wait_for_selector("text=connected")
    page.locator(".xterm-rows").get_by_text("#").first.wait_for()
    page.keyboard.type("ls --color; python3 tests/test_money.py; PYTHONPATH=. python3 tests/test_money.py\n")
    save("terminal")


def phone_shots(page: Page, base: str, scheme: str) -> None:
    """Take the views that are looked at on a phone."""
    for name, address, ready in (
        ("overview", "/", "tr[data-task]"),
        ("tree", "/t/fix-ledger", "[role=row] .mono"),
        ("node", "/t/fix-ledger?node=n2", ".changes"),
        ("lanes", "/t/fix-ledger?lanes=1", ".lane"),
        ("rollouts", "/t/fix-ledger/rollouts", "tbody tr"),
        ("rollout", "/t/fix-ledger/r/policy-b-2", ".waterfall tbody tr"),
        ("runs", "/runs", "tbody tr"),
    ):
        page.goto("about:blank")
        page.goto(f"{base}/ui/#{address}")
        page.wait_for_selector(ready)
        page.wait_for_timeout(700)
        page.screenshot(path=FOLDER / f"{name}-phone-{scheme}.png")


def audit(base: str) -> None:
    """Check some of the calls, so that there is something to show."""
    with httpx.Client(base_url=f"{base}/api/v1/tasks/fix-ledger", trust_env=False) as client:
        client.post("/verify", json={"sample": 40, "seed": 1}).raise_for_status()
        while client.get("/audit").json()["running"]:
            time.sleep(0.2)


def views() -> None:
    """Take the views of the tasks of `demo`."""
    with tempfile.TemporaryDirectory() as made, ephemeral_proxy(settings=SETTINGS) as proxy:
        populate(proxy.url, folder=Path(made))
        audit(proxy.url)
        for scheme in SCHEMES:
            with chromium(*SIZE, scheme=scheme) as browser:
                shots(browser.pages[0], proxy.url, scheme)
            with chromium(*PHONE, scheme=scheme) as browser:
                phone_shots(browser.pages[0], proxy.url, scheme)


def large() -> None:
    """Take a tree of 50,000 nodes."""
    with tempfile.TemporaryDirectory() as folder:
        plant(Path(folder), "large", 50_000)
        with serving(Path(folder)) as running:
            for scheme in SCHEMES:
                with chromium(*SIZE, scheme=scheme) as browser:
                    page = browser.pages[0]
                    open_tree(page, str(running.client.base_url), "large")
                    page.get_by_role("button", name="Show all").click()
                    page.wait_for_timeout(1500)
                    page.screenshot(path=FOLDER / f"large-{scheme}.png")


def main() -> None:
    """Take the pictures; `views` or `large` as an argument takes only these."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for take in (views, large):
        if take.__name__ in (sys.argv[1:] or [take.__name__]):
            take()
    for picture in FOLDER.glob("*.png"):
        # Fewer colours, where a tool for it is there: a third of the size.
        os.system(f"command -v pngquant >/dev/null && pngquant --force --ext .png --quality 70-95 {picture}")  # noqa: S605


if __name__ == "__main__":
    main()
