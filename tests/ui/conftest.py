"""One browser for each module; a page that saw an error, or asked anybody else, fails its test."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext, ConsoleMessage, Page, Request, expect

from tests.proxy.conftest import proxy  # noqa: F401 - a fixture
from tests.ui.browser import chromium, missing

PATIENCE_MS = 30_000
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserContext]:
    why = missing()
    if why:
        pytest.skip(why)
    with chromium() as context:
        context.set_default_timeout(PATIENCE_MS)
        yield context


@pytest.fixture
def page(browser: BrowserContext) -> Iterator[Page]:
    """Give a new page; at its end, nothing has gone wrong in it."""
    opened = browser.new_page()
    faults: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        # The page shows what the proxy refuses, and the browser notes it here; anything else is a fault of ours.
        if message.type == "error" and "Failed to load resource" not in message.text:
            faults.append(message.text)

    def look(request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname != "127.0.0.1":
            faults.append(f"asked {request.url}")

    opened.on("console", hear)
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("request", look)
    yield opened
    opened.close()
    assert faults == []
