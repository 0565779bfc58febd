"""The Markdown of the repository, adapted to the site: links between folders, and blank lines that MkDocs needs.

Pages are written for a code host, where links lead to any file of the repository. On the site a link leads to a page,
or to a copy of a source file below `source/`; a link to a folder of code becomes plain text.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ADOPTED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "bench/README.md": "benchmarks.md",
}
"""Pages outside `docs/`, by path in the repository, and their paths on the site."""
SOURCES = "source/"
"""The folder of the site for source files that pages link to."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"\s*(```|~~~)")
_LIST = re.compile(r"\s*(?:[-*+]|\d+\.) ")
_CODE = re.compile(r"(`[^`\n]*`)")


def place_of(path: str) -> str:
    """Return where the site has a file of the repository; empty for a folder that the site does not have.

    Args:
        path: Relative to the repository's root.
    """
    if path in ADOPTED:
        return ADOPTED[path]
    inside = path.removeprefix("docs/") if path.startswith("docs/") else ""
    if (ROOT / path).is_dir():
        return f"{inside}/README.md" if inside and (ROOT / path / "README.md").exists() else ""
    return inside or SOURCES + path


def origin_of(page: str) -> str:
    """Return the path in the repository of a page of the site."""
    return next((origin for origin, place in ADOPTED.items() if place == page), f"docs/{page}")


def outside_code(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield each line's number, its text, and whether it is prose: not in a fenced block."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = _FENCE.match(line)
        prose = not fence and mark is None
        if mark is not None and fence in ("", mark[1]):
            fence = "" if fence else mark[1]
        yield number, line, prose


def links_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the target of each link and picture in a page's Markdown."""
    for number, line, prose in outside_code(text):
        if prose:
            yield from ((number, match[3]) for match in _LINK.finditer(_CODE.sub(_hidden, line)))


def sources_of(page: str, text: str) -> set[str]:
    """Return the repository's source files that a page of the site links to."""
    folder = PurePosixPath(origin_of(page)).parent
    targets = {_repository_path(folder, target) for _, target in links_of(text)}
    return {path for path in targets if path and place_of(path).startswith(SOURCES)}


def adapted(page: str, text: str) -> str:
    """Return a page's Markdown for MkDocs.

    Args:
        page: Its path on the site.
        text: As it is in the repository.
    """
    folder = PurePosixPath(origin_of(page)).parent

    def moved(match: re.Match[str]) -> str:
        _, hash_sign, anchor = match[3].partition("#")
        path = _repository_path(folder, match[3])
        if not path:
            return match[0]
        place = place_of(path)
        if not place:
            return match[2]
        relative = os.path.relpath(place, PurePosixPath(page).parent)
        return f"{match[1]}[{match[2]}]({relative}{hash_sign}{anchor})"

    lines: list[str] = []
    for _, line, prose in outside_code(text):
        if not prose:
            lines.append(line)
            continue
        if lines and _needs_blank(lines[-1], line):
            lines.append("")
        lines.append(_LINK.sub(moved, line))
    return "\n".join(lines) + "\n"


def _repository_path(folder: PurePosixPath, target: str) -> str:
    """Return the path in the repository that a link leads to; empty for an address and for an anchor of the page."""
    path = target.partition("#")[0]
    if not path or "://" in path or path.startswith("mailto:"):
        return ""
    return os.path.normpath(folder / path)


def _needs_blank(before: str, line: str) -> bool:
    """Return whether MkDocs needs an empty line to see that a list or a table begins; a code host does not."""
    if not before.strip():
        return False
    if _LIST.match(line):
        return not before.startswith(" ") and _LIST.match(before) is None
    return line.startswith("|") and not before.startswith("|")


def _hidden(code: re.Match[str]) -> str:
    return "x" * len(code[0])
