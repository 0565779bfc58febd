"""Rules of SQLite's authorizer: what a statement does, and whether it is allowed (pure).

SQLite calls the authorizer while it compiles a statement, once for each action of the statement and of the views,
triggers and virtual tables that it uses (sqlite.org/c3ref/set_authorizer.html). No rule depends on a statement's text.
"""

import sqlite3
from enum import Enum

ATTACHABLE = frozenset({"", ":memory:"})
"""Names of databases in memory or in a temporary file, which may be attached. `VACUUM` attaches "" itself."""

READ_PRAGMAS = frozenset({
    "table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list",
    "foreign_key_check", "integrity_check", "quick_check", "collation_list", "function_list", "module_list",
    "pragma_list", "compile_options",
})  # fmt: skip
"""Pragmas that only read, with or without an argument."""
SETTINGS = (
    "foreign_keys", "recursive_triggers", "ignore_check_constraints", "reverse_unordered_selects",
    "legacy_alter_table", "query_only", "automatic_index", "cell_size_check", "trusted_schema",
    "defer_foreign_keys", "synchronous", "cache_size", "case_sensitive_like",
)  # fmt: skip
"""Pragmas that change a setting of the connection. Without an argument they read it, except for the last one."""
FILE_PRAGMAS = frozenset({"user_version", "application_id", "incremental_vacuum"})
"""Pragmas that write to the database: always (the last one), or with an argument. `optimize` is not allowed. Its effect
depends on earlier queries of the connection, which other rollouts never ran."""
VALUE_PRAGMAS = frozenset({
    "user_version", "application_id", "schema_version", "encoding", "page_count", "page_size", "freelist_count",
    "auto_vacuum", "data_version",
})  # fmt: skip
"""Pragmas that read a value of the database when they have no argument. FTS5 itself reads `data_version`."""

REFUSED_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer"})
"""Functions that load code or take pointers, and would break out of the worker's rules."""
HIDDEN_TABLES = frozenset({"sqlite_stmt"})
"""Tables that show the statements of the connection, which rollouts share, and not the database."""
STATISTICS = "sqlite_stat"
"""How the names of the tables begin that ANALYZE writes. A connection reads them once, with the schema."""
COUNTERS = frozenset({"changes", "last_insert_rowid", "total_changes"})
"""Functions that read counters which earlier statements of the connection left."""

_READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_READ})
_CHANGES_ROWS = frozenset({sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE})


class Act(Enum):
    """The kind of one action that a statement asks the authorizer for."""

    READ = "read"  # It reads.
    ROWS = "rows"  # It changes rows, or a virtual table prepares to; a read-only connection refuses the change itself.
    PRIVATE = "private"  # It needs a private connection, because it defines something, or changes the connection.
    SETTING = "setting"  # A pragma changes a setting of the connection.
    REFUSED = "refused"  # It is never allowed.


def act_of(action: int, first: str | None, second: str | None) -> Act:
    """Classify one action by its code and the third and fourth argument, whose meaning depends on the action."""
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
    """Return the error text for a statement that is never allowed."""
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
