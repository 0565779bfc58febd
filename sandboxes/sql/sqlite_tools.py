"""The tools of the sql endpoint on one SQLite connection: what each runs, and its result."""

import sqlite3
import time
from dataclasses import dataclass, field
from typing import Any

from sandboxes.sql import results
from sandboxes.sql.compare import hashable
from sandboxes.sql.results import Failure, RowCollector
from sandboxes.sql.sqlite_authorizer import Act
from sandboxes.sql.sqlite_connection import SqliteConnection, SqliteOutcome, StatementGuard, statements, value_rows

READING = frozenset({"explain", "compare", "tables", "schema"})
"""Tools that never change anything, whatever their arguments."""

_TABLES = """SELECT name, type FROM {} WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"""
_SCHEMA = (
    """SELECT name, type, tbl_name, sql FROM {} WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"""
)


@dataclass(slots=True)
class ToolRun:
    """The outcome of one tool call."""

    body: bytes
    acts: set[Act] = field(default_factory=set)  # What the call's statements needed the authorizer for.
    failure: Failure | None = None  # The error in the result; None on success.
    reads_counters: bool = False  # A statement reads counters that earlier statements left in the connection.
    needs_private: bool = False  # The call was stopped because it needs a private connection.


@dataclass(frozen=True, slots=True)
class Tools:
    """Runs tools on a connection."""

    connection: SqliteConnection
    private: bool  # The connection belongs to one rollout and may be written to.
    output_bytes: int  # Limit of a result's rows.

    def run(self, tool: str, arguments: dict[str, Any]) -> ToolRun:
        """Run one tool. Raises MemoryError if the query needed more memory than its limit."""
        deadline = time.monotonic() + arguments["timeout_s"]
        if tool in READING:
            return self._read_only(tool, arguments, deadline)
        with self.connection.within(deadline, private=self.private) as guard:
            if tool == "script":
                return self._script(arguments, guard)
            rows = RowCollector(arguments["max_rows"], self.output_bytes)
            outcome = self.connection.run(arguments["sql"], arguments["params"], rows)
            return self._tool_run(outcome, arguments, guard)

    def _read_only(self, tool: str, arguments: dict[str, Any], deadline: float) -> ToolRun:
        raw = self.connection.raw
        if not self.private:
            return self._read(tool, arguments, deadline)
        # The engine itself then refuses every change, whatever the statement is.
        was_on = raw.execute("PRAGMA query_only").fetchone()[0]
        raw.execute("PRAGMA query_only=1")
        try:
            return self._read(tool, arguments, deadline)
        finally:
            raw.execute(f"PRAGMA query_only={was_on}")

    def _read(self, tool: str, arguments: dict[str, Any], deadline: float) -> ToolRun:
        if tool == "explain":
            with self.connection.within(deadline, private=False, compiling=True) as guard:
                rows = RowCollector(results.MAX_ROWS, self.output_bytes)
                outcome = self.connection.run("EXPLAIN QUERY PLAN " + arguments["sql"], arguments["params"], rows)
                return self._tool_run(outcome, arguments, guard)
        if tool == "compare":
            return self._compare(arguments, deadline)
        return self._catalogue(tool, arguments.get("table"))

    def _tool_run(self, outcome: SqliteOutcome, arguments: dict[str, Any], guard: StatementGuard) -> ToolRun:
        shape = arguments.get("format", "json")
        if outcome.error is not None:
            body = results.failure(outcome.error, shape=shape, sql=arguments["sql"])
        else:
            body = results.success(outcome.columns, outcome.rows, shape=shape, changed=outcome.changed)
        return ToolRun(
            body, set(guard.acts), outcome.error, guard.reads_counters, guard.needs_private or _read_only(outcome)
        )

    def _script(self, arguments: dict[str, Any], guard: StatementGuard) -> ToolRun:
        """Run a script up to its first failure. The result is that of its last statement with result columns."""
        before, last = self.connection.raw.total_changes, SqliteOutcome()
        for number, statement in enumerate(statements(arguments["sql"]), 1):
            rows = RowCollector(results.MAX_ROWS, self.output_bytes)
            outcome = self.connection.run(statement, None, rows)
            if outcome.error is not None:
                error = outcome.error
                outcome.error = Failure(f"statement {number}: {error.message}", error.kind, error.code)
                return self._tool_run(outcome, arguments, guard)
            if outcome.columns:
                last = outcome
        if not last.columns:
            last.changed = self.connection.raw.total_changes - before
        return self._tool_run(last, arguments, guard)

    def _compare(self, arguments: dict[str, Any], deadline: float) -> ToolRun:
        outcomes: dict[str, SqliteOutcome] = {}
        acts, reads_counters = set[Act](), False
        for name in ("sql", "gold"):
            with self.connection.within(deadline, private=False) as guard:
                outcome = self.connection.run(arguments[name], None, RowCollector(results.MAX_ROWS, results.MAX_ROWS))
                if guard.needs_private or _read_only(outcome):
                    outcome.error = Failure("it would change the database; only what reads can be compared", "refused")
            outcomes[name] = outcome
            acts |= guard.acts
            reads_counters |= guard.reads_counters
        rows = {name: [hashable(row) for row in outcome.rows.rows] for name, outcome in outcomes.items()}
        errors = {name: outcome.error for name, outcome in outcomes.items()}
        failure = next((error for error in errors.values() if error is not None), None)
        return ToolRun(results.comparison(rows, errors, ordered=arguments["ordered"]), acts, failure, reads_counters)

    def _catalogue(self, tool: str, table: str | None) -> ToolRun:
        raw = self.connection.raw
        try:
            if tool == "tables":
                sql = f"{_TABLES.format('sqlite_schema')} UNION {_TABLES.format('sqlite_temp_schema')} ORDER BY 1"
                return ToolRun(results.success(["name", "type"], self._all(raw.execute(sql))))
            sql = f"SELECT name, type, sql FROM ({_SCHEMA.format('sqlite_schema')} UNION ALL "
            sql += f"{_SCHEMA.format('sqlite_temp_schema')}) WHERE ?1 IS NULL OR tbl_name = ?1 COLLATE NOCASE"
            rows = self._all(raw.execute(sql, (table,)))
        except sqlite3.Error as error:
            failure = Failure(str(error), "sql", getattr(error, "sqlite_errorname", None))
            return ToolRun(results.failure(failure), failure=failure)
        if table is not None and not rows.rows and not rows.truncated:
            failure = Failure(f"no such table: {table}", "sql", "SQLITE_ERROR")
            return ToolRun(results.failure(failure), failure=failure)
        return ToolRun(results.success(["name", "type", "sql"], rows))

    def _all(self, cursor: sqlite3.Cursor) -> RowCollector:
        return RowCollector(results.MAX_ROWS, self.output_bytes).add_all(value_rows(cursor))


def _read_only(outcome: SqliteOutcome) -> bool:
    return outcome.error is not None and str(outcome.error.code).startswith("SQLITE_READONLY")
