"""The moving picture in README: `python -m tests.ui.recording`, on a machine where `local` sandboxes work.

It is recorded from the real page: rollout 1 repairs a program, rollout 2 makes the same calls and then another one.
"""

import io
import json
import threading
import time
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Page

from forkpoint.ephemeral_proxy import ephemeral_proxy
from tests.ui.browser import chromium
from tests.ui.demo import FILES, FIX, TEST

FILE = Path(__file__).parents[2] / "docs" / "screenshots" / "fork.webp"
SIZE = (960, 460)
FRAME_S = 0.25
END_S = 3.0
"""How long the last frame stays, before the picture begins again."""
SLOW_TEST = TEST.replace("0.6", "2")
SHARED = ("cat ledger/money.py", SLOW_TEST, FIX, SLOW_TEST)
CALLS = [
    *(("1", command) for command in SHARED),
    ("1", "echo 'add() adds' > CHANGES"),
    *(("2", command) for command in SHARED),
    ("2", "sed -i 's/a + b/sum((a, b))/' ledger/money.py"),
    ("2", SLOW_TEST),
]
LINES = 6
"""How many of the last calls are shown below the page."""
CAPTION = """lines => {
    const bar = document.getElementById("caption") ?? document.body.appendChild(document.createElement("div"));
    bar.id = "caption";
    bar.textContent = lines.join("\\n");
    Object.assign(bar.style, {
        position: "fixed", left: 0, right: 0, bottom: 0, padding: "10px 16px", zIndex: 99, whiteSpace: "pre",
        font: "13px/1.5 ui-monospace, monospace", background: "#1b2330", color: "#e8eef8",
    });
}"""


class Agents(threading.Thread):
    """Two rollouts, one after the other, with a model's pause before each call.

    Attributes:
        lines: What the picture says about each call.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.lines: list[str] = []

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as client:
            for rollout, command in CALLS:
                time.sleep(0.7)
                shown = f"rollout {rollout}   {command[:60]:60}"
                self.lines.append(f"{shown}   …")
                start = time.monotonic()
                answer = client.post(f"/t/fix-ledger/r/{rollout}/shell/exec", content=json.dumps({"command": command}))
                hit = answer.raise_for_status().headers["cache-status"] == "forkpoint; hit"
                spent = time.monotonic() - start
                self.lines[-1] = f"{shown}   {'hit ' if hit else 'miss'} {spent:6.3f} s"
        time.sleep(1)


def record(page: Page, url: str) -> list[Image.Image]:
    """Take a picture of the page every `FRAME_S` until the rollouts have ended."""
    agents = Agents(url)
    frames = []
    agents.start()
    due = time.monotonic()
    while agents.is_alive():
        # The key that fits the map into the page.
        page.keyboard.press("0")
        page.evaluate(CAPTION, ([""] * LINES + agents.lines)[-LINES:])
        frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
        due += FRAME_S
        page.wait_for_timeout(max(1, (due - time.monotonic()) * 1000))
    return frames


def main() -> None:
    with ephemeral_proxy() as proxy, chromium(*SIZE) as browser:
        spec = {"driver": "local", "files": FILES, "workdir": "/work"}
        httpx.put(f"{proxy.url}/api/v1/tasks/fix-ledger", json=spec, timeout=60, trust_env=False).raise_for_status()
        page = browser.pages[0]
        page.goto(f"{proxy.url}/ui/#/t/fix-ledger")
        page.wait_for_selector("main[data-ready]")
        frames = record(page, proxy.url)
    # The end comes first too, for readers whose browser shows only one frame.
    durations = [int(END_S * 500), *[int(FRAME_S * 1000)] * (len(frames) - 1), int(END_S * 1000)]
    frames[-1].save(FILE, save_all=True, append_images=frames, duration=durations, loop=0, quality=60, method=6)
    print(f"{FILE}: {len(frames)} frames, {FILE.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
