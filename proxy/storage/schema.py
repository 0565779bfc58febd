"""The tables of the store, created with sqlite-utils, and the check that a file is a store of this version.

Each table is created where it is missing, so a file of the same version gains tables. Every row carries a checksum: a
stored generated column over all others, so that no statement can forget it. Queries compare it (`is_whole`).

A change that existing tables cannot express raises `SCHEMA_VERSION` and appends to `proxy.storage.migrations`.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    import sqlite_utils

SCHEMA_VERSION = 6
"""Version of the tables, written into each file."""

_TABLES: tuple[tuple[str, dict[str, type], str | tuple[str, ...]], ...] = (
    # Also holds the last numbers given out (see `StoreDatabase.keep_numbers`) and the drafts (see `DraftStore`).
    ("meta", {"name": str, "value": str}, "name"),
    ("tasks", {"name": str, "spec": str, "created_at": float}, "name"),
    ("trees", {"id": int, "task": str, "root_key": str, "spec": str, "root": int, "created_at": float}, "id"),
    ("nodes", {"id": int, "tree": int, "exact": bytes, "content": bytes, "diverged": str, "pinned": int}, "id"),
    ("records", {
        "id": int, "tree": int, "source": int, "key": bytes, "target": int, "call": int, "upload": int, "answer": int,
        "effect": int, "seconds": float, "recorded_at": float, "private": int, "reproducible": int,
        "age_s": float, "proven": int, "quarantined": int,
        "cpu_s": float, "peak_bytes": int, "read_bytes": int, "written_bytes": int,
    }, "id"),
    ("rollouts", {
        "id": int, "task": str, "name": str, "tree": int, "start": int, "node": int, "calls": int, "finished": int,
        "token_digest": bytes, "created_at": float, "lost": str,
        "labels": str, "used_at": float, "restore_s": float, "replay_s": float, "wait_s": float,
    }, "id"),
    # What a rollout's calls took beside their tools, by endpoint. The row of the rollout has the sums.
    ("overheads", {
        "rollout": int, "endpoint": str, "restore_s": float, "replay_s": float, "wait_s": float,
    }, ("rollout", "endpoint")),
    ("blobs", {"id": int, "digest": bytes, "packed": int, "data": bytes}, "id"),
    # Which tasks use a tree that several tasks share.
    ("shares", {"task": str, "tree": int}, ("task", "tree")),
    # What protocols remember of a running rollout, by protocol: Docker's container, for example.
    ("notes", {"rollout": int, "value": str}, "rollout"),
    # Records that an audit observed to differ, and how many records audits checked.
    ("findings", {"record": int, "tree": int, "why": str, "quarantined": int, "at": float}, "record"),
    ("audits", {
        "tree": int, "kind": str, "checked": int, "differing": int, "unreachable": int, "at": float,
    }, ("tree", "kind")),
    ("masks", {"task": str, "value": str}, "task"),
)  # fmt: skip
BESIDE_ANSWERS = ("meta", "shares", "notes", "findings", "audits", "masks")
"""Tables with few rows beside those of the answers: all of their rows are compared at each start."""
_CHECKED = ("tasks", "trees", "nodes", "records", "rollouts", "blobs", "steps", "overheads", *BESIDE_ANSWERS)
_UNCHECKED = frozenset({"data"})
"""Columns that the checksum leaves out: the data of a blob has a digest of its own."""
NAMED = ("tasks", "trees", "rollouts")
"""Tables that are looked up by a name in a request. Their indexes are checked at each start, because a name that
is not found there would begin anew."""
CHECKSUM_FUNCTION = "row_checksum"
"""Name of the SQL function; a connection that lacks it can read these tables and not write to them."""
_INDEXES = (
    ("trees", ["task", "root_key"]),
    ("nodes", ["tree"]),
    ("records", ["tree"]),
    # A tree that is being read back answers calls by these (`proxy.storage.tree_reading`).
    ("records", ["source", "key"]),
    ("records", ["target"]),
    ("rollouts", ["task"]),
    ("rollouts", ["task", "name"]),
    ("rollouts", ["tree"]),
    ("rollouts", ["token_digest"]),
)
# sqlite-utils cannot create a table WITHOUT ROWID. With a row ID each step is stored twice, in the table and in the
# index of its primary key: docs/decisions/0003-journal-and-store.md.
_STEPS_CHECKSUM = (
    "({prefix}rollout * 1000003 + {prefix}turn * 65537 + {prefix}record * 257 + {prefix}outcome) % 4294967291"
)
STEPS_CHECKSUM = _STEPS_CHECKSUM.format(prefix="")
"""Checksum of a step, which SQLite computes by itself: each hit writes a step, and a function of Python's is slow.

The factors and the prime have no common divisor, so each changed bit of a number is seen; other damage stays unseen
once in 2**32 times."""
STEPS = (
    "CREATE TABLE IF NOT EXISTS steps (rollout INTEGER, turn INTEGER, record INTEGER, outcome INTEGER, "
    f"steps_checksum INTEGER GENERATED ALWAYS AS ({STEPS_CHECKSUM}) STORED, "
    "PRIMARY KEY (rollout, turn)) WITHOUT ROWID"
)


def row_checksum(*values: object) -> bytes:
    """Return 8 bytes of BLAKE2b over a row's values. Damage stays unseen once in 2**64 times."""
    return blake2b(repr(values).encode(), digest_size=8).digest()


