"""What differs between two states: files, sessions and databases, within bounds (pure)."""

import difflib
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import orjson
from pydantic import BaseModel

from sandboxes.inspection import FileEntry, SessionView, StateView

CONTENT_BYTES = 64 << 10
"""A file longer than this is told to differ, and not how."""
_DIFF_LINES = 2_000
_DIFF_CHARS = 64 << 10
_TEXTS_SHOWN = 100
FILES_SHOWN = 500
ROWS_SHOWN = 50
_LINES = {True: "binary", False: f"longer than {CONTENT_BYTES >> 10} KiB"}


class FileFacts(BaseModel):
    """What is at a path. mode: octal, as `ls` and `chmod` have it."""

    kind: Literal["file", "directory", "symlink", "other"]
    mode: str
    uid: int
    gid: int
    size_bytes: int
    target: str | None


class FileChange(BaseModel):
    """A path that differs. diff: unified, of text files; unshown: why there is none."""

    path: str
    change: Literal["added", "removed", "changed"]
    before: FileFacts | None
    after: FileFacts | None
    diff: str | None = None
    unshown: str = ""


class Changed(BaseModel):
    """A named thing in both states, by its text; None where it is not there."""

    name: str
    before: str | None
    after: str | None


class SessionChange(BaseModel):
    session: str
    cwd: Changed | None
    variables: list[Changed]
    functions: list[Changed]


class TableChange(BaseModel):
    """A table or view that differs. rows: how many there are; unshown: why rows are not told one by one."""

    table: str
    before_rows: int | None
    after_rows: int | None
    schema_: Changed | None
    added: list[list[Any]]
    removed: list[list[Any]]
    unshown: str = ""


class DatabaseChange(BaseModel):
    database: str
    tables: list[TableChange]
    unshown: str = ""


class DiffView(BaseModel):
    """What changed from node a to node b. same: whether the states have one digest, or are one.

    files, sessions, databases: None where the driver cannot tell; unshown says why, and what was left out.
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


def differing_paths(one: StateView, other: StateView) -> list[str] | None:
    """Return the paths whose entries differ, sorted; None where either has too many to tell."""
    if one.files is None or other.files is None:
        return None
    return sorted(path for path in one.files.keys() | other.files if one.files.get(path) != other.files.get(path))


def file_changes(
    paths: Iterable[str], before: Mapping[str, FileEntry], after: Mapping[str, FileEntry]
) -> list[FileChange]:
    """Return the changes of these paths; those that are in neither state are none."""
    found, shown = [], 0
    for path in paths:
        one, other = before[path], after[path]
        if one.kind == "gone" and other.kind == "gone":
            continue
        change = file_change(path, one, other, texts=shown < _TEXTS_SHOWN)
        shown += change.diff is not None
        found.append(change)
    return found


def file_change(path: str, one: FileEntry, other: FileEntry, *, texts: bool = True) -> FileChange:
    """Return what changed at one path."""
    change: Literal["added", "removed", "changed"] = "changed"
    if one.kind == "gone" or other.kind == "gone":
        change = "added" if one.kind == "gone" else "removed"
    made = FileChange(path=_shown(path), change=change, before=_facts(one), after=_facts(other))
    sides = [entry for entry in (one, other) if entry.kind == "file"]
    if not sides or (len(sides) == 2 and one.content is not None and one.content == other.content):
        return made
    if not texts:
        return made.model_copy(update={"unshown": f"only {_TEXTS_SHOWN} files are shown line by line"})
    if any(side.content is None for side in sides):
        return made.model_copy(update={"unshown": _LINES[False]})
    texts_told = [_text(side.content or b"") for side in (one, other)]
    if None in texts_told:
        return made.model_copy(update={"unshown": _LINES[True]})
    lines = [(text or "").splitlines(keepends=True) for text in texts_told]
    if max(map(len, lines)) > _DIFF_LINES:
        return made.model_copy(update={"unshown": f"more than {_DIFF_LINES} lines"})
    told = "".join(_with_end(line) for line in difflib.unified_diff(lines[0], lines[1], f"a{path}", f"b{path}"))
    if len(told) > _DIFF_CHARS:
        told = told[:_DIFF_CHARS] + "\n[…]\n"
    return made.model_copy(update={"diff": _shown(told)})


def _with_end(line: str) -> str:
    return line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"


def _text(content: bytes) -> str | None:
    if b"\0" in content:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def _facts(entry: FileEntry) -> FileFacts | None:
    if entry.kind == "gone":
        return None
    target = None if entry.target is None else _shown(entry.target)
    mode = f"{stat.S_IMODE(entry.mode):04o}"
    return FileFacts(
        kind=entry.kind, mode=mode, uid=entry.uid, gid=entry.gid, size_bytes=entry.size_bytes, target=target
    )


def _shown(text: str) -> str:
    """Return text that is fit for JSON: a path may hold bytes that are no UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def session_changes(one: StateView, other: StateView) -> list[SessionChange]:
    """Return the sessions that differ; one in which nothing has happened is a fresh one."""
    found = []
    fresh = one.fresh or other.fresh or SessionView("")
    for name in sorted(one.sessions.keys() | other.sessions):
        before, after = one.sessions.get(name, fresh), other.sessions.get(name, fresh)
        if before == after:
            continue
        cwd = None if before.cwd == after.cwd else Changed(name="cwd", before=before.cwd, after=after.cwd)
        found.append(
            SessionChange(
                session=name,
                cwd=cwd,
                variables=_changed(before.variables, after.variables),
                functions=_changed(before.functions, after.functions),
            )
        )
    return found


def _changed(one: Mapping[str, str], other: Mapping[str, str]) -> list[Changed]:
    return [
        Changed(name=name, before=_cut(one.get(name)), after=_cut(other.get(name)))
        for name in sorted(one.keys() | other)
        if one.get(name) != other.get(name)
    ]


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= CONTENT_BYTES else text[:CONTENT_BYTES] + " […]"


def table_change(
    table: str, schemas: tuple[str | None, str | None], answers: tuple[dict[str, Any] | None, dict[str, Any] | None]
) -> TableChange | None:
    """Return how a table differs, from its definitions and the answers to `SELECT *`; None where it does not."""
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
    unshown = "too large to be compared row by row" if cut else f"only {ROWS_SHOWN} rows are shown" if many else ""
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
