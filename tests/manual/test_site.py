"""The documentation site: complete, without dead links, and within the page's content security policy."""

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from docs.site.hooks import expanded
from docs.site.markdown import ADOPTED, DOCS, ROOT, adapted, links_of


class Page(HTMLParser):
    """What a page of the site links to, the anchors that it has, and what its policy forbids."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.forbidden: list[str] = []
        self._script = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
                if tag != "a" and "://" in value:
                    self.forbidden.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)
            elif name == "style" or name.startswith("on"):
                self.forbidden.append(f"{tag} {name}={value}")
        self._script = tag == "script" and not dict(attrs).keys() & {"src", "type"}
        if tag == "style":
            self.forbidden.append("<style>")

    def handle_data(self, data: str) -> None:
        if self._script and data.strip():
            self.forbidden.append(data)
        self._script = False


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_no_link_is_dead(site: Path, pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = html.unescape(link).partition("#")
            if "://" in target or target.startswith("mailto:") or target == "/ui/":
                continue
            there = (path.parent / target).resolve() if target else path
            if not there.is_file() or (anchor and there in pages and anchor not in pages[there].anchors):
                dead.append(f"{path.relative_to(site.resolve())}: {link}")
    assert dead == []


def test_pages_need_nothing_that_the_policy_forbids(pages: dict[Path, Page]) -> None:
    """No inline script or style, and no file of another host."""
    assert {str(path): page.forbidden for path, page in pages.items() if page.forbidden} == {}


def test_every_page_is_in_the_list_for_language_models(site: Path) -> None:
    listed = re.findall(r"\]\(([^)]+\.md)\)", (site / "llms.txt").read_text())
    assert len(listed) > 40
    assert all((site / page).is_file() for page in listed)
    assert {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} <= set(listed)


def test_navigation_names_every_page() -> None:
    """A new page in `docs/` needs a line in `docs/site/mkdocs.yml`, unless its folder has one."""
    # The file has a tag of Python for the slugs, which is of no interest here.
    settings = yaml.safe_load((ROOT / "docs" / "site" / "mkdocs.yml").read_text().replace("!!python", "#"))
    named = set(re.findall(r"'([^']+\.md)'", repr(expanded(settings["nav"]))))
    written = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert written | set(ADOPTED.values()) | {"rest.md", "settings.md", "client-reference.md"} == named


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("ui.md", "[a](../bench/README.md#x)", "[a](benchmarks.md#x)"),
        ("agents/e2b.md", "[a](../../CHANGELOG.md)", "[a](../changelog.md)"),
        ("index.md", "[a](docs/state.md#sessions)", "[a](state.md#sessions)"),
        ("index.md", "![a](docs/diagrams/tree.svg)", "![a](diagrams/tree.svg)"),
        ("ui.md", "[step](../proxy/step.py)", "[step](source/proxy/step.py)"),
        ("ui.md", "[`proxy/`](../proxy/)", "`proxy/`"),
        ("index.md", "[a](docs/decisions/)", "[a](decisions/README.md)"),
        ("ui.md", "[a](https://x.example/y) [b](#keys)", "[a](https://x.example/y) [b](#keys)"),
        ("ui.md", "text\n- item\n- item", "text\n\n- item\n- item"),
        ("ui.md", "text\n| a |\n|---|", "text\n\n| a |\n|---|"),
        ("ui.md", "```\n[a](b)\n- c\n```", "```\n[a](b)\n- c\n```"),
    ],
)
def test_markdown_is_adapted_to_the_site(page: str, text: str, expected: str) -> None:
    assert adapted(page, text).strip() == expected


def test_links_in_code_are_no_links() -> None:
    assert list(links_of("`[a](b)` [c](d)\n```\n[e](f)\n```")) == [(1, "d")]
