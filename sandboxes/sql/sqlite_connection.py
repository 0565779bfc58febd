"""A guarded and limited connection to a SQLite database, which reports what its statements did."""

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sandboxes.sql.results import Failure, RowCollector
from sandboxes.sql.sqlite_authorizer import COUNTERS, STATISTICS, Act, act_of, refusal
from sandboxes.sql.sqlite_volatile import MAX_BLOB, VolatileInputs
from sandboxes.sql.values import Value, decode, encode, encode_text

_LIMITS = {
    # One operation on a very large value runs for seconds and cannot be interrupted, so values must stay small.
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_BLOB,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4 << 20,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    # VACUUM attaches one database itself.
    sqlite3.SQLITE_LIMIT_ATTACHED: 3,
}
_CHECK_EVERY = 2000
"""Virtual machine instructions between two checks of the deadline."""
_PIECE = re.compile(
    r"""'(?:[^']|'')*(?:'|\Z)|"(?:[^"]|"")*(?:"|\Z)|`(?:[^`]|``)*(?:`|\Z)|\[[^\]]*(?:\]|\Z)"""
    r"""|--[^\n]*|/\*.*?(?:\*/|\Z)|;""",
    re.DOTALL,
)
"""Matches a literal, a quoted name, a comment or a semicolon, so that only semicolons between them are found. One that
is not closed ends with the statement: each opening character is looked at once, so the time is linear."""


class StatementGuard:
    """The authorizer of one connection: records what a statement does, and denies what it must not do."""

    def __init__(self, inputs: VolatileInputs) -> None:
        self._inputs = inputs
        # `plans_by_old_statistics`: a statement has changed rows of `sqlite_stat1`. This connection goes on to plan by
        # what it read before, and a new connection would not.
        self._on = self.plans_by_old_statistics = False
        self.begin(private=False)

    def begin(self, *, private: bool, compiling: bool = False) -> None:
        """Start to guard a statement, and forget the one before."""
        # private: the connection belongs to one rollout, so a statement may change it. compiling: the statement is only
        # compiled (EXPLAIN); a pragma takes effect even then.

        # `refused` says why the statement is never allowed; empty if it is.
        self.private, self.compiling, self.refused = private, compiling, ""
        self.acts: set[Act] = set()  # What the statement needed the authorizer for.
        # The statement reads what earlier statements of the connection left, such as `changes()`.
        self.reads_counters = False
        self._on = True

    def end(self) -> None:
        """Stop guarding: the driver's own statements follow, and are not restricted."""
        self._on = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let a statement of the driver run between those of a block."""
        on, self._on = self._on, False
        try:
            yield
        finally:
            self._on = on

    @property
    def needs_private(self) -> bool:
        """Whether the statement was denied because it needs a private connection."""
        return not self.private and not self.compiling and bool(self.acts & {Act.PRIVATE, Act.SETTING})

    def __call__(
        self, action: int, first: str | None, second: str | None, _database: str | None, _within: str | None
    ) -> int:
        """Answer one request of SQLite's authorizer."""
        if not self._on:
            return sqlite3.SQLITE_OK
        act = act_of(action, first, second)
        self.acts.add(act)
        if act is Act.ROWS and str(first).lower().startswith(STATISTICS):
            self.plans_by_old_statistics = True
        if action == sqlite3.SQLITE_FUNCTION:
            function = str(second).lower()
            self._inputs.named(function)
            self.reads_counters |= function in COUNTERS
        if act is Act.REFUSED or (self.compiling and act is Act.SETTING):
            self.refused = refusal(action, first, second)
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_DENY if self.needs_private else sqlite3.SQLITE_OK


@dataclass(slots=True)
class SqliteOutcome:
    """The outcome of a statement."""

    columns: list[str] = field(default_factory=list)  # Empty if the statement returns no rows.
    rows: RowCollector = field(default_factory=lambda: RowCollector(0, 0))  # Up to their limits.
    changed: int | None = None  # Rows that a statement without columns changed; None if it has columns.
    error: Failure | None = None


