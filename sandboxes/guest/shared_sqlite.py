"""SQLite on a file of a sandbox that a shell shares: one connection for each call, in a process of the sandbox.

It runs with the rights of the agent's own processes, in a child of pid 1, which loads nothing but the standard library.
What a call changed is seen as any change of files is.
"""

import sqlite3
from pathlib import Path
from typing import Any

from sandboxes.ipc.messages import SqlOutcome
from sandboxes.sql.results import Failure, failure, other
from sandboxes.sql.sqlite_authorizer import Act
from sandboxes.sql.sqlite_connection import SqliteConnection
from sandboxes.sql.sqlite_tools import READING, ToolRun, Tools
from sandboxes.sql.sqlite_volatile import VolatileInputs

ALONE = (
    "this database is shared with the shell, and each call has a connection of its own: there is no transaction, no "
    "temporary table and no setting from one call to the next. Send statements that belong together as one `script`."
)


def perform(fields: dict[str, Any]) -> tuple[SqlOutcome, bytes]:
    """Run a tool on the database at `path`; return what is to be known of the statement, and its answer."""
    inputs = VolatileInputs()
    inputs.begin(fields["frozen_ms"], bytes.fromhex(fields["seed"]))
    told = _run(fields, inputs, writing=False)
    if told is None or (told.needs_private and fields["tool"] not in READING):
        told = _run(fields, inputs, writing=True)
    assert told is not None
    timed_out = told.failure is not None and told.failure.kind == "timeout"
    return SqlOutcome(timed_out, volatile=inputs.used), told.body


def _run(fields: dict[str, Any], inputs: VolatileInputs, *, writing: bool) -> ToolRun | None:
    """Return what a tool did; None where the file cannot be read without writing: it is not there, or needs mending."""
    path, tool, arguments = Path(fields["path"]), fields["tool"], fields["arguments"]
    try:
        connection = SqliteConnection(f"{path.as_uri()}?mode={'rwc' if writing else 'ro'}", inputs)
        raw = connection.raw
        raw.execute("PRAGMA synchronous=FULL")
        raw.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.Error as error:
        return _failed(fields, Failure(f"{path}: {error}")) if writing else None
    try:
        tools = Tools(connection, private=writing, output_bytes=fields["output_bytes"])
        if tool == "script" and writing:
            raw.execute("BEGIN IMMEDIATE")
        told = tools.run(tool, arguments)
        if tool == "script" and writing and raw.in_transaction:
            raw.execute("ROLLBACK" if told.failure is not None else "COMMIT")
        elif writing and (connection.has_session() or Act.SETTING in told.acts):
            told = _failed(fields, Failure(ALONE, "refused"))
    except sqlite3.Error as error:
        return _failed(fields, Failure(str(error)))
    else:
        return told
    finally:
        if raw.in_transaction:
            raw.rollback()
        connection.close()


def _failed(fields: dict[str, Any], error: Failure) -> ToolRun:
    if fields["tool"] == "compare":
        body = other({"match": False, "why": error.message, "error": error.to_json()})
    else:
        body = failure(error, shape=fields["arguments"].get("format", "json"), sql=fields["arguments"].get("sql", ""))
    return ToolRun(body, failure=error)
