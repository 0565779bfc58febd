"""Changes of the store's tables from one schema version to the next, made when an older file is opened.

1. A file of an older version is first copied beside itself, as `forkpoint.sqlite.schema-N`, durably. Put back in place
   of the file, it serves the older Forkpoint again.
2. All changes up to `SCHEMA_VERSION`, and the new version number, are one transaction. A kill or a loss of power in
   the middle leaves the old tables, and the next start begins again.
3. A table that changes is written again, with the columns of the version that the migration leads to. They are written
   out here, because `schema` has the columns of the last version only.
4. Writing a damaged row again would give it a right checksum. So a file with damaged rows is refused unchanged.

To change a table: change it in `schema`, raise `SCHEMA_VERSION`, append a `Migration`, and add a data directory of the
version before to `tests/proxy/storage/older`, as its README says.
"""

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from proxy.storage.schema import SCHEMA_VERSION, ForeignDatabaseError, checked_table, checksum_of
from sandboxes.linux.files import sync_path

if TYPE_CHECKING:
    import sqlite_utils

log = structlog.get_logger()

_DIGEST_FUNCTION = "sha256"
"""Name of the SQL function that digests a token, while a migration runs."""
LOST = "the store was upgraded from schema 1, whose calls have other keys"
"""Why rollouts that ran under schema 1 are refused: the rules of call keys and of states' digests have changed since,
so a record could answer a call that it was not made for."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step between schema versions."""

    version: int  # The one that it leads to, from the one before.
    summary: str  # What it changes, for a user.
    run: Callable[["sqlite_utils.Database"], None]  # Makes the change inside a running transaction.


def rebuild(tables: "sqlite_utils.Database", name: str, create: str, values: Mapping[str, str]) -> None:
    """Write a table again inside a running transaction, from its `create` statement; `create_tables` adds indexes.

    `values` are SQL expressions for columns that are new or change. Raises ForeignDatabaseError if rows are damaged.
    """
    _require_whole(tables, name)
    before = f"{name}_before"
    tables.execute(f"ALTER TABLE {name} RENAME TO {before}")
    tables.execute(create)
    columns = list(_columns(tables, name))
    selected = ", ".join(values.get(column, f"[{column}]") for column in columns)
    tables.execute(
        f"INSERT INTO {name} ({', '.join(f'[{column}]' for column in columns)}) SELECT {selected} FROM {before}"
    )
    tables.execute(f"DROP TABLE {before}")


def _columns(tables: "sqlite_utils.Database", name: str) -> dict[str, type]:
    """Return the columns that statements write; a checksum is not among them."""
    rows = tables.execute(f"PRAGMA table_info({name})").fetchall()
    return {row[1]: str if row[2] == "TEXT" else bytes for row in rows}


def _require_whole(tables: "sqlite_utils.Database", name: str) -> None:
    columns = _columns(tables, name)
    if f"{name}_checksum" not in {row[1] for row in tables.execute(f"PRAGMA table_xinfo({name})")}:
        return
    wrong = f"SELECT COUNT(*) FROM {name} WHERE {name}_checksum IS NOT {checksum_of(columns)}"
    (count,) = tables.execute(wrong).fetchone()
    if count:
        raise ForeignDatabaseError(
            f"{count} rows of its table {name} are damaged, and an upgrade would hide that: restore a backup, or "
            "export the trees with the version that wrote it"
        )


def _to_2(tables: "sqlite_utils.Database") -> None:
    unchanged: dict[str, tuple[dict[str, type], str]] = {
        "tasks": ({"name": str, "spec": str, "created_at": float}, "name"),
        "trees": ({"id": int, "task": str, "root_key": str, "spec": str, "root": int, "created_at": float}, "id"),
        "nodes": ({"id": int, "tree": int, "exact": bytes, "content": bytes, "diverged": str, "pinned": int}, "id"),
        "blobs": ({"id": int, "digest": bytes, "packed": int, "data": bytes}, "id"),
    }
    for name, (columns, key) in unchanged.items():
        rebuild(tables, name, checked_table(tables, name, columns, key), {})
    records: dict[str, type] = {
        "id": int, "tree": int, "source": int, "key": bytes, "target": int, "call": int, "upload": int, "answer": int,
        "effect": int, "seconds": float, "recorded_at": float, "private": int, "reproducible": int,
        "age_s": float, "proven": int,
    }  # fmt: skip
    rebuild(tables, "records", checked_table(tables, "records", records), {"age_s": "NULL", "proven": "0"})
    rollouts: dict[str, type] = {
        "id": int, "task": str, "name": str, "tree": int, "start": int, "node": int, "calls": int, "finished": int,
        "token_digest": bytes, "created_at": float, "lost": str,
    }  # fmt: skip
    tables.conn.create_function(_DIGEST_FUNCTION, 1, _token_digest, deterministic=True)
    values = {"token_digest": f"{_DIGEST_FUNCTION}(token)", "lost": f"CASE WHEN finished THEN '' ELSE '{LOST}' END"}
    rebuild(tables, "rollouts", checked_table(tables, "rollouts", rollouts), values)


def _token_digest(token: str | None) -> bytes | None:
    return sha256(token.encode()).digest() if token else None


