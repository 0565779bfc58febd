"""One connection to a SQLite database: guarded, limited, and able to say what a statement was about."""

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sandboxes.sql.results import Failure, RowCollector
from sandboxes.sql.sqlite_authorizer import COUNTERS, Act, act_of, refusal
from sandboxes.sql.sqlite_volatile import MAX_BLOB, VolatileInputs
from sandboxes.sql.values import Value, decode, encode, encode_text

_LIMITS = {
    # One operation on large values runs on for seconds, and cannot be interrupted: so there are none.
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_BLOB,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4 << 20,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1000,
    # VACUUM needs one.
    sqlite3.SQLITE_LIMIT_ATTACHED: 3,
}
_CHECK_EVERY = 2000
"""Operations of the engine between two looks at the time: some 20 us."""
_PIECE = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|\Z)|;""", re.DOTALL
)


class StatementGuard:
    """The authorizer of one connection: records what a statement does, and denies what it must not do.

    Attributes:
        private: The connection belongs to one rollout, so a statement may change it.
        compiling: The statement is only compiled (EXPLAIN). A pragma takes effect even then.
        acts: What the statement asked the authorizer for, since `begin`.
        reads_counters: The statement reads what earlier statements of the connection left, such as `changes()`.
        refused: Why the statement is never allowed; empty if it is.
    """

    def __init__(self, inputs: VolatileInputs) -> None:
        self._inputs = inputs
        self._on = False
        self.begin(private=False)

    def begin(self, *, private: bool, compiling: bool = False) -> None:
        self.private, self.compiling, self.refused = private, compiling, ""
        self.acts: set[Act] = set()
        self.reads_counters = False
        self._on = True

    def end(self) -> None:
        """Let our own statements do what they like."""
        self._on = False

    @property
    def needs_private(self) -> bool:
        """Whether the statement was stopped because it needs a connection of the rollout's own."""
        return not self.private and not self.compiling and bool(self.acts & {Act.PRIVATE, Act.SETTING})

    def __call__(
        self, action: int, first: str | None, second: str | None, _database: str | None, _within: str | None
    ) -> int:
        if not self._on:
            return sqlite3.SQLITE_OK
        act = act_of(action, first, second)
        self.acts.add(act)
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
    """What came of a statement. changed: rows that one without result columns changed, None where it has some."""

    columns: list[str] = field(default_factory=list)
    rows: RowCollector = field(default_factory=lambda: RowCollector(0, 0))
    changed: int | None = None
    error: Failure | None = None


class SqliteConnection:
    """A `sqlite3.Connection` with everything around it. readonly: shared by rollouts, and nothing can be written."""

    def __init__(self, path: str, inputs: VolatileInputs, *, readonly: bool) -> None:
        self.readonly = readonly
        self.inputs = inputs
        self.guard = StatementGuard(inputs)
        # No cached statements: the authorizer is asked when one is compiled.
        self.raw = sqlite3.connect(path, uri=True, isolation_level=None, cached_statements=0)
        self.raw.text_factory = encode_text
        for limit, value in _LIMITS.items():
            self.raw.setlimit(limit, value)
        self.guard.end()
        self.raw.set_authorizer(self.guard)
        inputs.attach(self.raw)
        self.raw.execute("PRAGMA synchronous=OFF")
        self.raw.execute("PRAGMA wal_autocheckpoint=0").fetchall()

    def close(self) -> None:
        self.raw.close()

    @contextmanager
    def within(self, deadline: float, *, private: bool, compiling: bool = False) -> Iterator[StatementGuard]:
        """Guard what runs in the block, and end it at deadline (`time.monotonic`)."""
        self.raw.set_progress_handler(lambda: time.monotonic() > deadline, _CHECK_EVERY)
        self.guard.begin(private=private, compiling=compiling)
        try:
            yield self.guard
        finally:
            self.guard.end()
            self.raw.set_progress_handler(None, 0)

    def run(self, sql: str, params: Any, rows: RowCollector) -> SqliteOutcome:
        """Run one statement, within `within`. Its rows go to rows, up to their limits; a failure is an outcome.

        Raises:
            MemoryError: the engine found none.
        """
        outcome = SqliteOutcome(rows=rows)
        try:
            cursor = self.raw.execute(sql, _parameters(params))
            outcome.columns = [column[0] for column in cursor.description or ()]
            for row in cursor:
                if not rows.take(list(map(encode, row))) and Act.ROWS not in self.guard.acts:
                    break
            outcome.changed = None if outcome.columns else max(0, cursor.rowcount)
            # A statement that returns what it changed is over only at its end.
            cursor.close()
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            outcome.error = self._failure(error)
            outcome.columns = []
        return outcome

    def _failure(self, error: Exception) -> Failure:
        code = getattr(error, "sqlite_errorname", None)
        if self.guard.refused:
            return Failure(self.guard.refused, "refused")
        if code == "SQLITE_INTERRUPT":
            return Failure("the statement took longer than timeout_s and was stopped", "timeout")
        if code in ("SQLITE_TOOBIG", "SQLITE_FULL") or str(code).startswith("SQLITE_IOERR"):
            return Failure(str(error), "limit", code)
        return Failure(str(error), "sql", code)

    @property
    def in_transaction(self) -> bool:
        return self.raw.in_transaction

    def has_session(self) -> bool:
        """Say whether there is what only this connection holds: a transaction, temporary objects, databases beside."""
        if self.raw.in_transaction:
            return True
        databases = [row[1] for row in self.raw.execute("PRAGMA database_list")]
        if set(databases) - {"main", "temp"}:
            return True
        return bool(self.raw.execute("SELECT count(*) FROM sqlite_temp_schema").fetchone()[0])


def statements(script: str) -> Iterator[str]:
    """Yield the statements of a script, each with its end; a trigger's body is part of its statement."""
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
    """Yield the rows of one of our own statements as an answer has them."""
    for row in cursor:
        yield list(map(encode, row))
