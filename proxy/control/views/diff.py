"""Views of the difference between two states: files, sessions and databases, bounded in size. Pure."""

import difflib
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import orjson
from pydantic import BaseModel

from sandboxes.inspection import FileEntry, SessionView, StateView

CONTENT_BYTES = 64 << 10
"""Largest file that is compared line by line. Of larger files only the change of size and mode is shown."""
_DIFF_LINES = 2_000
"""Longest text that is compared line by line: `difflib` is quadratic in the worst case."""
_DIFF_CHARS = 64 << 10
"""Longest diff of one file, in characters; the rest is cut."""
_TEXTS_SHOWN = 100
"""Number of files whose lines are compared; of the others only the attributes are."""
FILES_SHOWN = 500
"""Number of changed paths in a view."""
ROWS_SHOWN = 50
"""Number of added rows, and of removed rows, in the view of a table."""


class FileFacts(BaseModel):
    """The attributes of a file.

    Attributes:
        mode: Permission bits in octal, as `chmod` takes them.
        size_bytes: Size of a regular file; 0 for others.
        target: Where a symbolic link points; null for other kinds.
    """

    kind: Literal["file", "directory", "symlink", "other"]
    mode: str
    uid: int
    gid: int
    size_bytes: int
    target: str | None


class FileChange(BaseModel):
    """A changed path.

    Attributes:
        before: Its attributes in state a; null if it is not there.
        after: Its attributes in state b; null if it is not there.
        diff: Unified diff of a text file; null if there is none.
        unshown: Why there is no diff; empty if nothing is missing.
    """

    path: str
    change: Literal["added", "removed", "changed"]
    before: FileFacts | None
    after: FileFacts | None
    diff: str | None = None
    unshown: str = ""


class Changed(BaseModel):
    """A changed text, such as the value of a variable: in state a and in state b, null where there is none."""

    name: str
    before: str | None
    after: str | None


class SessionChange(BaseModel):
    """A changed shell session; `cwd` is null if it is the same."""

    session: str
    cwd: Changed | None
    variables: list[Changed]
    functions: list[Changed]


class TableChange(BaseModel):
    """A changed table or view of a database.

    Attributes:
        before_rows: Number of rows in state a; null if it is not there, or too large to compare.
        after_rows: Number of rows in state b; null if it is not there, or too large to compare.
        schema_: The change of its definition; null if it is the same.
        unshown: Why rows are missing from the view; empty if none are.
    """

    table: str
    before_rows: int | None
    after_rows: int | None
    schema_: Changed | None
    added: list[list[Any]]
    removed: list[list[Any]]
    unshown: str = ""


class DatabaseChange(BaseModel):
    """A changed database, with its changed tables and views. `unshown` says what was not compared."""

    database: str
    tables: list[TableChange]
    unshown: str = ""


class DiffView(BaseModel):
    """What changed from node a to node b.

    Attributes:
        same: Whether the nodes are the same, or their states have the same digest.
        files: Changed paths; null if the driver cannot compare files.
        files_total: Number of changed paths, including those that the view leaves out.
        sessions: Changed shell sessions; null if the driver cannot compare them.
        databases: Changed databases; null if the driver cannot compare them.
        unshown: What could not be compared or was left out, and why.
    """

    task: str
    a: str
    b: str
    same: bool
    files: list[FileChange] | None = None
    files_total: int = 0
    sessions: list[SessionChange] | None = None
    databases: list[DatabaseChange] | None = None
    unshown: list[str] = []


def differing_paths(before: StateView, after: StateView) -> list[str] | None:
    """Return the paths whose entries differ, sorted; None if either state has too many changed paths to list."""
    if before.files is None or after.files is None:
        return None
    paths = before.files.keys() | after.files
    return sorted(path for path in paths if before.files.get(path) != after.files.get(path))


def file_changes(
    paths: Iterable[str], before: Mapping[str, FileEntry], after: Mapping[str, FileEntry]
) -> list[FileChange]:
    """Return the changes of these paths. A path that is in neither state is left out."""
    changes, diffs = [], 0
    for path in paths:
        if before[path].kind == "gone" and after[path].kind == "gone":
            continue
        change = file_change(path, before[path], after[path], texts=diffs < _TEXTS_SHOWN)
        diffs += change.diff is not None
        changes.append(change)
    return changes


