"""A real, headless Chromium: Debian's own, driven by Playwright."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import BrowserContext, sync_playwright

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def missing() -> str:
    """Say why there is no browser here; empty where there is one.

    Raises:
        RuntimeError: FORKPOINT_NEEDS_CHROMIUM says that there must be one.
    """
    if Path(CHROMIUM).exists():
        return ""
    why = "needs Debian's chromium"
    if os.environ.get("FORKPOINT_NEEDS_CHROMIUM"):
        raise RuntimeError(f"{why}, and FORKPOINT_NEEDS_CHROMIUM is set")
    return why


@contextmanager
def chromium(width: int = 1360, height: int = 860, scheme: str = "light", scale: float = 1) -> Iterator[BrowserContext]:
    """Start a browser of its own with an empty profile; it is gone after the block."""
    with tempfile.TemporaryDirectory(prefix="forkpoint-chromium-") as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=CHROMIUM,
            headless=True,
            # A busy disk may take half a minute for the first start of a program of this size.
            timeout=120_000,
            args=list(QUIET),
            viewport={"width": width, "height": height},
            color_scheme=scheme,  # type: ignore[arg-type]
            device_scale_factor=scale,
        )
        try:
            yield context
        finally:
            context.close()
