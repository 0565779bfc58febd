"""The SQLite file of the store: its connections, its transactions, and the numbers that it gives out.

1. One connection writes, on the event loop's thread. Every write is a short transaction, so no lock guards the store.
2. The file is in WAL mode, so readers never wait for the writer. A query that looks at many rows runs in a thread on a
   connection of its own (`read_apart`), and a dump of a tree on one that stays open (`open_reader`).
3. A commit appends to the write-ahead log without waiting for the disk (synchronous=NORMAL): it survives a kill of
   the process, and a loss of power only with FULL. Automatic checkpoints are off because they do wait for the disk;
   a background thread calls `checkpoint` instead.
4. Numbers of nodes, records, rollouts, trees and blobs are counted in memory and never given out twice, not even
   after the rows are deleted: the steps of a rollout and the URLs that agents hold may still name them. Where the row
   with the last number is damaged, the second half of the numbers is used from then on.

Tables are created, and rows for views are read, through sqlite-utils. Statements on the way of an answer use its
connection directly, which takes half the time.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import structlog

from proxy.storage.errors import DamagedError, StoreError
from proxy.storage.migrations import migrate
from proxy.storage.schema import (
    BESIDE_ANSWERS,
    CHECKSUM_FUNCTION,
    NAMED,
    asked,
    count_damaged,
    create_tables,
    is_whole,
    row_checksum,
    update_guards,
    version_of,
)
from sandboxes.lean_imports import without

with without("numpy"):
    import sqlite_utils

log = structlog.get_logger()

T = TypeVar("T")
Execute = Callable[..., sqlite3.Cursor]
"""Executes one statement with its values inside a transaction."""
NumberedTable = Literal["trees", "nodes", "records", "rollouts", "blobs"]
BLOCK = 1 << 32
"""How many numbers of each table one file gives out. Members of a cluster use different blocks, so that one file can
hold rows of all of them. 2**21 blocks stay below 2**53, which JSON numbers hold exactly."""
_PAGE_BYTES = 512
"""Size of the pages of a new file, SQLite's least. A recorded call changes five to eight of them, and a commit writes
each whole. With SQLite's usual 4,096 it writes five times as much."""
_DISK_BLOCK_BYTES = 4096
"""Size of a block of Linux file systems (ext4, XFS and Btrfs by default)."""
_WRITABLE = "checked"
"""Name of the row of `meta` that shows whether the file can be written. Nothing reads it."""
_CHECKED_BYTES = 128 << 20
"""Largest file whose pages are checked at each start: 0.4 s from the page cache. Rows and blobs have checksums too."""
_NUMBERED: tuple[NumberedTable, ...] = ("trees", "nodes", "records", "rollouts", "blobs")


