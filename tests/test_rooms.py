"""The rooms of the code are what their `__init__` docstrings and docs/architecture.md say.

A room is a package. Its docstring says what it is for, in which process it runs, and which rooms it imports.
`python -m tests.test_rooms` writes the imports into the docstrings, and the table into the page.
"""

import ast
import asyncio
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "architecture.md"
TOPS = ("proxy", "snapshots", "sandboxes")
BEGIN, END = "<!-- rooms -->\n", "<!-- /rooms -->"
MAX_MODULES = 20
"""The largest number of modules in one room. A room with more is a drawer: nothing can be found in it."""
MAX_METHODS = 15
"""The largest number of public methods in one class."""
MAX_STEP_LINES = 120
"""The length of the module that shows what the product does."""
_WIDTH = 118
_SUFFIXES = frozenset({"bin", "c", "json", "npy", "proto", "sqlite"})
"""Suffixes of files, which look like names in modules."""
_EVENTS = frozenset({"websocket"})
"""What types of ASGI's events begin with, and modules of ours are called."""


@dataclass(frozen=True)
class Room:
    """One package.

    Attributes:
        name: Dotted, such as `proxy.tree`.
        purpose: The first paragraph of its docstring, and the second where there is one, as one line.
        process: The process that it runs in.
        imports: The rooms that it may import, as its docstring lists them.
    """

    name: str
    purpose: str
    process: str
    imports: tuple[str, ...]

    @property
    def row(self) -> str:
        """The room's line in the page's table."""
        path = self.name.replace(".", "/")
        return f"| [`{path}/`](../{path}/) | {self.purpose} |"


def folders() -> Iterator[Path]:
    """Yield the folder of each room, the outer ones first."""
    for top in TOPS:
        yield from sorted(path.parent for path in (REPOSITORY / top).rglob("__init__.py"))


def name_of(folder: Path) -> str:
    return ".".join(folder.relative_to(REPOSITORY).parts)


def room_of(folder: Path) -> Room:
    """Read a room's docstring."""
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    purpose, _, rest = doc.partition("\n\nProcess: ")
    process, _, imports = rest.partition("\nMay import: ")
    listed = tuple(re.findall(r"[a-z0-9_.]*[a-z0-9_]", imports.replace("nothing", "")))
    return Room(
        name_of(folder), " ".join(purpose.split()), " ".join(process.partition("\n\n")[0].split()).rstrip("."), listed
    )


def imported_by(folder: Path, rooms: set[str]) -> tuple[str, ...]:
    """Return the other rooms that the modules of a room import, as their sources say; tests of types included."""
    results: set[str] = set()
    for module in folder.glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                continue
            for target in targets:
                parts = target.split(".")
                prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
                room = next((prefix for prefix in prefixes if prefix in rooms), None)
                if room is not None and room != name_of(folder):
                    results.add(room)
    return tuple(sorted(results, key=lambda name: (TOPS.index(name.partition(".")[0]), name)))


def rooms() -> list[Room]:
    return [room_of(folder) for folder in folders()]


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_docstring_says_purpose_process_and_imports(room: Room) -> None:
    assert room.purpose.endswith(".")
    assert room.process
    assert room.imports == imported_by(REPOSITORY / room.name.replace(".", "/"), {other.name for other in rooms()})


def test_page_shows_the_docstrings() -> None:
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0] == table()


@pytest.mark.parametrize("folder", list(folders()), ids=name_of)
def test_room_is_no_drawer(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= MAX_MODULES + 1  # its `__init__` is no module of its own


@pytest.mark.parametrize("top", TOPS)
def test_class_has_one_thought(top: str) -> None:
    large = {
        f"{path.relative_to(REPOSITORY)}::{made.name}"
        for path in (REPOSITORY / top).rglob("*.py")
        for made in ast.walk(ast.parse(path.read_text()))
        if isinstance(made, ast.ClassDef) and len(public_methods(made)) > MAX_METHODS
    }
    assert large == set(), f"more than {MAX_METHODS} public methods: divide the class, or make one a function"


def test_class_names_have_one_meaning() -> None:
    """The Python client is left out: its classes are named like what they show."""
    homes: dict[str, list[str]] = {}
    for top in TOPS:
        for path in sorted((REPOSITORY / top).rglob("*.py")):
            for made in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
                homes.setdefault(made, []).append(str(path.relative_to(REPOSITORY)))
    assert {made: paths for made, paths in homes.items() if len(paths) > 1} == {}


def public_methods(made: ast.ClassDef) -> list[str]:
    """Return the public methods of a class, without properties and what `asyncio` calls of a protocol."""
    methods = [one for one in made.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        one.name
        for one in methods
        if not one.name.startswith("_")
        and not any(isinstance(mark, ast.Name) and mark.id == "property" for mark in one.decorator_list)
        and one.name not in dir(asyncio.Protocol)
    ]


def test_main_path_fits_on_one_screen() -> None:
    assert len((REPOSITORY / "proxy/step.py").read_text().splitlines()) <= MAX_STEP_LINES


def test_pages_that_sources_name_exist() -> None:
    """A docstring that names a page, a test or a benchmark leads there."""
    missing = [
        f"{path.relative_to(REPOSITORY)} names {page}"
        for top in TOPS
        for path in sorted((REPOSITORY / top).rglob("*.py"))
        for page in re.findall(r"\b(?:docs|tests|bench|examples)/[\w./-]+\.(?:md|py)\b", path.read_text())
        if not (REPOSITORY / page).exists()
    ]
    assert missing == []


def test_names_that_sources_mention_exist() -> None:
    """A docstring or comment that mentions `module.Name` names something that this module has."""
    sources = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path.read_text()
        for top in TOPS
        for path in sorted((REPOSITORY / top).rglob("*.py"))
    }
    # A module may be mentioned by its last names, such as `ipc.channel`.
    modules: dict[str, list[str]] = {}
    for dotted in sources:
        parts = dotted.removesuffix(".__init__").split(".")
        for first in range(len(parts)):
            modules.setdefault(".".join(parts[first:]), []).append(dotted)
    missing = []
    for source, text in sources.items():
        for dotted, name in re.findall(r"`([a-z_]\w*(?:\.[a-z_]\w*)*)\.(\w+)(?:\.\w+)*`", text):
            homes = [] if name in _SUFFIXES or dotted in _EVENTS else modules.get(dotted, [])
            has_it = (re.search(rf"(?<![`.\w]){name}\b", sources[home]) for home in homes)
            if homes and f"{dotted}.{name}" not in modules and not any(has_it):
                missing.append(f"{source} mentions {dotted}.{name}")
    assert missing == []


def table() -> str:
    lines = ["| Room | What it is for |", "|---|---|", *(room.row for room in rooms())]
    return "\n".join(lines) + "\n"


def write() -> None:
    """Write what the sources import into the docstrings, then the table into the page."""
    names = {room.name for room in rooms()}
    for folder in folders():
        path = folder / "__init__.py"
        imports = ", ".join(imported_by(folder, names)) or "nothing"
        line = textwrap.fill(f"May import: {imports}.", _WIDTH, break_on_hyphens=False)
        old = path.read_text()
        doc = ast.get_docstring(ast.parse(old), clean=False)
        assert doc is not None, path
        kept = re.split(r"\nMay import: ", doc)[0].rstrip()
        path.write_text(old.replace(doc, f"{kept}\n{line}\n", 1))
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    write()
