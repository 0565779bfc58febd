"""What protocols remember of running rollouts: the names, ports and images of the containers that clients see."""

import json

from proxy.storage.database import StoreDatabase
from proxy.storage.schema import is_whole

OWNER = "rollout"
"""The member of a note that repeats the number of its rollout; no protocol has this name."""
PUT_NOTE = (
    f"INSERT INTO notes VALUES (?1, json_object('{OWNER}', ?1, ?2, json(?3))) "
    f"ON CONFLICT DO UPDATE SET value = json_set(value, '$.{OWNER}', ?1, '$.' || ?2, json(?3))"
)
"""Writes what a protocol remembers; other protocols' notes stay. Values: the rollout, the protocol, and JSON."""
_LOST = "what a protocol remembers of it is damaged in the store"
"""Why a rollout with a damaged note is refused: what its container or its commands are given is not known."""


class NoteStore:
    """The notes of the store, as JSON, by rollout and protocol. They end with their rollout."""

    def __init__(self, database: StoreDatabase) -> None:
        """Use the store's database. Running rollouts whose note is damaged have lost their position from now on.

        A damaged note names its rollout twice. If the two differ, either may be the damage, so the note may be that of
        any running rollout without a whole note: all of them are refused. The same holds for a note whose text is
        damaged so that it names none, and for notes that were written before they named it.
        """
        self._database = database
        sql = f"SELECT rollout, CAST(value AS BLOB) FROM notes WHERE NOT {is_whole('notes')}"
        damaged = database.rows(sql, ())
        if not damaged:
            return
        owners = [_owner(number, value) for number, value in damaged]
        which = f"id IN ({', '.join(str(owner) for owner in owners if owner is not None)})"
        if None in owners:
            which = f"id NOT IN (SELECT rollout FROM notes WHERE {is_whole('notes')})"
        with database.transaction() as execute:
            execute(f"UPDATE rollouts SET lost = ? WHERE finished = 0 AND lost = '' AND {which}", (_LOST,))

    def put(self, rollout: int, protocol: str, value: str) -> None:
        """Write what a protocol remembers of a running rollout, as JSON; other protocols' notes stay."""
        with self._database.transaction() as execute:
            execute(PUT_NOTE, (rollout, protocol, value))

    def of_task(self, task: str, protocol: str) -> dict[str, str]:
        """Return a protocol's notes on a task's running rollouts, by the rollouts' names."""
        sql = (
            "SELECT r.name, json_extract(n.value, '$.' || ?2) AS note FROM notes n JOIN rollouts r ON r.id = n.rollout "
            f"WHERE r.task = ?1 AND r.finished = 0 AND {is_whole('notes', 'n')} AND note IS NOT NULL"
        )
        return dict(self._database.rows(sql, (task, protocol)))


def _owner(number: object, value: object) -> int | None:
    """Return the rollout of a damaged note; None if the row does not name the same rollout twice (pure)."""
    try:
        repeated = json.loads(value)[OWNER] if isinstance(value, bytes) else None
    except (ValueError, TypeError, KeyError):
        return None
    return number if isinstance(number, int) and type(repeated) is int and repeated == number else None
