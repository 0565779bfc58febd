"""What protocols remember of running rollouts: the names, ports and images of the containers that clients see."""

from proxy.storage.database import StoreDatabase
from proxy.storage.schema import is_whole

PUT_NOTE = (
    "INSERT INTO notes VALUES (?1, json_object(?2, json(?3))) "
    "ON CONFLICT DO UPDATE SET value = json_set(value, '$.' || ?2, json(?3))"
)
"""Writes what a protocol remembers; other protocols' notes stay. Values: the rollout, the protocol, and JSON."""
_LOST = "what a protocol remembers of it is damaged in the store"
"""Why a rollout with a damaged note is refused: what its container or its commands are given is not known."""


class NoteStore:
    """The notes of the store, as JSON, by rollout and protocol. They end with their rollout."""

    def __init__(self, database: StoreDatabase) -> None:
        """Use the store's database. Running rollouts whose note is damaged have lost their position from now on."""
        self._database = database
        damaged = f"SELECT rollout FROM notes WHERE NOT {is_whole('notes')}"
        if database.row(damaged, ()):
            with database.transaction() as execute:
                sql = f"UPDATE rollouts SET lost = ? WHERE finished = 0 AND lost = '' AND id IN ({damaged})"
                execute(sql, (_LOST,))

    def put(self, rollout: int, protocol: str, value: str) -> None:
        """Write what a protocol remembers of a running rollout, as JSON; other protocols' notes stay. 0.1 ms."""
        with self._database.transaction() as execute:
            execute(PUT_NOTE, (rollout, protocol, value))

    def of_task(self, task: str, protocol: str) -> dict[str, str]:
        """Return a protocol's notes on a task's running rollouts, by the rollouts' names."""
        sql = (
            "SELECT r.name, json_extract(n.value, '$.' || ?2) AS note FROM notes n JOIN rollouts r ON r.id = n.rollout "
            f"WHERE r.task = ?1 AND r.finished = 0 AND {is_whole('notes', 'n')} AND note IS NOT NULL"
        )
        return dict(self._database.rows(sql, (task, protocol)))
