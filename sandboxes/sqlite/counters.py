"""The counters of a SQLite connection: `changes()`, `last_insert_rowid()` and `total_changes()`."""

import contextlib
import sqlite3
from typing import NamedTuple

_NUMBERS = (
    "WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM n WHERE k < {0}) SELECT k FROM n WHERE k <= {0}"
)


class RowCounters(NamedTuple):
    """The counters of one connection, as earlier statements left them."""

    changes: int = 0  # Rows that the last changing statement changed.
    last_rowid: int = 0  # Row number of the last insert.
    total: int = 0  # Rows changed since the connection was opened.

    @classmethod
    def read(cls, connection: sqlite3.Connection) -> "RowCounters":
        """Read the counters of a connection."""
        return cls(*connection.execute("SELECT changes(), last_insert_rowid(), total_changes()").fetchone())


UNTOUCHED = RowCounters()
"""The counters of a connection that has changed nothing."""


def prime(connection: sqlite3.Connection, target: RowCounters) -> None:
    """Set the counters of a new connection, by changing rows of a temporary database: there is no other way."""
    if target == UNTOUCHED:
        return
    run = connection.execute
    run("ATTACH ':memory:' AS forkpoint")
    # CREATE TABLE AS does not count the rows that it inserts, so only the deletions below count.
    run(f"CREATE TABLE forkpoint.rows AS {_NUMBERS.format(target.total)}")
    run("CREATE TABLE forkpoint.last (k INTEGER PRIMARY KEY)")
    if target.total > target.changes:
        run("DELETE FROM forkpoint.rows WHERE k > ?", (target.changes,))
    with contextlib.suppress(sqlite3.IntegrityError):
        # The second row violates the primary key. The failed statement counts no rows, but sets the last row number.
        run("INSERT INTO forkpoint.last VALUES (?1), (?1)", (target.last_rowid,))
    run("DELETE FROM forkpoint.rows")
    run("DETACH forkpoint")
