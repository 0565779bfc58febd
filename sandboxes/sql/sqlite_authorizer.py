"""What SQLite's authorizer is told of a statement, and what follows (pure).

The authorizer is asked while a statement is compiled, for all that it and the views, triggers and virtual tables in it
do. Nothing here looks at a statement's text.
"""

import sqlite3
from enum import Enum

ATTACHABLE = frozenset({"", ":memory:"})
"""Databases that touch no file of anybody's. `VACUUM` attaches "" itself."""

READ_PRAGMAS = frozenset({
    "table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list",
    "foreign_key_check", "integrity_check", "quick_check", "collation_list", "function_list", "module_list",
    "pragma_list", "compile_options",
})  # fmt: skip
"""Pragmas that read, whatever their argument."""
SETTINGS = (
    "foreign_keys", "recursive_triggers", "ignore_check_constraints", "reverse_unordered_selects",
    "legacy_alter_table", "query_only", "automatic_index", "cell_size_check", "trusted_schema",
    "defer_foreign_keys", "synchronous", "cache_size", "case_sensitive_like",
)  # fmt: skip
"""Pragmas that set something of the connection; without an argument they read it (the last one cannot)."""
FILE_PRAGMAS = frozenset({"user_version", "application_id", "incremental_vacuum"})
"""Pragmas that write to the database where they have an argument, or always (the last one). `optimize` is none of them:
what it does depends on the queries that its connection has seen, which other rollouts do not run again."""
VALUE_PRAGMAS = frozenset(
    {
        "user_version",
        "application_id",
        "schema_version",
        "encoding",
        "page_count",
        "page_size",
        "freelist_count",
        "auto_vacuum",
        "data_version",
    }
)  # fmt: skip | (frozenset(SETTINGS) - {"case_sensitive_like"})
"""Pragmas that read where they have no argument."""

REFUSED_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer"})
HIDDEN_TABLES = frozenset({"sqlite_stmt"})
"""Shows what the connection, not the database, holds."""
COUNTERS = frozenset({"changes", "last_insert_rowid", "total_changes"})
"""Functions that read what earlier statements of the connection left."""

_READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_READ})
_CHANGES_ROWS = frozenset({sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE})


class Act(Enum):
    """What one request to the authorizer is about.

    ROWS: rows are inserted, updated or deleted, or a virtual table gets ready to; a read-only connection refuses by
    itself where it comes to that. OWN: needs a connection of the rollout's own: it defines something, or concerns the
    connection. SETTING: a pragma that sets something of the connection.
    """

    READ = "read"
    ROWS = "rows"
    PRIVATE = "private"
    SETTING = "setting"
    REFUSED = "refused"


def act_of(action: int, first: str | None, second: str | None) -> Act:
    """Return what the authorizer's request is about; first and second are its third and fourth arguments."""
    if action in _READS:
        forbidden = (action == sqlite3.SQLITE_FUNCTION and str(second).lower() in REFUSED_FUNCTIONS) or (
            action == sqlite3.SQLITE_READ and str(first).lower() in HIDDEN_TABLES
        )
        return Act.REFUSED if forbidden else Act.READ
    if action in _CHANGES_ROWS:
        return Act.ROWS
    if action == sqlite3.SQLITE_PRAGMA:
        return _pragma(str(first).lower(), second)
    if action == sqlite3.SQLITE_ATTACH and first not in ATTACHABLE:
        return Act.REFUSED
    return Act.PRIVATE


def _pragma(name: str, argument: str | None) -> Act:
    if name in READ_PRAGMAS or (argument is None and name in VALUE_PRAGMAS.union(SETTINGS)):
        return Act.READ
    if name in FILE_PRAGMAS:
        return Act.PRIVATE
    return Act.SETTING if name in SETTINGS else Act.REFUSED


def refusal(action: int, first: str | None, second: str | None) -> str:
    """Return what the agent is told of a statement that is never allowed."""
    if action == sqlite3.SQLITE_PRAGMA:
        return (
            f"PRAGMA {first} is not available here: it concerns the file or how it is stored, which the sandbox "
            "manages. Leave it out."
        )
    if action == sqlite3.SQLITE_ATTACH:
        return (
            "no file can be attached or written (ATTACH, VACUUM INTO): a task's databases are those that it names in "
            "`databases`, each reached by `database`. ATTACH ':memory:' works."
        )
    if action == sqlite3.SQLITE_READ:
        return f"table {first} is not available here: it shows the connection, which rollouts share."
    return f"function {second} is not available here."
