"""The running proxy serves the manual without another host, and works without it."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from pydantic import SecretStr

from proxy.ui.manual_files import manual
from proxy.ui.static_files import HEADERS
from tests.machine import wait_until
from tests.proxy.serving import Running, serving
from tests.ui.browser import chromium, missing


@pytest.fixture(scope="module")
def proxy(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A proxy with the manual; it has a token, which the manual does not need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxy.control_app.manual", partial(manual, site))
        with serving(tmp_path_factory.mktemp("data"), token=SecretStr("0123456789abcdef")) as running:
            yield running


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("", "text/html; charset=utf-8"),
        ("state.html", "text/html; charset=utf-8"),
        ("state.md", "text/markdown; charset=utf-8"),
        ("llms.txt", "text/plain; charset=utf-8"),
        ("search/search_index.json", "application/json"),
        ("diagrams/tree.svg", "image/svg+xml"),
        ("source/examples/e2b_agent.mjs", "text/plain; charset=utf-8"),
    ],
)
def test_files_have_their_type_and_the_policy(proxy: Running, path: str, kind: str) -> None:
    answer = proxy.client.get(f"/manual/{path}")
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    assert HEADERS.items() <= dict(answer.headers).items()
    again = proxy.client.get(f"/manual/{path}", headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304


def test_manual_leads_to_the_page(proxy: Running) -> None:
    assert 'href="/ui/"' in proxy.client.get("/manual/").text
    assert proxy.client.get("/ui/").status_code == 200


def test_address_without_slash_leads_to_the_manual(proxy: Running) -> None:
    answer = proxy.client.get("/manual", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/manual/")


@pytest.mark.parametrize("path", ["nothing.html", "..%2f..%2fapp.py", "%00"])
def test_other_files_are_refused(proxy: Running, path: str) -> None:
    answer = proxy.client.get(f"/manual/{path}")
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:forkpoint:no-such-file")


def test_installation_without_the_manual_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout has no built site, and a start does not need one."""
    monkeypatch.setattr("proxy.control_app.manual", partial(manual, tmp_path / "none"))
    with serving(tmp_path / "data") as running:
        answer = running.client.get("/manual/")
    assert answer.status_code == 404
    assert "./run docs" in answer.json()["detail"]


def test_search_works_under_the_policy(proxy: Running) -> None:
    """A browser finds a page by a word and shows a picture; it asks no other host, and nothing breaks the policy."""
    if why := missing():
        pytest.skip(why)
    base = str(proxy.client.base_url).rstrip("/")
    with chromium() as browser:
        page = browser.pages[0]
        problems: list[str] = []
        hosts: set[str] = set()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]) if "://" in request.url else None)
        page.goto(f"{base}/manual/")
        field, found = page.locator("[data-md-component=search-query]"), page.locator(".md-search-result__item a")
        field.first.fill("quarantine")

        def is_found() -> bool:
            # The page's scripts look at the field at each key, and may be there only now.
            field.first.press("End")
            return found.first.is_visible()

        wait_until(is_found, "nothing is found", within_s=90)
        page.goto(f"{base}/manual/glossary.html")
        picture = page.locator("article img").first
        picture.wait_for()
        assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 900
        assert (problems, hosts) == ([], {base.removeprefix("http://")})