def asked(packed: int, data: bytes) -> bytes | None:
    """Return 16 bytes for what a stored call asks, whatever its replay is given besides; None for a damaged call."""
    try:
        value = orjson.loads(zlib.decompress(data) if packed else data)
        call = [value["endpoint"], value["tool"], value["arguments"]]
    except (zlib.error, TypeError, ValueError, KeyError):
        return None
    return blake2b(orjson.dumps(call, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def is_whole(table: str, alias: str = "") -> str:
    """Return the SQL condition that a row of a checked table, under an alias if need be, is as it was written."""
    prefix = f"{alias}." if alias else ""
    if table == "steps":
        return f"({prefix}steps_checksum IS {_STEPS_CHECKSUM.format(prefix=prefix)})"
    columns = next(columns for name, columns, _ in _TABLES if name == table)
    return f"({prefix}{table}_checksum IS {checksum_of(columns, prefix)})"


def update_guards() -> Iterator[str]:
    """Yield the statements that keep updates off damaged rows, for one connection.

    An update computes the checksum of the whole row again, so it would make a damaged row look as it was written. Only
    a rollout can be ended whatever its row holds.
    """
    exceptions = {"rollouts": "AND NEW.finished IS OLD.finished"}
    for table in ("nodes", "records", "rollouts", "overheads", "notes", "audits"):
        yield (
            f"CREATE TEMP TRIGGER {table}_guard BEFORE UPDATE ON main.{table} "
            f"WHEN NOT {is_whole(table, 'OLD')} {exceptions.get(table, '')} BEGIN SELECT RAISE(IGNORE); END"
        )


def checked_table(
    tables: "sqlite_utils.Database", name: str, columns: Mapping[str, type], key: str | tuple[str, ...] = "id"
) -> str:
    """Return the statement that creates a table whose rows carry a checksum."""
    # sqlite-utils knows no generated columns, so its statement gets one more column. A key of several columns stands
    # behind all columns.
    single, several = (key, "") if isinstance(key, str) else (None, f", PRIMARY KEY ({', '.join(key)})")
    statement = tables.create_table_sql(name, dict(columns), pk=single).rstrip().removesuffix(";").removesuffix(")")
    return f"{statement}, {name}_checksum BLOB GENERATED ALWAYS AS ({checksum_of(columns)}) STORED{several})"


def checksum_of(columns: Mapping[str, type], prefix: str = "") -> str:
    """Return the SQL expression of the checksum of a row with these columns, each behind the prefix."""
    # Text as bytes: damaged text may be no UTF-8, which could not be passed as a string.
    values = (
        f"CAST({prefix}[{name}] AS BLOB)" if kind is str else f"{prefix}[{name}]"
        for name, kind in columns.items()
        if name not in _UNCHECKED
    )
    return f"{CHECKSUM_FUNCTION}({', '.join(values)})"


class ForeignDatabaseError(ValueError):
    """The file is a database of another program, or of another schema version."""


def version_of(tables: "sqlite_utils.Database") -> int | None:
    """Return a file's version, or None if it is empty or unfinished. Raises ForeignDatabaseError for other files."""
    names = set(tables.table_names())
    if not names:
        return None
    if "meta" not in names:
        raise ForeignDatabaseError(f"it is another program's database, with tables {', '.join(sorted(names))}")
    row = tables.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
    damaged = _damaged_meta(tables)
    if row is None and not damaged:
        return None
    version = "" if row is None else str(row[0])
    if "schema" in damaged or row is None:
        raise ForeignDatabaseError(f"the row that says its schema ({version or 'none'}) is damaged: restore a backup")
    if version not in map(str, range(1, SCHEMA_VERSION + 1)):
        raise ForeignDatabaseError(
            f"it has schema {version}, this Forkpoint reads {SCHEMA_VERSION}: use the version that wrote it"
        )
    return int(version)


def _damaged_meta(tables: "sqlite_utils.Database") -> set[str]:
    """Return the names of damaged rows of `meta`; none for a file whose `meta` has no checksums."""
    if "meta_checksum" not in {row[1] for row in tables.execute("PRAGMA table_xinfo(meta)")}:
        return set()
    # Computed here: this also looks at files that it only reads, whose connection lacks the function.
    rows = tables.execute("SELECT CAST(name AS BLOB), CAST(value AS BLOB), meta_checksum FROM meta")
    return {name.decode(errors="replace") for name, value, stored in rows if row_checksum(name, value) != stored}


def create_tables(tables: "sqlite_utils.Database") -> None:
    """Create the tables and indexes that are missing."""
    present = set(tables.table_names())
    for name, columns, key in _TABLES:
        if name not in present:
            tables.execute(checked_table(tables, name, columns, key))
    tables.execute(STEPS)
    for name, indexed in _INDEXES:
        tables.table(name).create_index(indexed, if_not_exists=True)
    tables.table("blobs").create_index(["digest"], unique=True, if_not_exists=True)
    tables.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (str(SCHEMA_VERSION),))


def count_damaged(tables: "sqlite_utils.Database", names: Iterable[str] = _CHECKED) -> dict[str, int]:
    """Return how many rows of each table are not what was written, without zeros. It reads all of these tables."""
    counts = {
        name: int(tables.execute(f"SELECT COUNT(*) FROM {name} NOT INDEXED WHERE NOT {is_whole(name)}").fetchone()[0])
        for name in sorted(names)
    }
    return {name: count for name, count in counts.items() if count}
