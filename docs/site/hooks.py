"""What MkDocs does beside its own work: pages from outside `docs/`, folders in the navigation, and strict scripts.

MkDocs calls the functions of this module by their names, see https://www.mkdocs.org/dev-guide/plugins/#events.
"""

import os
import re
import shutil
import sys
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.site.client import client_page
from docs.site.llms import table_of_contents
from docs.site.markdown import ADOPTED, DOCS, ROOT, adapted, sources_of
from docs.site.rest import rest_page
from docs.site.settings import settings_page

FAVICON = ROOT / "proxy" / "ui" / "static" / "favicon.svg"
STYLE = Path(__file__).parent / "manual.css"
_SCRIPT = re.compile(r"<script>(.+?)</script>", re.DOTALL)
_inline: dict[str, str] = {}
"""Inline scripts of the theme, by their paths on the site."""
_texts: dict[str, str] = {}
"""The Markdown of each page, by its path on the site."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the folders of the navigation by their pages."""
    config.nav = expanded(config.nav)
    _inline.clear()
    _texts.clear()
    return config


def expanded(entries: Any) -> Any:
    """Return the navigation with the pages of each folder: its README first, then the others by name."""
    if isinstance(entries, list):
        flat: list[Any] = []
        for entry in entries:
            if isinstance(entry, str) and entry.endswith("/"):
                title = entry.strip("/").capitalize()
                pages = sorted((DOCS / entry).glob("*.md"), key=lambda page: (page.name != "README.md", page.name))
                flat.append({title: [page.relative_to(DOCS).as_posix() for page in pages]})
            else:
                flat.append(expanded(entry))
        return flat
    if isinstance(entries, dict):
        return {title: expanded(inner) for title, inner in entries.items()}
    return entries


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from outside `docs/`, references of REST, settings and client, and source files that pages link to."""
    for origin, place in ADOPTED.items():
        files.append(File.generated(config, place, content=(ROOT / origin).read_text()))
    files.append(File.generated(config, "rest.md", content=rest_page()))
    files.append(File.generated(config, "settings.md", content=settings_page()))
    files.append(File.generated(config, "client-reference.md", content=client_page()))
    files.append(File.generated(config, "favicon.svg", abs_src_path=str(FAVICON)))
    files.append(File.generated(config, "assets/manual.css", abs_src_path=str(STYLE)))
    sources = {
        source for page in files.documentation_pages() for source in sources_of(page.src_uri, page.content_string)
    }
    for source in sorted(sources):
        files.append(File.generated(config, f"source/{source}", abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Adapt a page to the site."""
    text = adapted(page.file.src_uri, markdown)
    _texts[page.file.src_uri] = text
    return text


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001
    """Move the theme's inline scripts into files, because the policy of the proxy allows no others."""
    return _without_inline(output, PurePosixPath(page.file.dest_uri).parent)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:  # noqa: ARG001
    """Do the same for pages that are no Markdown."""
    return _without_inline(output_content, PurePosixPath()) if template_name.endswith(".html") else output_content


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:  # noqa: ARG001
    """Keep the order of the pages, for the table of contents in `llms.txt`."""
    config.extra["order"] = [page.file.src_uri for page in nav.pages]
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Write the scripts and `llms.txt`, and a copy of each page's Markdown beside it."""
    site = Path(config.site_dir)
    for place, script in _inline.items():
        (site / place).write_text(script)
    (site / "llms.txt").write_text(table_of_contents(config.extra["order"], _texts))
    for place, text in _texts.items():
        (site / place).write_text(text)
    # The theme's source maps and its stemmers for other languages are two thirds of its size.
    for useless in [*site.rglob("*.map"), *site.glob("sitemap.xml*")]:
        useless.unlink()
    shutil.rmtree(site / "assets" / "javascripts" / "lunr")


def _without_inline(page: str, folder: PurePosixPath) -> str:
    def moved(match: re.Match[str]) -> str:
        place = f"assets/javascripts/inline-{blake2b(match[1].encode(), digest_size=6).hexdigest()}.js"
        _inline[place] = match[1]
        return f'<script src="{os.path.relpath(place, folder)}"></script>'

    return _SCRIPT.sub(moved, page)
