"""Builders of a root state's database, in a worker, with frozen inputs: from a script, from CSV, or a copied file."""

import codecs
import csv
import io
import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sandboxes.sql.results import RowCollector
from sandboxes.sql.sqlite_connection import SqliteConnection, statements
from sandboxes.sql.sqlite_volatile import VolatileInputs

SCRIPT_S = 600.0
"""Time limit in seconds for a script that builds a database."""
CHECK_S = 2.0
"""Time limit in seconds for checking a database file. If a large one is damaged further on, its statements fail."""
FROZEN_MS = 1_767_225_600_000
"""The time that scripts see, in milliseconds since the Unix epoch: 1 January 2026, 00:00 UTC."""
_INTEGER = re.compile(r"-?(?:0|[1-9]\d*)", re.ASCII)
_EXACT_DIGITS = 16
"""A float keeps every integer of fewer digits exactly."""
_REAL = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)


class BuildError(ValueError):
    """The source does not make a database; the message says what is wrong, and where."""


def build_script(path: Path, script: str, inputs: VolatileInputs) -> None:
    """Run a script on a new database at path. Raises BuildError, which names the statement that fails."""
    connection = _new(path, inputs)
    try:
        with connection.within(time.monotonic() + SCRIPT_S, private=True):
            for number, statement in enumerate(statements(script), 1):
                error = connection.run(statement, None, RowCollector(0, 0)).error
                if error is not None:
                    shown = " ".join(statement.split())[:80]
                    raise BuildError(f"statement {number} ({shown}) fails: {error.message}")
        if connection.raw.in_transaction:
            raise BuildError("the script ends inside a transaction: end it with COMMIT")
        _finish(connection.raw)
    finally:
        connection.close()


def build_csv(path: Path, table: str, data: bytes, inputs: VolatileInputs) -> None:
    """Add a table to the database at path, with column names from the first row and types from the values."""
    columns, rows = _read_csv(data)
    kinds = [_kind(rows, n) for n in range(len(columns))]
    connection = _new(path, inputs)
    try:
        run = connection.raw.execute
        run("BEGIN")
        described = ", ".join(f"{_quoted(name)} {kind}" for name, (kind, _) in zip(columns, kinds, strict=True))
        run(f"CREATE TABLE {_quoted(table)} ({described})")
        values = ([read(cell) if cell else None for (_, read), cell in zip(kinds, row, strict=True)] for row in rows)
        marks = ", ".join("?" * len(columns))
        connection.raw.executemany(f"INSERT INTO {_quoted(table)} VALUES ({marks})", values)
        run("COMMIT")
        _finish(connection.raw)
    except sqlite3.Error as error:
        raise BuildError(str(error)) from error
    finally:
        connection.close()


def settle(path: Path, inputs: VolatileInputs) -> None:
    """Merge the journals of the database at path into it, and check the database."""
    connection = SqliteConnection(path.as_uri(), inputs)
    try:
        raw = connection.raw
        raw.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if any(path.with_name(path.name + end).exists() for end in ("-wal", "-journal")):
            raw.execute("PRAGMA journal_mode=DELETE").fetchall()
        deadline = time.monotonic() + CHECK_S
        raw.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        result = raw.execute("PRAGMA quick_check(1)").fetchone()[0]
        if result != "ok":
            raise BuildError(f"the file is damaged: {' '.join(str(result).split())}")
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorname", "") != "SQLITE_INTERRUPT":
            raise BuildError(str(error)) from error
    except sqlite3.Error as error:
        raise BuildError(str(error)) from error
    finally:
        connection.close()


def text_of(data: bytes) -> str:
    """Decode a file in UTF-8, with or without a byte order mark. Other data raises UnicodeDecodeError."""
    # The codec utf-8-sig is a module of its own, and a confined worker can no longer import it.
    return data.removeprefix(codecs.BOM_UTF8).decode()


def _new(path: Path, inputs: VolatileInputs) -> SqliteConnection:
    inputs.begin(FROZEN_MS, b"root")
    connection = SqliteConnection(path.as_uri(), inputs)
    # A failed build is deleted, so nothing needs to be rolled back from a journal.
    connection.raw.execute("PRAGMA journal_mode=OFF").fetchall()
    return connection


def _finish(raw: sqlite3.Connection) -> None:
    # SQLite creates the file with the first write, and a script without tables writes nothing.
    version = raw.execute("PRAGMA user_version").fetchone()[0]
    raw.execute(f"PRAGMA user_version={version}")


def _read_csv(data: bytes) -> tuple[list[str], list[list[str]]]:
    csv.field_size_limit(1 << 30)
    try:
        lines = csv.reader(io.StringIO(text_of(data), newline=""), strict=True)
        columns, *rows = [row for row in lines if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise BuildError(f"the file is not CSV in UTF-8: {error}") from error
    except ValueError:
        raise BuildError("the file is empty: its first row must name the columns") from None
    if len({name.casefold() for name in columns}) < len(columns) or "" in columns:
        raise BuildError(f"the first row must give each column a name of its own, and is {', '.join(columns)}")
    for number, row in enumerate(rows, 2):
        if len(row) != len(columns):
            raise BuildError(f"row {number} has {len(row)} fields, the first has {len(columns)}")
    return columns, rows


def _kind(rows: Sequence[Sequence[str]], column: int) -> tuple[str, Callable[[str], str | int | float]]:
    """Return a column's type and the reader of its values. Numbers are used only if no value loses a digit."""
    values = [row[column] for row in rows if row[column]]
    integers = [value for value in values if _INTEGER.fullmatch(value)]
    if values and len(integers) == len(values):
        return ("INTEGER", int) if all(-(2**63) <= int(value) < 2**63 for value in values) else ("TEXT", str)
    if (
        values
        and all(_REAL.fullmatch(value) for value in values)
        and max(map(len, integers), default=0) < _EXACT_DIGITS
    ):
        return "REAL", float
    return "TEXT", str


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
