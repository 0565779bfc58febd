"""What `currval` and `lastval` know in a session: read after a call, and restored in another session.

Theory of operation. The server keeps, for each session, the value that `nextval` or `setval` last gave for each
sequence, and which sequence `nextval` used last (`currval` and `lastval` show them; src/backend/commands/sequence.c).
No catalog shows these values, so they are queried one by one. In a session that has used nothing:

1. `setval` defines `currval` and leaves `lastval` alone.
2. `nextval` defines both. After `setval(sequence, value, false)` it gives exactly this value.

So a use can be restored if each sequence still stands at its `currval`, and it is known which sequence `lastval` shows.
Elsewhere (after `RESTART`, `setval(…, false)` or a `CACHE`) the use counts as session state that cannot be kept.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

import psycopg

from sandboxes.postgres.catalog import EQUALS, CatalogConnection

USES_SEQUENCES = re.compile(r"\b(?:nextval|setval|discard)\b", re.IGNORECASE)
"""Matches what may change `currval` or `lastval` and nothing else, such as `setval` to a sequence's own value."""
_SETS = re.compile(r"\bsetval\b", re.IGNORECASE)
_UNDEFINED = {"55000", "42P01"}
"""SQLSTATEs of `currval` and `lastval` where the session has no value, or the sequence was dropped."""
_AT = f"""SELECT pg_catalog.format('%%I.%%I', schemaname, sequencename), last_value FROM pg_catalog.pg_sequences
    WHERE pg_catalog.concat(schemaname, '.', sequencename) {EQUALS} ANY(%s)"""


@dataclass(frozen=True, slots=True)
class SequenceUse:
    """What a session knows of sequences."""

    # `currval` of each sequence that has one, by quoted name with schema.
    values: dict[str, int] = field(default_factory=dict)
    last: str = ""  # The sequence whose value `lastval` shows; empty if it shows none.
    restorable: bool = True  # Whether another session can be given the same use.

    def __bool__(self) -> bool:
        return bool(self.values or self.last or not self.restorable)


def observe(
    connection: CatalogConnection, before: SequenceUse, text: str, sequences: Collection[str], changed: Collection[str]
) -> SequenceUse:
    """Return what the session knows of sequences after a call; no transaction may be open.

    `text` is the call's text and all that it may run. `sequences` are unquoted names that the session may have used,
    and `changed` those of them whose next value the call changed.
    """
    at: dict[str, int | None] = dict(connection.execute(_AT, (list(sequences),)).fetchall())
    moved = {name for (name,) in connection.execute(_AT.replace(", last_value", ""), (list(changed),))}
    known = {name: _value(connection, "SELECT pg_catalog.currval(%s)", name) for name in sorted({*at, *before.values})}
    values = {name: value for name, value in known.items() if isinstance(value, int)}
    last_value = _value(connection, "SELECT pg_catalog.lastval()")
    last = _last(before, values, last_value, moved, sets=_SETS.search(text) is not None)
    unclear = last is None or any(value is _HIDDEN for value in known.values())
    return SequenceUse(values, last or "", not unclear and all(at.get(name) == value for name, value in values.items()))


def restore(connection: CatalogConnection, use: SequenceUse) -> None:
    """Give a session that has used nothing a restorable use. The sequences stay where they are."""
    for name, value in use.values.items():
        if name == use.last:
            connection.execute("SELECT pg_catalog.setval(%s, %s, false)", (name, value))
            connection.execute("SELECT pg_catalog.nextval(%s)", (name,))
        # With a `CACHE`, `nextval` has moved the sequence on.
        connection.execute("SELECT pg_catalog.setval(%s, %s)", (name, value))


class _Hidden:
    """Stands for a value that the session may not read."""


_HIDDEN = _Hidden()


def _value(connection: CatalogConnection, query: str, *parameters: str) -> int | _Hidden | None:
    try:
        return int(connection.execute(query, parameters).fetchone()[0])  # type: ignore[index]
    except psycopg.Error as error:
        return None if error.sqlstate in _UNDEFINED else _HIDDEN


def _last(
    before: SequenceUse, values: dict[str, int], last_value: int | _Hidden | None, moved: set[str], *, sets: bool
) -> str | None:
    """Return the sequence that `lastval` shows; an empty string if it shows none, None if several may be it."""
    if last_value is None:
        return ""
    alike = [name for name, value in values.items() if value == last_value]
    # Only `nextval` makes a sequence the last one. Without `setval`, each sequence that moved was used by it.
    used = [name for name in alike if name in moved] if not sets else []
    if len(used) == 1:
        return used[0]
    if not used and not sets and before.last in alike:
        return before.last
    return alike[0] if len(alike) == 1 else None
