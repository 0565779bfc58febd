"""The page's own files: what others wrote is what it was when it was read, and every page has the page's headers."""

import re
from hashlib import sha256
from pathlib import Path

import pytest

from proxy.ui.static_files import HEADERS
from tests.proxy.serving import Running

STATIC = Path(__file__).parents[3] / "proxy" / "ui" / "static"


def test_files_of_others_have_their_digests() -> None:
    """A changed script would run with the rights of the page; a new one needs its line."""
    vendor = STATIC / "vendor"
    lines = (line.split() for line in (vendor / "SHA256SUMS").read_text().splitlines())
    expected = {name: digest for digest, name in lines}
    actual = {
        path.name: sha256(path.read_bytes()).hexdigest()
        for path in vendor.iterdir()
        if path.name not in {"SHA256SUMS", "README.md"}
    }
    assert actual == expected


def test_modules_are_fetched_beside_one_another() -> None:
    """Each module of the page is named in its head: else a browser learns of it only once its importer is there."""
    named = re.findall(r'<link rel="modulepreload" href="([^"]+)"', (STATIC / "index.html").read_text())
    modules = {path.relative_to(STATIC).as_posix() for path in (STATIC / "js").rglob("*.js")}
    # The page itself, a page of its own, and a worker.
    assert sorted(named) == sorted(modules - {"js/main.js", "js/docs.js", "js/stream.js"})


@pytest.mark.parametrize("path", ["/docs", "/ui/", "/ui/docs.html", "/ui/index.html"])
def test_every_page_has_the_policy(proxy: Running, path: str) -> None:
    answer = proxy.client.get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert HEADERS.items() <= dict(answer.headers).items()
    # Nothing of another host, and nothing inline, which the policy forbids.
    assert re.findall(r"(?:https?:)?//[a-z]|<script>|\sstyle=|\son\w+=", answer.text) == []


@pytest.mark.parametrize("path", ["/docs", "/ui/docs.html"])
def test_description_needs_only_own_files(proxy: Running, path: str) -> None:
    links = re.findall(r'(?:href|src)="([^"]+)"', proxy.client.get(path).text)
    assert len(links) >= 5
    for link in links:
        assert proxy.client.get(proxy.client.base_url.join(path).join(link)).status_code == 200, link
    assert proxy.client.get("/openapi.json").json()["paths"]


def test_other_pages_of_the_framework_are_gone(proxy: Running) -> None:
    assert {proxy.client.get(path).status_code for path in ("/redoc", "/docs/oauth2-redirect")} == {404}
