"""What the words of a statement, and of what it may call, say about its answer (pure).

No decision about writing hangs on this: the server decides that. Here a word too many costs a miss, so whatever may be
meant is taken to be meant, in strings and comments too.
"""

import re
from collections.abc import Mapping

_OPEN = r"""(?:"|\s|/\*.*?\*/|--[^\n]*\n)*\("""
_CALLS = (
    "now clock_timestamp statement_timestamp transaction_timestamp timeofday age random random_normal gen_random_uuid "
    r"gen_random_bytes uuid_generate_\w+ uuidv7 pg_sleep\w* pg_relation_filepath inet_client_\w+ inet_server_\w+ "
    r"pg_current_\w+ txid_\w+ pg_snapshot_\w+ pg_backend_pid pg_postmaster_\w+ pg_conf_load_time current_database "
    "current_query lo_creat lo_create lo_import lo_from_bytea"
)
_WORDS = (
    r"current_timestamp current_time current_date localtime localtimestamp current_catalog tablesample pg_stat_\w+ "
    "pg_locks pg_database xmin xmax cmin cmax"
)

VOLATILE = re.compile(
    rf"\b(?:{'|'.join(_WORDS.split())})\b|\b(?:{'|'.join(_CALLS.split())}){_OPEN}"
    r"|'\s*(?:now|today|tomorrow|yesterday)\b",
    re.IGNORECASE | re.DOTALL,
)
"""Words whose value is another in another clone or at another moment."""

SESSION = re.compile(
    r"\b(?:set_config|pg_(?:try_)?advisory_\w+|currval|lastval|setseed|pg_notify|dblink\w*|pg_export_snapshot"
    r"|prepare|execute|deallocate|discard)\b",
    re.IGNORECASE,
)
"""What changes or reads what a connection alone has, and no rollback undoes: it goes to the rollout's own at once."""

CURSOR = re.compile(r"\b(?:fetch|move|close)\b", re.IGNORECASE)
"""What moves a cursor, which no rollback moves back."""

_NAME = re.compile(r"[a-z_\x80-\U0010ffff][\w$\x80-\U0010ffff]*", re.IGNORECASE)


def reach(sql: str, definitions: Mapping[str, str]) -> str:
    """Return sql with the definitions of all functions, views, triggers and defaults that its words may lead to.

    definitions: lower-case name -> text, of what the database's users made.
    """
    texts, seen, pending = [sql], set[str](), [sql]
    while pending:
        for name in {found.lower() for found in _NAME.findall(pending.pop())} & definitions.keys() - seen:
            seen.add(name)
            texts.append(definitions[name])
            pending.append(definitions[name])
    return "\n".join(texts)