def file_change(path: str, before: FileEntry, after: FileEntry, *, texts: bool = True) -> FileChange:
    """Return the change of a path. `texts` says whether to compare the lines of text files."""
    change: Literal["added", "removed", "changed"] = "changed"
    if before.kind == "gone" or after.kind == "gone":
        change = "added" if before.kind == "gone" else "removed"
    facts = [None if entry.kind == "gone" else FileFacts(**file_facts(entry)) for entry in (before, after)]
    view = FileChange(path=json_text(path), change=change, before=facts[0], after=facts[1])
    sides = [entry for entry in (before, after) if entry.kind == "file"]
    if not sides or (len(sides) == 2 and before.content is not None and before.content == after.content):
        return view
    if not texts:
        return view.model_copy(update={"unshown": f"only {_TEXTS_SHOWN} files are shown line by line"})
    if any(side.content is None for side in sides):
        return view.model_copy(update={"unshown": f"longer than {CONTENT_BYTES >> 10} KiB"})
    contents = [_text(side.content or b"") for side in (before, after)]
    if None in contents:
        return view.model_copy(update={"unshown": "binary"})
    lines = [(text or "").splitlines(keepends=True) for text in contents]
    if max(map(len, lines)) > _DIFF_LINES:
        return view.model_copy(update={"unshown": f"more than {_DIFF_LINES} lines"})
    unified = "".join(_with_end(line) for line in difflib.unified_diff(lines[0], lines[1], f"a{path}", f"b{path}"))
    if len(unified) > _DIFF_CHARS:
        unified = unified[:_DIFF_CHARS] + "\n[…]\n"
    return view.model_copy(update={"diff": json_text(unified)})


def _with_end(line: str) -> str:
    return line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"


def _text(content: bytes) -> str | None:
    if b"\0" in content:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def file_facts(entry: FileEntry) -> dict[str, Any]:
    """Return the members of a `FileFacts`."""
    target = None if entry.target is None else json_text(entry.target)
    mode = f"{stat.S_IMODE(entry.mode):04o}"
    return {
        "kind": entry.kind, "mode": mode, "uid": entry.uid, "gid": entry.gid, "size_bytes": entry.size_bytes,
        "target": target,
    }  # fmt: skip


def json_text(text: str) -> str:
    """Return text that JSON can hold: a path may contain bytes that are not UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def session_changes(before: StateView, after: StateView) -> list[SessionChange]:
    """Return the changes of shell sessions. A session that a state does not list is as a fresh session."""
    changes = []
    fresh = before.fresh or after.fresh or SessionView("")
    for name in sorted(before.sessions.keys() | after.sessions):
        old, new = before.sessions.get(name, fresh), after.sessions.get(name, fresh)
        if old == new:
            continue
        changes.append(
            SessionChange(
                session=name,
                cwd=None if old.cwd == new.cwd else Changed(name="cwd", before=old.cwd, after=new.cwd),
                variables=_changed(old.variables, new.variables),
                functions=_changed(old.functions, new.functions),
            )
        )
    return changes


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[Changed]:
    return [
        Changed(name=name, before=_cut(before.get(name)), after=_cut(after.get(name)))
        for name in sorted(before.keys() | after)
        if before.get(name) != after.get(name)
    ]


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= CONTENT_BYTES else text[:CONTENT_BYTES] + " […]"


def table_change(
    table: str, schemas: tuple[str | None, str | None], answers: tuple[dict[str, Any] | None, dict[str, Any] | None]
) -> TableChange | None:
    """Return the change of a table, None if it has none, from its definition and `SELECT *` in each state."""
    sides: list[Sequence[Any] | None] = [None if answer is None else answer["rows"] for answer in answers]
    cut = any(answer is not None and (answer["truncated"] or answer["error"]) for answer in answers)
    rows = [Counter(orjson.dumps(row, option=orjson.OPT_SORT_KEYS) for row in side or ()) for side in sides]
    schema = None
    if schemas[0] != schemas[1]:
        schema = Changed(name=table, before=schemas[0], after=schemas[1])
    added, removed = rows[1] - rows[0], rows[0] - rows[1]
    if schema is None and rows[0] == rows[1]:
        return None
    many = added.total() > ROWS_SHOWN or removed.total() > ROWS_SHOWN
    unshown = "too large to compare row by row" if cut else f"only {ROWS_SHOWN} rows are shown" if many else ""
    return TableChange(
        table=table,
        before_rows=None if sides[0] is None or cut else len(sides[0]),
        after_rows=None if sides[1] is None or cut else len(sides[1]),
        schema_=schema,
        added=_rows(added),
        removed=_rows(removed),
        unshown=unshown,
    )


def _rows(rows: Counter[bytes]) -> list[list[Any]]:
    listed = list(rows.elements())[:ROWS_SHOWN]
    return [orjson.loads(row) for row in listed]
