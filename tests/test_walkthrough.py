"""The names of code on the pages of documentation exist in the source."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted(REPOSITORY.glob("*.md")) + sorted(REPOSITORY.glob("docs/**/*.md"))
NAME = re.compile(
    r"`(?P<path>(?:forkpoint|proxy|sandboxes|snapshots|bench|tests)/[\w/]+\.(?:py|c))(?:::(?P<name>[\w.]+))?`"
)
"""A module, `path.py` or `path.c`, or a definition in one: `path.py::name`, `path.py::Class.member`."""


def names_of(page: str) -> list[tuple[str, str]]:
    """Return the path and the name of every reference to code in a page; the name is empty for a whole module."""
    return [(match["path"], match["name"] or "") for match in NAME.finditer(page)]


@cache
def definitions(path: str) -> frozenset[str]:
    """Return what a module defines at its top level and in its classes, as `name` and `Class.member`."""
    return frozenset(_definitions(ast.parse((REPOSITORY / path).read_text()).body))


def _definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name
            case ast.ClassDef(name=name):
                yield prefix + name
                yield from _definitions(statement.body, f"{prefix}{name}.")
            case ast.Assign(targets=targets):
                nodes = (node for target in targets for node in ast.walk(target))
                yield from (prefix + node.id for node in nodes if isinstance(node, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name


def missing(page: str) -> list[str]:
    """Return the references of a page that no source file satisfies."""
    return [
        f"{path}::{name}" if name else path
        for path, name in names_of(page)
        if not (REPOSITORY / path).is_file() or (name and name not in definitions(path))
    ]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_names_on_page_exist(page: Path) -> None:
    """A page that names code changes together with the code."""
    assert missing(page.read_text()) == []


def test_page_names_the_code_it_explains() -> None:
    assert len(names_of((REPOSITORY / "docs" / "architecture.md").read_text())) >= 60


@pytest.mark.parametrize(
    "name",
    [
        "`proxy/step.py::Stepper.knwon`",
        "`proxy/step.py::Stepp`",
        "`proxy/steps.py`",
        "`proxy/step.py::known`",
    ],
)
def test_wrong_name_is_missing(name: str) -> None:
    assert missing(f"A call enters {name}.") == [name.strip("`")]


def test_every_kind_of_definition_counts() -> None:
    page = "`proxy/app.py`, `proxy/lifecycle.py::log`, `proxy/tree/tree.py::Record.id`, `proxy/engine.py::build_engine`"
    assert len(names_of(page)) == 4
    assert missing(page) == []
