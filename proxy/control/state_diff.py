"""The difference between two states: each is inspected in a scratch fork, then `views.diff` compares them."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from proxy.control.scratch_forks import ScratchForks, sql_call
from proxy.control.views import diff as views
from proxy.tree.tree import Node, Tree
from sandboxes.driver import Sandbox
from sandboxes.inspection import FileEntry, InspectableSandbox
from sandboxes.spec import EnvironmentSpec

_TABLES_SHOWN = 200
"""Tables of a database that are compared."""
_ROWS_COMPARED = 2_000
"""Largest table that is compared row by row, in rows: the rows of both states are held in memory."""
_WITHOUT_ROWS = ("index ", "trigger ")
"""Prefixes of schema objects that have a definition and no rows."""
_FILES_PER_REQUEST = 50
"""Files whose contents are read in one request: at most 3 MiB."""


async def diff(forks: ScratchForks, task: str, tree: Tree, a: Node, b: Node) -> views.DiffView:
    """Return what changed from node a to node b of the same tree. Errors as for `ScratchForks.at`."""
    same = a is b or (a.state is not None and a.state == b.state)
    view = views.DiffView(task=task, a=f"n{a.id}", b=f"n{b.id}", same=same)
    if a is b:
        return view.model_copy(update={"files": [], "sessions": [], "databases": []})
    async with forks.at(tree, a) as before, forks.at(tree, b) as after:
        await _files(view, before, after, tree.spec.driver)
        view.databases = [
            change for name in tree.spec.databases if (change := await _database(tree.spec, name, before, after))
        ]
    return view


async def _files(view: views.DiffView, before: Sandbox, after: Sandbox, driver: str) -> None:
    if not (isinstance(before, InspectableSandbox) and isinstance(after, InspectableSandbox)):
        view.unshown.append(f"files and sessions: driver {driver!r} cannot compare them")
        return
    states = await before.inspect(), await after.inspect()
    view.sessions = views.session_changes(*states)
    paths = views.differing_paths(*states)
    if paths is None:
        view.unshown.append("files: too many paths differ from the task's root state")
        return
    if len(paths) > views.FILES_SHOWN:
        view.unshown.append(f"files: the first {views.FILES_SHOWN} of {len(paths)} paths that differ")
    view.files_total = len(paths)
    shown = paths[: views.FILES_SHOWN]
    entries = await _entries(before, shown), await _entries(after, shown)
    # Comparing the lines of hostile files may take seconds.
    view.files = await asyncio.to_thread(views.file_changes, shown, *entries)


async def _entries(sandbox: InspectableSandbox, paths: Sequence[str]) -> Mapping[str, FileEntry]:
    entries: dict[str, FileEntry] = {}
    for start in range(0, len(paths), _FILES_PER_REQUEST):
        entries |= await sandbox.entries(paths[start : start + _FILES_PER_REQUEST], content_bytes=views.CONTENT_BYTES)
    return entries


async def _database(spec: EnvironmentSpec, name: str, before: Sandbox, after: Sandbox) -> views.DatabaseChange | None:
    schemas = [await _schema(spec, name, sandbox) for sandbox in (before, after)]
    tables = sorted(schemas[0].keys() | schemas[1])
    changes: list[views.TableChange] = []
    for table in tables[:_TABLES_SHOWN]:
        sides = [
            await _rows(spec, name, table, sandbox) if table in schema and not table.startswith(_WITHOUT_ROWS) else None
            for sandbox, schema in zip((before, after), schemas, strict=True)
        ]
        change = views.table_change(table, (schemas[0].get(table), schemas[1].get(table)), (sides[0], sides[1]))
        if change is not None:
            changes.append(change)
    unshown = f"only the first {_TABLES_SHOWN} of {len(tables)} tables" if len(tables) > _TABLES_SHOWN else ""
    return views.DatabaseChange(database=name, tables=changes, unshown=unshown) if changes or unshown else None


async def _schema(spec: EnvironmentSpec, name: str, sandbox: Sandbox) -> dict[str, str]:
    """Return the definition of each table and view, by name; indexes and triggers have entries of their own."""
    result = await _call(spec, sandbox, "schema", database=name)
    # SQLite's rows are (name, type, sql). PostgreSQL's are (schema, table, column and its properties).
    is_sqlite = result["columns"][:2] == ["name", "type"]
    definitions: dict[str, list[str]] = {}
    for row in result["rows"]:
        if not is_sqlite:
            key = f"{row[0]}.{row[1]}"
        elif row[1] in ("table", "view"):
            key = row[0]
        else:
            key = f"{row[1]} {row[0]}"
        definitions.setdefault(key, []).append(" ".join("" if part is None else str(part) for part in row[2:]))
    return {key: "\n".join(lines) for key, lines in definitions.items()}


async def _rows(spec: EnvironmentSpec, name: str, table: str, sandbox: Sandbox) -> dict[str, Any]:
    parts = table.split(".", 1) if spec.driver == "postgres" else [table]
    quoted = ".".join('"' + part.replace('"', '""') + '"' for part in parts)
    return await _call(spec, sandbox, "query", database=name, sql=f"SELECT * FROM {quoted}", max_rows=_ROWS_COMPARED)


async def _call(spec: EnvironmentSpec, sandbox: Sandbox, tool: str, **fields: object) -> dict[str, Any]:
    execution = await sandbox.execute(sql_call(spec, tool, **fields))
    result: dict[str, Any] = orjson.loads(execution.result.body)
    return result
