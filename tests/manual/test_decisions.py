"""The decision records are few and short, and held by tests that exist. References lead to records that exist."""

import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from tests.test_walkthrough import missing, names_of

ROOT = Path(__file__).parents[2]
DECISIONS = ROOT / "docs" / "decisions"
RECORDS = sorted(DECISIONS.glob("[0-9]*.md"))
MOST_RECORDS = 25
MOST_WORDS = 12_000
"""Bounds all records and their list together: what a new maintainer reads in an hour."""
SOURCES = ("bench", "docker", "docs", "examples", "forkpoint", "proxy", "sandboxes", "snapshots", "tests")
_TEXTS = {".c", ".css", ".js", ".md", ".mjs", ".proto", ".py", ".pyi", ".sh", ".toml", ".yaml", ".yml"}
_FILE = re.compile(r"decisions/(\d{4}[\w-]*(?:\.md)?)")
_NUMBER = re.compile(r"\bdecisions?\s+(\d+)", re.IGNORECASE)
_ROW = re.compile(r"^\| (\d+) \| \[(.+)\]\((.+)\) \|$", re.MULTILINE)


def held_by(record: str) -> str:
    """Return the paragraph that names what holds a decision; empty without one."""
    return record.partition("\n\nHeld by: ")[2]


def flaws(record: str) -> list[str]:
    """Return what a record's last paragraph lacks, and what it names in vain."""
    names = names_of(held_by(record))
    tests = [path for path, _ in names if path.startswith("tests/")]
    return ([] if tests else ["no test holds it"]) + missing(record)


def unknown(text: str, files: Collection[str]) -> list[str]:
    """Return the references in a text that lead to none of these records."""
    numbers = {int(name[:4]) for name in files}
    by_name = [name for name in _FILE.findall(text) if name not in files]
    return by_name + [number for number in _NUMBER.findall(text) if int(number) not in numbers]


def sources() -> Iterator[Path]:
    """Yield the files of the repository that may refer to a decision, without this one."""
    for folder in SOURCES:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in _TEXTS and path != Path(__file__))
    yield from (path for path in ROOT.iterdir() if path.suffix in _TEXTS)


def test_each_decision_is_listed_in_order() -> None:
    rows = [
        (f"# {number}. {title}", name) for number, title, name in _ROW.findall((DECISIONS / "README.md").read_text())
    ]
    assert rows == [(path.read_text().partition("\n")[0], path.name) for path in RECORDS]
    assert [path.name[:4] for path in RECORDS] == [f"{number:04}" for number in range(1, len(RECORDS) + 1)]


def test_decisions_are_few_and_short() -> None:
    """A record that was overtaken is rewritten or goes; a measurement that decides nothing goes."""
    assert len(RECORDS) <= MOST_RECORDS
    words = sum(len(path.read_text().split()) for path in DECISIONS.glob("*.md"))
    assert words <= MOST_WORDS, f"docs/decisions has {words} words: for each new one, another must go"


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_each_decision_is_held(path: Path) -> None:
    assert flaws(path.read_text()) == []


def test_references_lead_to_decisions() -> None:
    files = {path.name for path in RECORDS}
    found = {str(path.relative_to(ROOT)): unknown(path.read_text(errors="replace"), files) for path in sources()}
    assert {path: references for path, references in found.items() if references} == {}


@pytest.mark.parametrize(
    ("record", "flaw"),
    [
        ("# 1. A\n\nIt holds.\n", "no test holds it"),
        ("# 1. A\n\nIt holds.\n\nHeld by: `proxy/step.py`\n", "no test holds it"),
        ("# 1. A\n\nHeld by: `tests/proxy/test_gone.py`\n", "tests/proxy/test_gone.py"),
        ("# 1. A\n\nHeld by: `tests/proxy/test_step.py::test_gone`\n", "tests/proxy/test_step.py::test_gone"),
        ("# 1. A\n\n`sandboxes/linux/gone.c`\n\nHeld by: `tests/proxy/test_step.py`\n", "sandboxes/linux/gone.c"),
    ],
)
def test_decision_that_nothing_holds_is_found(record: str, flaw: str) -> None:
    assert flaws(record) == [flaw]


@pytest.mark.parametrize(
    "text",
    [
        "[why](decisions/0002-gone.md)",
        "See docs/decisions/0002.",
        "[why](../decisions/0001-kept.md#why) and\n[why](decisions/0001-gone.md)",
        "as decision 2 says",
        "the rules of\ndecisions 2 and 1",
    ],
)
def test_reference_to_no_decision_is_found(text: str) -> None:
    assert len(unknown(text, {"0001-kept.md"})) == 1
    assert unknown("[why](decisions/0001-kept.md), decision 1, docs/decisions/", {"0001-kept.md"}) == []
