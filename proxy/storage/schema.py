"""The tables of the store, created with sqlite-utils, and the check that a file is a store of this version.

Each table is created where it is missing, so a file of the same schema version gains tables that were added later.
A change that existing tables cannot express raises `SCHEMA_VERSION`; files of another version are refused.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite_utils

SCHEMA_VERSION = 1
"""Version of the tables, written into each file. A file of another version is refused and left unchanged."""

_TABLES: tuple[tuple[str, dict[str, type], str | tuple[str, ...]], ...] = (
    # Also holds the last numbers given out (see `StoreDatabase.keep_numbers`) and the drafts (see `DraftStore`).
    ("meta", {"name": str, "value": str}, "name"),
    ("tasks", {"name": str, "spec": str, "created_at": float}, "name"),
    ("trees", {"id": int, "task": str, "root_key": str, "spec": str, "root": int, "created_at": float}, "id"),
    ("nodes", {"id": int, "tree": int, "exact": bytes, "content": bytes, "diverged": str, "pinned": int}, "id"),
    ("records", {
        "id": int, "tree": int, "source": int, "key": bytes, "target": int, "call": int, "upload": int, "answer": int,
        "effect": int, "seconds": float, "recorded_at": float, "private": int, "reproducible": int,
    }, "id"),
    ("rollouts", {
        "id": int, "task": str, "name": str, "tree": int, "start": int, "node": int, "calls": int, "finished": int,
        "token": str, "created_at": float,
    }, "id"),
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
_INDEXES = (
    ("trees", ["task", "root_key"]),
    ("nodes", ["tree"]),
    ("records", ["tree"]),
    ("rollouts", ["task", "name"]),
    ("rollouts", ["tree"]),
    ("rollouts", ["token"]),
)
# sqlite-utils cannot create a table WITHOUT ROWID. With a row ID each step is stored twice, in the table and in the
# index of its primary key: decision 0026 has the measurement.
_STEPS = (
    "CREATE TABLE IF NOT EXISTS steps (rollout INTEGER, turn INTEGER, record INTEGER, outcome INTEGER, "
    "PRIMARY KEY (rollout, turn)) WITHOUT ROWID"
)


class ForeignDatabaseError(ValueError):
    """The file is a database of another program, or of another schema version."""


def check_version(tables: "sqlite_utils.Database") -> None:
    """Inspect a file before anything is written to it; an empty file is accepted.

    Raises:
        ForeignDatabaseError: The file holds something other than a store of this version.
    """
    names = set(tables.table_names())
    if not names:
        return
    if "meta" not in names:
        raise ForeignDatabaseError(f"it is another program's database, with tables {', '.join(sorted(names))}")
    row = tables.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
    # A store without this row was killed while its tables were created.
    if row is not None and row[0] != str(SCHEMA_VERSION):
        raise ForeignDatabaseError(
            f"it has schema {row[0]}, this Forkpoint reads {SCHEMA_VERSION}: use the version that wrote it"
        )


def create_tables(tables: "sqlite_utils.Database") -> None:
    """Create the tables and indexes that are missing."""
    for name, columns, key in _TABLES:
        tables.table(name).create(columns, pk=key, if_not_exists=True)
    tables.execute(_STEPS)
    for name, indexed in _INDEXES:
        tables.table(name).create_index(indexed, if_not_exists=True)
    tables.table("blobs").create_index(["digest"], unique=True, if_not_exists=True)
    tables.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (str(SCHEMA_VERSION),))
