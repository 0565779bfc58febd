"""The page of error texts quotes the code: people search it for what they see."""

import ast
import re
from collections.abc import Iterator

import pytest

from docs.site.markdown import DOCS, ROOT

PACKAGES = ("forkpoint", "proxy", "sandboxes", "snapshots")
VALUE = "…"
"""Stands for a value in a text, on the page and in what `texts_of` returns."""


def texts_of(source: str) -> Iterator[str]:
    """Yield the strings of a module, with `VALUE` for each value in them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def quoted(page: str) -> list[str]:
    """Return the texts in the first column of the tables whose head begins with `Text`."""
    tables = re.findall(r"^\| Text\b.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [
        text for table in tables for row in table.splitlines() for text in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]


@pytest.fixture(scope="module")
def texts() -> str:
    modules = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return "\n".join(text for path in modules for text in texts_of(path.read_text()))


def missing(page: str, texts: str) -> list[str]:
    """Return the quoted texts that no string has; a kind of error, such as `quota`, counts as a text."""
    return [text for text in quoted(page) if text.strip(f"{VALUE} ") not in texts]


def test_quoted_texts_are_in_the_code(texts: str) -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    assert len(quoted(page)) > 50
    assert missing(page, texts) == []


@pytest.mark.parametrize("text", ["there is no tsk", "there is … no task"])
def test_text_that_no_code_has_is_missing(texts: str, text: str) -> None:
    page = f"| Text | What happened |\n|---|---|\n| `there is no task …` (404), `{text}` | |\n"
    assert missing(page, texts) == [text]
