"""The tables of the store, and whether a file is ours."""

from sqlite_utils import Database

SCHEMA_VERSION = 1

_TABLES: dict[str, dict[str, type]] = {
    "meta": {"name": str, "value": str},
    "tasks": {"name": str, "spec": str, "created_at": float},
    "trees": {"id": int, "task": str, "root_key": str, "spec": str, "root": int, "created_at": float},
    "nodes": {"id": int, "tree": int, "exact": bytes, "content": bytes, "diverged": str, "pinned": int},
    "records": {
        "id": int, "tree": int, "source": int, "key": bytes, "target": int, "call": int, "upload": int, "answer": int,
        "effect": int, "seconds": float, "recorded_at": float, "private": int, "reproducible": int,
    },
    "rollouts": {
        "id": int, "task": str, "name": str, "tree": int, "start": int, "node": int, "calls": int, "finished": int,
        "token": str, "created_at": float,
    },
    "blobs": {"id": int, "digest": bytes, "packed": int, "data": bytes},
}  # fmt: skip
_KEYS = {"meta": "name", "tasks": "name"}
_INDEXES = (
    ("trees", ["task", "root_key"]),
    ("nodes", ["tree"]),
    ("records", ["tree"]),
    ("rollouts", ["task", "name"]),
    ("rollouts", ["tree"]),
    ("rollouts", ["token"]),
)


class ForeignDatabaseError(ValueError):
    """The file is a database of something else, or of another version."""


def check_ours(database: Database) -> None:
    """Look at a file before anything is written to it.

    Raises:
        NotOurs: it holds something else.
    """
    tables = set(database.table_names())
    if not tables:
        return
    if "meta" not in tables:
        raise ForeignDatabaseError(f"it is a database of something else, with {', '.join(sorted(tables))}")
    row = database.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
    # Without a row it is ours, killed while it was made.
    if row is not None and row[0] != str(SCHEMA_VERSION):
        raise ForeignDatabaseError(
            f"it has schema {row[0]}, this Forkpoint knows {SCHEMA_VERSION}: use the version that wrote it"
        )


def make_tables(database: Database) -> None:
    """Make what is not there yet."""
    for name, columns in _TABLES.items():
        database.table(name).create(columns, pk=_KEYS.get(name, "id"), if_not_exists=True)
    # A step is named by rollout and turn; without a row id it is stored once.
    database.execute(
        "CREATE TABLE IF NOT EXISTS steps (rollout INTEGER, turn INTEGER, record INTEGER, outcome INTEGER, "
        "PRIMARY KEY (rollout, turn)) WITHOUT ROWID"
    )
    # Which tasks use a tree that is filed under none.
    database.execute(
        "CREATE TABLE IF NOT EXISTS shares (task TEXT, tree INTEGER, PRIMARY KEY (task, tree)) WITHOUT ROWID"
    )
    # What a protocol knows of a running rollout: Docker's container.
    database.execute("CREATE TABLE IF NOT EXISTS notes (rollout INTEGER PRIMARY KEY, value TEXT)")
    # What audits found, and how often they looked.
    database.execute(
        "CREATE TABLE IF NOT EXISTS findings (record INTEGER PRIMARY KEY, tree INTEGER, why TEXT, quarantined INTEGER, "
        "at REAL)"
    )
    database.execute(
        "CREATE TABLE IF NOT EXISTS audits (tree INTEGER, kind TEXT, checked INTEGER, differing INTEGER, "
        "unreachable INTEGER, at REAL, PRIMARY KEY (tree, kind)) WITHOUT ROWID"
    )
    database.execute("CREATE TABLE IF NOT EXISTS masks (task TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
    for table, indexed in _INDEXES:
        database.table(table).create_index(indexed, if_not_exists=True)
    database.table("blobs").create_index(["digest"], unique=True, if_not_exists=True)
    database.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (str(SCHEMA_VERSION),))