class StoreDatabase:
    """One SQLite file. Every method is synchronous and short, unless it says that it blocks."""

    def __init__(self, path: Path, *, sync: Literal["NORMAL", "FULL"] = "NORMAL", block: int = 0) -> None:
        """Open or create the file, whose tables are brought to this version. It gives out the numbers of one block.

        With `sync` FULL each commit waits for the disk, so that it survives a loss of power. Raises StoreError, and
        leaves the file unchanged, if it is no database, another program's, or of a newer version.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        # A copy of the file elsewhere stays private too. SQLite gives its -wal and -shm the mode of the file.
        path.touch(mode=0o600)
        self._path = path
        self._sync, self._block = sync, block
        try:
            self._connection = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as error:
            raise _unusable(path, error) from error
        self._connection.create_function(CHECKSUM_FUNCTION, -1, row_checksum, deterministic=True)
        self.tables = sqlite_utils.Database(self._connection)  # The file through sqlite-utils.
        try:
            version = version_of(self.tables)
            self._check_pages()
            # Of a new file only: a page's size is fixed when the first one is written.
            self._connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")
            self._connection.execute("PRAGMA journal_mode=WAL")
            if version is not None:
                migrate(self.tables, path, version)
            self._connection.execute(f"PRAGMA synchronous={sync}")
            self._connection.execute("PRAGMA wal_autocheckpoint=0")
            create_tables(self.tables)
            self._check_names()
            for guard in update_guards():
                self._connection.execute(guard)
            # Damaged rows of the tables `BESIDE_ANSWERS` at the start; they are left out.
            self.damaged = count_damaged(self.tables, BESIDE_ANSWERS)
            self._next = {name: self._last_number(name) + 1 for name in _NUMBERED}
            if self.damaged:
                log.error("damaged rows of the store are left out", **self.damaged)
                with self.transaction() as execute:
                    self.keep_numbers(execute)
        # SQLite's messages about a damaged schema may be no UTF-8: a ValueError, as a foreign database is.
        except (ValueError, TypeError, OSError, sqlite3.Error) as error:
            self._connection.close()
            raise _unusable(path, error) from error

    def close(self) -> None:
        """Close the writing connection."""
        self._connection.close()

    def checkpoint(self) -> None:
        """Copy the write-ahead log into the file. Blocking: for a thread, it opens a connection of its own."""
        with closing(sqlite3.connect(self._path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def read_apart(self, read: Callable[[sqlite3.Connection], T]) -> T:
        """Run a query function on a read-only connection of its own. Blocking: for a thread, and for many rows."""
        with closing(self.open_reader()) as connection:
            return read(connection)

    def open_reader(self) -> sqlite3.Connection:
        """Return a read-only connection that any thread may use, with `is_whole`; the caller closes it."""
        connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        connection.create_function(CHECKSUM_FUNCTION, -1, row_checksum, deterministic=True)
        connection.create_function("asked", 2, asked, deterministic=True)
        connection.execute("PRAGMA query_only=1")
        return connection

    def size_bytes(self) -> int:
        """Return the size of the file and of its write-ahead log."""
        files = (self._path, self._path.with_name(self._path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def check_writable(self) -> None:
        """Write one row as large as a block of a file system. Raises StoreError if the file cannot be written."""
        with self.transaction() as execute:
            # A smaller one may fit into a block that the file has already, when the disk is full.
            values = (_WRITABLE, f"{time.time():<{_DISK_BLOCK_BYTES}}")
            execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", values)

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[Execute]:
        """Run the block in one transaction, which executes statements through the function that it gets.

        A durable commit, and all earlier ones, are on the disk afterwards, whatever `sync` says. Raises StoreError.
        """
        execute = self._connection.execute
        try:
            if durable:
                execute("PRAGMA synchronous=FULL")
            execute("BEGIN IMMEDIATE")
            yield execute
            execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise StoreError(
                    f"the store could not be written: {error}. Free disk space, or check the file."
                ) from error
            raise
        finally:
            if durable:
                execute(f"PRAGMA synchronous={self._sync}")

    def execute_many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Execute one statement for each row of values, inside a running transaction."""
        self._connection.executemany(sql, rows)

    def row(self, sql: str, values: tuple[Any, ...] | Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return the first row of a query, or None. Raises StoreError; so do `rows` and `views`."""
        try:
            row: tuple[Any, ...] | None = self._connection.execute(sql, values).fetchone()
        except sqlite3.Error as error:
            raise _unreadable(error) from error
        return row

    def rows(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise _unreadable(error) from error

    def views(self, sql: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return all rows of a query, each by the names of its columns."""
        try:
            return list(self.tables.query(sql, dict(values)))
        except sqlite3.Error as error:
            raise _unreadable(error) from error

    def mark(self, name: str) -> str | None:
        """Return a mark; None if it was never put. Raises DamagedError if it is damaged, or a damaged row may be it."""
        row = self.row(f"SELECT value, {is_whole('meta')} FROM meta WHERE name = ?", (name,))
        if row is None and not self._has_lost_mark():
            return None
        if row is None or not row[1]:
            raise DamagedError(f"the mark {name!r} of the store is damaged.")
        return str(row[0])

    def put_mark(self, name: str, value: str, *, durable: bool) -> None:
        """Write a mark; with durable it is on the disk afterwards."""
        with self.transaction(durable=durable) as execute:
            execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def take_number(self, table: NumberedTable, count: int = 1) -> int:
        """Return the first of count numbers of a table that were never given out before."""
        first = self._next[table]
        self._next[table] += count
        return first

    @property
    def last_number(self) -> int:
        """The largest number that any table has given out."""
        return max(self._next.values()) - 1

    def keep_numbers(self, execute: Execute) -> None:
        """Write the last numbers given out; a deletion calls this because the rows no longer show them."""
        for table, number in self._next.items():
            execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"last {table}", str(number - 1)))

    def _check_pages(self) -> None:
        """Let SQLite check the structure of a file that is not too large; raise sqlite3.DatabaseError for damage."""
        if self.size_bytes() <= _CHECKED_BYTES:
            (report,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
            if report != "ok":
                raise sqlite3.DatabaseError(f"it is damaged ({' '.join(report.split())})")

    def _check_names(self) -> None:
        """Raise sqlite3.DatabaseError if rows are missing in an index by names, because it is unknown which."""
        for table in NAMED:
            (report,) = self._connection.execute(f"PRAGMA integrity_check({table})").fetchone()
            if report == "ok":
                continue
            damaged = f"SELECT COUNT(*) FROM {table} NOT INDEXED WHERE NOT {is_whole(table)}"
            if self._connection.execute(damaged).fetchone() != (0,):
                raise sqlite3.DatabaseError(f"table {table} and its indexes are damaged ({report})")
            # Only the index is damaged, and the rows have all that it needs.
            self._connection.execute(f"REINDEX {table}")

    def _has_lost_mark(self) -> bool:
        """Return whether a row of `meta` is damaged whose name may have been another one."""
        return self.row(f"SELECT 1 FROM meta WHERE name <> '{_WRITABLE}' AND NOT {is_whole('meta')}", ()) is not None

    def _last_number(self, table: NumberedTable) -> int:
        """Return the last number given out; raise sqlite3.DatabaseError if it is unknown and no jump is left."""
        first = self._block * BLOCK
        sql = f"SELECT MAX(COALESCE(MAX(id), 0), ?) FROM {table} WHERE id > ? AND id < ?"
        row = self.row(sql, (first, first, first + BLOCK))
        assert row is not None
        try:
            kept = self.mark(f"last {table}")
        except DamagedError:
            # Half of a block is more than any store gives out: a year with 68 new rows in each second.
            half = first + BLOCK // 2
            if row[0] >= half:
                raise sqlite3.DatabaseError(f"the last number of {table} is damaged. Restore a backup") from None
            return half
        return max(int(row[0]), int(kept or 0))


def schema_of(path: Path) -> int | None:
    """Return a store's schema version without writing, or None. Raises StoreError for newer or foreign ones."""
    if not path.exists():
        return None
    try:
        with closing(sqlite3.connect(read_only(path), uri=True)) as connection:
            return version_of(sqlite_utils.Database(connection))
    except (ValueError, sqlite3.Error) as error:
        raise _unusable(path, error) from error


def read_only(path: Path) -> str:
    """Return the URI by which SQLite opens a file without writing to it."""
    # Without a write-ahead log the file may lie on a disk that is read-only, where SQLite could not lock it.
    alone = not path.with_name(f"{path.name}-wal").exists()
    return f"file:{quote(str(path.absolute()))}?mode=ro{'&immutable=1' if alone else ''}"


def _unusable(path: Path, error: Exception) -> StoreError:
    return StoreError(f"{path} cannot be used as Forkpoint's store: {error}. Move it away or fix it.")


def _unreadable(error: sqlite3.Error) -> StoreError:
    kind = DamagedError if isinstance(error, sqlite3.DatabaseError) and "malformed" in str(error) else StoreError
    return kind(f"the store could not be read: {error}. Check the disk, then restore the file from a copy.")
