"""Volatile and session-bound statements, recognised by the names that they contain (pure).

Theory of operation. A result that depends on the clock, on random numbers or on the identity of a clone must not be
shared. PostgreSQL does not report such use, so the text is searched for names, strings and comments included, after it
was extended by the definitions of all functions, views, triggers and defaults whose names occur in it (`reach`). A
false match costs a miss and never a wrong hit. Whether a statement writes is decided by the server, in a read-only
transaction.
"""

import re
from collections.abc import Mapping

_PARENTHESIS = r"""["\s]*(?:\(|/\*|--)"""
"""What follows the name of a function: its arguments, or a comment, behind which they may be. Comments nest, and an
expression that looks behind them takes time that is exponential in their number."""
_FUNCTIONS = (
    "now clock_timestamp statement_timestamp transaction_timestamp timeofday age random random_normal gen_random_uuid "
    r"gen_random_bytes uuid_generate_\w+ uuidv7 pg_sleep\w* pg_relation_filepath inet_client_\w+ inet_server_\w+ "
    r"pg_current_\w+ txid_\w+ pg_snapshot_\w+ pg_backend_pid pg_postmaster_\w+ pg_conf_load_time current_database "
    r"pg_control_\w+ pg_tablespace_size "
    "current_query lo_creat lo_create lo_import lo_from_bytea pg_relation_filenode uuidv4 array_sample array_shuffle "
    "pg_cursor pg_lock_status pg_show_all_settings"
)
_NAMES = (
    r"show\s+all current_timestamp current_time current_date localtime localtimestamp current_catalog tablesample "
    r"pg_stat(?:io)?_\w+ pg_timezone_\w+ pg_cursors pg_prepared_\w+ pg_locks pg_settings pg_database xmin xmax cmin "
    "cmax ctid session_user "
    "session_authorization system_user pg_roles pg_user pg_shadow pg_authid pg_group "
    "pg_auth_members pg_db_role_setting pg_shdescription enabled_roles applicable_roles"
)

_APPLICATION_NAME = (
    r"\bapplication_name\b(?!(?<=\breset\sapplication_name)"
    r"|(?:(?<=\bset\sapplication_name)|(?<=\bsession\sapplication_name)|(?<=\blocal\sapplication_name))\s*(?:=|to\b))"
)
"""Matches the session's name, which shows the worker. A `SET` or `RESET` of it shows nothing, and can be replayed."""

VOLATILE = re.compile(
    rf"{_APPLICATION_NAME}|\b(?:{'|'.join(_NAMES.split())})\b|\b(?:{'|'.join(_FUNCTIONS.split())}){_PARENTHESIS}"
    # As the whole literal, or within an array, a row or a range.
    rf"|['$](?:[^'$]*[\[({{,\"])?\s*(?:now|today|tomorrow|yesterday)\b|\bu&['\"]"
    # The same words with escapes in them (PostgreSQL's manual, 4.1.2.2).
    r"|\be'(?:\s|\\[bfnrt])*(?:[nowtdaymres]*\\[0-7xu]|(?:now|today|tomorrow|yesterday)\b)",
    re.IGNORECASE | re.DOTALL,
)
"""Matches functions, columns and literals whose value differs between clones or moments."""

SESSION = re.compile(
    r"\b(?:pg_(?:try_)?advisory_\w+|currval|lastval|pg_notify|dblink\w*|pg_export_snapshot"
    r"|prepare|execute|deallocate|discard)\b",
    re.IGNORECASE,
)
"""Matches what changes or reads state of the connection that no rollback undoes. It runs on a private clone only."""

UPKEEP = re.compile(
    r"(?:\A|[;'$]|\*/|--[^\n]*\n|\b(?:begin|then|else|loop)\b)\s*(?:vacuum|analy[sz]e|cluster|reindex)\b", re.IGNORECASE
)
"""Matches statements that change where later rows go or which plans are chosen, and none of the schema or rows. A
read-only transaction accepts some of them, and its rollback does not undo them. EXPLAIN ANALYZE does not match. A text
that is put together while it runs matches `SESSION`, by its EXECUTE."""

CURSOR = re.compile(r"\b(?:fetch|move|close)\b", re.IGNORECASE)
"""Matches statements that move a cursor, which no rollback moves back."""

_NAME = re.compile(r"[a-z_\x80-\U0010ffff][\w$\x80-\U0010ffff]*", re.IGNORECASE)
"""Matches an identifier (PostgreSQL's manual, 4.1.1)."""


def reach(sql: str, definitions: Mapping[str, str]) -> str:
    """Return a text with the definitions, by lower-case name, of all objects that it may use, directly or not."""
    texts, seen, pending = [sql], set[str](), [sql]
    # Names that are only found in quotes, and operators.
    odd = [name for name in definitions if _NAME.fullmatch(name) is None]
    while pending:
        text = pending.pop().lower()
        names = set(_NAME.findall(text)).union(name for name in odd if name.replace('"', '""') in text)
        for name in names & definitions.keys() - seen:
            seen.add(name)
            texts.append(definitions[name])
            pending.append(definitions[name])
    return "\n".join(texts)
