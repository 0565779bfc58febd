"""What protocols remember of running rollouts: the names, ports and images of the containers that clients see."""

from proxy.storage.database import StoreDatabase

PUT_NOTE = (
    "INSERT INTO notes VALUES (?1, json_object(?2, json(?3))) "
    "ON CONFLICT DO UPDATE SET value = json_set(value, '$.' || ?2, json(?3))"
)
"""Writes what a protocol remembers; other protocols' notes stay. Values: the rollout, the protocol, and JSON."""


class NoteStore:
    """The notes of the store, as JSON, by rollout and protocol. They end with their rollout."""

    def __init__(self, database: StoreDatabase) -> None:
        """Use the store's database."""
        self._database = database

    def put(self, rollout: int, protocol: str, value: str) -> None:
        """Write what a protocol remembers of a running rollout, as JSON; other protocols' notes stay. 0.1 ms."""
        with self._database.transaction() as execute:
            execute(PUT_NOTE, (rollout, protocol, value))

    def of_task(self, task: str, protocol: str) -> dict[str, str]:
        """Return a protocol's notes on a task's running rollouts, by the rollouts' names."""
        sql = (
            "SELECT r.name, json_extract(n.value, '$.' || ?2) AS note FROM notes n JOIN rollouts r ON r.id = n.rollout "
            "WHERE r.task = ?1 AND r.finished = 0 AND note IS NOT NULL"
        )
        return dict(self._database.rows(sql, (task, protocol)))
