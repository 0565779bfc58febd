"""SQLite on a database file that the shell can use too: one connection for each call, in a child of the supervisor."""

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
    # With a frozen time, `datetime('now')` and `random()` follow from these values, so that a replay of the statement
    # gives the same rows.
    inputs.begin(fields["frozen_ms"], bytes.fromhex(fields["seed"]))
    # Opened read-only first: a mere SELECT on a writable connection may create `-wal` and `-shm` files, which would
    # count as effects.
    ran = _run(fields, inputs, writing=False)
    if ran is None or (ran.needs_private and fields["tool"] not in READING):
        ran = _run(fields, inputs, writing=True)
    assert ran is not None
    timed_out = ran.failure is not None and ran.failure.kind == "timeout"
    return SqlOutcome(timed_out, volatile=inputs.used), ran.body


def _run(fields: dict[str, Any], inputs: VolatileInputs, *, writing: bool) -> ToolRun | None:
    """Return what a tool did; None if the file is missing or needs recovery, and so must be opened for writing."""
    path, tool, arguments = Path(fields["path"]), fields["tool"], fields["arguments"]
    try:
        connection = SqliteConnection(f"{path.as_uri()}?mode={'rwc' if writing else 'ro'}", inputs)
        raw = connection.raw
        # A snapshot may follow at once. The default of the library depends on how it was built
        # (sqlite.org/pragma.html).
        raw.execute("PRAGMA synchronous=FULL")
        # SQLite opens a file lazily. This read shows a missing file, a hot journal or no database at all before the
        # tool runs.
        raw.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.Error as error:
        return _failed(fields, Failure(f"{path}: {error}")) if writing else None
    try:
        tools = Tools(connection, private=writing, output_bytes=fields["output_bytes"])
        if tool == "script" and writing:
            # The write lock is taken at once: a script fails at its beginning if the shell holds the database, not
            # halfway.
            raw.execute("BEGIN IMMEDIATE")
        ran = tools.run(tool, arguments)
        if tool == "script" and writing and raw.in_transaction:
            raw.execute("ROLLBACK" if ran.failure is not None else "COMMIT")
        # The connection closes after this call, so a transaction or setting that the client wants to keep would
        # silently be lost.
        elif writing and (connection.has_session() or Act.SETTING in ran.acts):
            ran = _failed(fields, Failure(ALONE, "refused"))
    except sqlite3.Error as error:
        return _failed(fields, Failure(str(error)))
    else:
        return ran
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