class SqliteConnection:
    """A `sqlite3.Connection` with its guard, its limits, and the clock and random numbers of its worker."""

    def __init__(self, path: str, inputs: VolatileInputs) -> None:
        """Open a database, by a URI filename (sqlite.org/uri.html), which also says whether it may be written."""
        self.guard = StatementGuard(inputs)
        # A cached statement is not compiled again, so the authorizer would not see it.
        self.raw = sqlite3.connect(path, uri=True, isolation_level=None, cached_statements=0)
        self.raw.text_factory = encode_text
        for limit, value in _LIMITS.items():
            self.raw.setlimit(limit, value)
        self.guard.end()
        self.raw.set_authorizer(self.guard)
        inputs.attach(self.raw)
        # A fork does not survive the proxy, so it need not survive a power failure.
        self.raw.execute("PRAGMA synchronous=OFF")
        # A checkpoint would write the log into the database file, which other forks share.
        self.raw.execute("PRAGMA wal_autocheckpoint=0").fetchall()

    def close(self) -> None:
        """Close the connection."""
        self.raw.close()

    @contextmanager
    def within(self, deadline: float, *, private: bool, compiling: bool = False) -> Iterator[StatementGuard]:
        """Guard the statements of a block (`StatementGuard.begin`), and interrupt them at a monotonic deadline."""
        self.raw.set_progress_handler(lambda: time.monotonic() > deadline, _CHECK_EVERY)
        self.guard.begin(private=private, compiling=compiling)
        try:
            yield self.guard
        finally:
            self.guard.end()
            self.raw.set_progress_handler(None, 0)

    def run(self, sql: str, params: Any, rows: RowCollector) -> SqliteOutcome:
        """Run one statement in a block of `within`; `rows` receives its rows. A failure is an outcome, no exception."""
        outcome = SqliteOutcome(rows=rows)
        before = self.raw.total_changes
        try:
            cursor = self.raw.execute(sql, _parameters(params))
            outcome.columns = [column[0] for column in cursor.description or ()]
            for row in cursor:
                # A statement that changes rows and returns them (RETURNING) is complete only after its last row.
                if not rows.add(list(map(encode, row))) and Act.ROWS not in self.guard.acts:
                    break
            cursor.close()
            outcome.changed = None if outcome.columns else self._changes_since(before)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            outcome.error = self._failure(error)
            outcome.columns = []
        return outcome

    def _changes_since(self, total: int) -> int:
        """Return the rows that the last statement changed, if `total_changes` was `total` before it."""
        # `Cursor.rowcount` counts those of statements that begin with INSERT, UPDATE, DELETE or REPLACE only. A
        # statement that changes no rows leaves `changes()` as it was.
        if self.raw.total_changes == total:
            return 0
        with self.guard.off():
            changes: int = self.raw.execute("SELECT changes()").fetchone()[0]
        return changes

    def _failure(self, error: Exception) -> Failure:
        code = getattr(error, "sqlite_errorname", None)
        if self.guard.refused:
            return Failure(self.guard.refused, "refused")
        if code == "SQLITE_INTERRUPT":
            return Failure("the statement took longer than timeout_s and was stopped", "timeout")
        if code in ("SQLITE_TOOBIG", "SQLITE_FULL") or str(code).startswith("SQLITE_IOERR"):
            return Failure(str(error), "limit", code)
        return Failure(str(error), "sql", code)

    def has_session(self) -> bool:
        """Return whether the connection holds session state."""
        # That is a transaction, temporary objects, attached databases, or plans that no new connection would make.
        if self.raw.in_transaction or self.guard.plans_by_old_statistics:
            return True
        databases = [row[1] for row in self.raw.execute("PRAGMA database_list")]
        if set(databases) - {"main", "temp"}:
            return True
        # The end of any statement that reads a table outside of a transaction switches this setting off. The agent's
        # own statements do that too, but this one must not.
        deferred = self.raw.execute("PRAGMA defer_foreign_keys").fetchone()[0]
        temporary = bool(self.raw.execute("SELECT count(*) FROM sqlite_temp_schema").fetchone()[0])
        if deferred:
            self.raw.execute("PRAGMA defer_foreign_keys=1")
        return temporary


def statements(script: str) -> Iterator[str]:
    """Yield the statements of a script, each with its semicolon. A trigger's body is part of its statement."""
    start = 0
    for piece in _PIECE.finditer(script):
        if piece[0] == ";" and sqlite3.complete_statement(script[start : piece.end()]):
            yield script[start : piece.end()]
            start = piece.end()
    if script[start:].strip():
        yield script[start:]


def _parameters(params: Any) -> Any:
    if isinstance(params, dict):
        return {name: decode(value) for name, value in params.items()}
    return [decode(value) for value in params or ()]


def value_rows(cursor: sqlite3.Cursor) -> Iterator[list[Value]]:
    """Yield the rows of one of the driver's own statements as rows of a result."""
    for row in cursor:
        yield list(map(encode, row))
