"""Two states beside each other, each in a throw-away fork: asked what they hold, then compared (`differences`)."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from proxy.control.scratch_forks import ScratchForks, sql_call
from proxy.control.views.diff import (
    CONTENT_BYTES,
    FILES_SHOWN,
    DatabaseChange,
    DiffView,
    TableChange,
    differing_paths,
    file_changes,
    session_changes,
    table_change,
)
from proxy.tree.tree import Node, Tree
from sandboxes.driver import Sandbox
from sandboxes.inspection import FileEntry, InspectableSandbox
from sandboxes.spec import EnvironmentSpec

_TABLES_SHOWN = 200
_ROWS_COMPARED = 2_000
_APART = ("index ", "trigger ")
_AT_ONCE = 50
"""Files whose contents are asked for in one request."""


async def diff(visits: ScratchForks, task: str, tree: Tree, a: Node, b: Node) -> DiffView:
    """Say what changed from a to b.

    Raises:
        Refused, StateLost, SandboxError, SpecError, Overloaded: a state cannot be looked at (`ScratchForks.at`).
    """
    view = DiffView(task=task, a=f"n{a.id}", b=f"n{b.id}", same=_same(a, b))
    if a is b:
        return view.model_copy(update={"files": [], "sessions": [], "databases": []})
    async with visits.at(tree, a) as one, visits.at(tree, b) as other:
        await _files(view, one, other, tree.spec.driver)
        if tree.spec.databases:
            view.databases = [
                change for name in tree.spec.databases if (change := await _database(tree.spec, name, one, other))
            ]
        else:
            view.databases = []
    return view


def _same(a: Node, b: Node) -> bool:
    return a is b or (a.state is not None and a.state == b.state)


async def _files(view: DiffView, one: Sandbox, other: Sandbox, driver: str) -> None:
    if not (isinstance(one, InspectableSandbox) and isinstance(other, InspectableSandbox)):
        view.unshown.append(f"sandboxes of driver {driver!r} have no files or shell sessions to compare")
        return
    views = await one.inspect(), await other.inspect()
    view.sessions = session_changes(*views)
    paths = differing_paths(*views)
    if paths is None:
        view.unshown.append("files: too much differs from the task's root state to be compared")
        return
    if len(paths) > FILES_SHOWN:
        view.unshown.append(f"files: the first {FILES_SHOWN} of {len(paths)} paths that differ")
    view.files_total = len(paths)
    shown = paths[:FILES_SHOWN]
    before, after = await _entries(one, shown), await _entries(other, shown)
    # Lines of hostile files may take a while to compare.
    view.files = await asyncio.to_thread(file_changes, shown, before, after)


async def _entries(sandbox: InspectableSandbox, paths: Sequence[str]) -> Mapping[str, FileEntry]:
    found: dict[str, FileEntry] = {}
    for at in range(0, len(paths), _AT_ONCE):
        found |= await sandbox.entries(paths[at : at + _AT_ONCE], content_bytes=CONTENT_BYTES)
    return found


async def _database(spec: EnvironmentSpec, name: str, one: Sandbox, other: Sandbox) -> DatabaseChange | None:
    schemas = [await _schema(spec, name, sandbox) for sandbox in (one, other)]
    tables = sorted(schemas[0].keys() | schemas[1])
    found: list[TableChange] = []
    for table in tables[:_TABLES_SHOWN]:
        sides = [
            await _rows(spec, name, table, sandbox) if table in schema and not table.startswith(_APART) else None
            for sandbox, schema in zip((one, other), schemas, strict=True)
        ]
        change = table_change(table, (schemas[0].get(table), schemas[1].get(table)), (sides[0], sides[1]))
        if change is not None:
            found.append(change)
    unshown = f"only the first {_TABLES_SHOWN} of {len(tables)} tables" if len(tables) > _TABLES_SHOWN else ""
    return DatabaseChange(database=name, tables=found, unshown=unshown) if found or unshown else None


async def _schema(spec: EnvironmentSpec, name: str, sandbox: Sandbox) -> dict[str, str]:
    """Return each table or view with its definition; indexes and triggers belong to none and stand by themselves."""
    told = await _ask(spec, sandbox, "schema", database=name)
    found: dict[str, list[str]] = {}
    for row in told["rows"]:
        # sqlite: name, type, sql. postgres: schema, table, column and what is said of it.
        lite = told["columns"][:2] == ["name", "type"]
        of = f"{row[0]}.{row[1]}" if not lite else row[0] if row[1] in ("table", "view") else f"{row[1]} {row[0]}"
        found.setdefault(of, []).append(" ".join("" if part is None else str(part) for part in row[2:]))
    return {table: "\n".join(lines) for table, lines in found.items()}


async def _rows(spec: EnvironmentSpec, name: str, table: str, sandbox: Sandbox) -> dict[str, Any]:
    parts = table.split(".", 1) if spec.driver == "postgres" else [table]
    quoted = ".".join('"' + part.replace('"', '""') + '"' for part in parts)
    return await _ask(spec, sandbox, "query", database=name, sql=f"SELECT * FROM {quoted}", max_rows=_ROWS_COMPARED)


async def _ask(spec: EnvironmentSpec, sandbox: Sandbox, tool: str, **members: object) -> dict[str, Any]:
    execution = await sandbox.execute(sql_call(spec, tool, **members))
    told: dict[str, Any] = orjson.loads(execution.result.body)
    return told
