"""Stores that become one, and one that is divided: for backups of a proxy with another number of workers.

Two stores give the same numbers to different rows. So the rows of one get other numbers when both become one: all of
its numbers move by the same distance. Blobs keep nothing but their bytes: equal ones become one row.

Both stores were restored before: they have the tables of this version, and none of their rows is damaged.
"""

from contextlib import closing
from pathlib import Path

from proxy.shares import Share
from proxy.storage.blobs import delete_unused_blobs
from proxy.storage.database import StoreDatabase
from proxy.storage.notes import OWNER

_NUMBERS = {
    "tasks": (), "masks": (), "trees": ("id", "root"), "nodes": ("id", "tree"),
    "records": ("id", "tree", "source", "target"), "rollouts": ("id", "tree", "start", "node"),
    "overheads": ("rollout",), "steps": ("rollout", "record"), "shares": ("tree",), "notes": ("rollout",),
    "findings": ("record", "tree"), "audits": ("tree",),
}  # fmt: skip
"""The tables whose rows move, and their columns with numbers. Of `meta`, nothing moves: it is about one file."""
_BLOBS = ("call", "upload", "answer")
"""Columns of `records` that name blobs; 0 is none."""
_SHARED = "(task = '' OR task GLOB '/*')"
"""Whether a tree belongs to all tasks of its root key; see `TreeStore`."""


def join(store: Path, other: Path) -> int:
    """Add all rows of another store; return how far its numbers have moved. Blocking.

    Raises StoreError if both have the same task, or the disk is full; the store is unchanged then.
    """
    with closing(StoreDatabase(store, sync="FULL")) as database:
        distance = database.last_number
        database.tables.attach("other", other)
        with database.transaction(durable=True) as execute:
            execute("CREATE TEMP TABLE moved (id INTEGER PRIMARY KEY, blob INTEGER)")
            execute(
                "INSERT OR IGNORE INTO blobs (id, digest, packed, data) "
                "SELECT id + ?, digest, packed, data FROM other.blobs", (distance,),
            )  # fmt: skip
            execute("INSERT INTO moved SELECT o.id, b.id FROM other.blobs o JOIN main.blobs b ON b.digest = o.digest")
            for table, numbers in _NUMBERS.items():
                columns = [row[1] for row in execute(f"PRAGMA table_info({table})")]
                values = ", ".join(_moved(table, column, column in numbers) for column in columns)
                names = ", ".join(columns)
                execute(f"INSERT INTO {table} ({names}) SELECT {values} FROM other.{table} r", {"distance": distance})
    return distance


def _moved(table: str, column: str, is_number: bool) -> str:
    """Return the SQL expression of a column's value in the joined store."""
    if is_number:
        return f"r.{column} + :distance"
    if table == "records" and column in _BLOBS:
        return f"COALESCE((SELECT blob FROM moved WHERE id = r.{column}), 0)"
    if table == "notes" and column == "value":
        return f"json_set(r.value, '$.{OWNER}', r.rollout + :distance)"
    return f"r.{column}"


def keep_share(store: Path, share: Share) -> list[int]:
    """Delete what belongs to other workers; return the trees that stay. Blocking. Raises StoreError on a full disk."""
    with closing(StoreDatabase(store, sync="FULL")) as database:
        sql = f"SELECT name FROM tasks UNION SELECT task FROM rollouts UNION SELECT task FROM trees WHERE NOT {_SHARED}"
        sql += " UNION SELECT task FROM shares UNION SELECT task FROM masks"
        others = [row for row in database.rows(sql, ()) if not share.has(row[0])]
        with database.transaction(durable=True) as execute:
            # The deleted rows do not show their numbers any more.
            database.keep_numbers(execute)
            execute("CREATE TEMP TABLE others (task TEXT PRIMARY KEY)")
            database.execute_many("INSERT INTO others VALUES (?)", others)
            for table, column in (("tasks", "name"), ("rollouts", "task"), ("shares", "task"), ("masks", "task")):
                execute(f"DELETE FROM {table} WHERE {column} IN others")
            execute(f"DELETE FROM trees WHERE task IN others OR {_SHARED} AND id NOT IN (SELECT tree FROM shares)")
            for table in ("nodes", "records", "findings", "audits"):
                execute(f"DELETE FROM {table} WHERE tree NOT IN (SELECT id FROM trees)")
            for table in ("steps", "overheads", "notes"):
                execute(f"DELETE FROM {table} WHERE rollout NOT IN (SELECT id FROM rollouts)")
            delete_unused_blobs(execute)
        trees = [number for (number,) in database.rows("SELECT id FROM trees", ())]
        database.tables.vacuum()
    return trees