def _to_3(tables: "sqlite_utils.Database") -> None:
    rollouts: dict[str, type] = {
        "id": int, "task": str, "name": str, "tree": int, "start": int, "node": int, "calls": int, "finished": int,
        "token_digest": bytes, "created_at": float, "lost": str,
        "labels": str, "used_at": float, "restore_s": float, "replay_s": float, "wait_s": float,
    }  # fmt: skip
    zeros = dict.fromkeys(("restore_s", "replay_s", "wait_s"), "0.0")
    values = {"labels": "'{}'", "used_at": "created_at", **zeros}
    rebuild(tables, "rollouts", checked_table(tables, "rollouts", rollouts), values)


def _to_4(tables: "sqlite_utils.Database") -> None:
    create = (
        "CREATE TABLE steps (rollout INTEGER, turn INTEGER, record INTEGER, outcome INTEGER, steps_checksum INTEGER "
        "GENERATED ALWAYS AS ((rollout * 1000003 + turn * 65537 + record * 257 + outcome) % 4294967291) STORED, "
        "PRIMARY KEY (rollout, turn)) WITHOUT ROWID"
    )
    rebuild(tables, "steps", create, {})


def _to_5(tables: "sqlite_utils.Database") -> None:
    records: dict[str, type] = {
        "id": int, "tree": int, "source": int, "key": bytes, "target": int, "call": int, "upload": int, "answer": int,
        "effect": int, "seconds": float, "recorded_at": float, "private": int, "reproducible": int,
        "age_s": float, "proven": int, "quarantined": int,
    }  # fmt: skip
    # The first stores lack the tables that were added later; they are created afterwards.
    present = set(tables.table_names())
    quarantined = "COALESCE((SELECT f.quarantined FROM findings f WHERE f.record = records_before.id), 0)"
    quarantined = quarantined if "findings" in present else "0"
    rebuild(tables, "records", checked_table(tables, "records", records), {"quarantined": quarantined})
    unchanged: dict[str, tuple[dict[str, type], str | tuple[str, ...]]] = {
        "meta": ({"name": str, "value": str}, "name"),
        "shares": ({"task": str, "tree": int}, ("task", "tree")),
        "notes": ({"rollout": int, "value": str}, "rollout"),
        "findings": ({"record": int, "tree": int, "why": str, "quarantined": int, "at": float}, "record"),
        "audits": (
            {"tree": int, "kind": str, "checked": int, "differing": int, "unreachable": int, "at": float},
            ("tree", "kind"),
        ),
        "masks": ({"task": str, "value": str}, "task"),
    }
    for name, (columns, key) in unchanged.items():
        if name in present:
            rebuild(tables, name, checked_table(tables, name, columns, key), {})


def _to_6(tables: "sqlite_utils.Database") -> None:
    records: dict[str, type] = {
        "id": int, "tree": int, "source": int, "key": bytes, "target": int, "call": int, "upload": int, "answer": int,
        "effect": int, "seconds": float, "recorded_at": float, "private": int, "reproducible": int,
        "age_s": float, "proven": int, "quarantined": int,
        "cpu_s": float, "peak_bytes": int, "read_bytes": int, "written_bytes": int,
    }  # fmt: skip
    unknown = dict.fromkeys(("cpu_s", "peak_bytes", "read_bytes", "written_bytes"), "NULL")
    rebuild(tables, "records", checked_table(tables, "records", records), unknown)


MIGRATIONS = (
    Migration(
        2,
        "rows get checksums, and tokens of rollouts are kept as digests. Rollouts that still run are refused from then "
        "on, because calls have other keys; trees stay for reading and export, and new rollouts begin new trees",
        _to_2,
    ),
    Migration(3, "rollouts get labels, and remember when they were last used", _to_3),
    Migration(4, "steps get checksums", _to_4),
    Migration(5, "all other rows get checksums, and records say whether an audit has quarantined them", _to_5),
    Migration(6, "records say what their calls used of the machine", _to_6),
)
"""All migrations, one for each version from 2 on, in order."""


def pending(version: int) -> tuple[Migration, ...]:
    """Return the migrations that a file of this version needs, in order."""
    return tuple(migration for migration in MIGRATIONS if migration.version > version)


def copy_path(path: Path, version: int) -> Path:
    """Return where the copy of a file of this version is kept before its upgrade."""
    return path.with_name(f"{path.name}.schema-{version}")


def migrate(tables: "sqlite_utils.Database", path: Path, version: int) -> None:
    """Bring a file of a version, outside a transaction, to `SCHEMA_VERSION`, or leave it unchanged. Blocking.

    Raises ForeignDatabaseError if the file has damaged rows, and OSError or sqlite3.Error if the disk is full or fails.
    """
    migrations = pending(version)
    if not migrations:
        return
    copy = copy_path(path, version)
    log.info("upgrading the store; the old file is kept", schema=version, to=SCHEMA_VERSION, copy=str(copy))
    copy_database(tables.conn, copy)
    tables.execute("PRAGMA synchronous=FULL")
    tables.execute("BEGIN IMMEDIATE")
    try:
        for migration in migrations:
            migration.run(tables)
        tables.execute("UPDATE meta SET value = ? WHERE name = 'schema'", (str(SCHEMA_VERSION),))
        tables.execute("COMMIT")
    except BaseException:
        if tables.conn.in_transaction:
            tables.execute("ROLLBACK")
        raise


def copy_database(source: sqlite3.Connection, target: Path) -> None:
    """Write a durable copy of a database in use, whole or not at all. Raises OSError or sqlite3.Error."""
    draft = target.with_name(f"{target.name}.draft")
    try:
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600)
        with closing(sqlite3.connect(draft)) as copy:
            source.backup(copy)
        sync_path(draft)
        draft.rename(target)
        sync_path(target.parent)
    finally:
        draft.unlink(missing_ok=True)
