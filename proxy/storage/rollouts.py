"""Rollouts as rows, with the steps that they took and the notes that protocols keep of them.

Steps are written to the journal first and folded in here later: a reader folds the journal before it asks.
"""

import time
from collections.abc import Sequence
from typing import Any

from proxy.storage.database import StoreDatabase
from proxy.storage.journal import JournalEntry


class RolloutStore:
    """Writes and reads rollouts."""

    def __init__(self, database: StoreDatabase) -> None:
        self._database = database

    def create(self, task: str, name: str, tree: int, node: int, token: str) -> int:
        """Write a rollout that is at node and has made no call; return its number."""
        rollout = self._database.take_number("rollouts")
        values = (rollout, task, name, tree, node, node, 0, 0, token, time.time())
        with self._database.transaction() as execute:
            execute(f"INSERT INTO rollouts VALUES ({','.join('?' * len(values))})", values)
        return rollout

    def finish(self, rollout: int) -> None:
        """Write that a rollout has ended, and delete the notes on it."""
        with self._database.transaction() as execute:
            execute("DELETE FROM notes WHERE rollout = ?", (rollout,))
            execute("UPDATE rollouts SET finished = 1 WHERE id = ?", (rollout,))

    def of_task(
        self,
        task: str,
        *,
        name: str | None = None,
        running: bool = False,
        newest: bool = False,
        offset: int = 0,
        limit: int = -1,
    ) -> list[dict[str, Any]]:
        """Return a task's rollouts, each with the root of its tree. Fold the journal before.

        Args:
            task: Name of the task.
            name: Only the rollouts of this name; None for all.
            running: Only the rollouts that have not ended.
            newest: The newest first, instead of the oldest.
            offset: How many rollouts to skip.
            limit: How many rollouts to return at most; -1 for all.
        """
        sql = "SELECT r.*, (SELECT root FROM trees WHERE id = r.tree) AS root FROM rollouts r WHERE task = :task"
        sql += " AND name = :name" if name is not None else ""
        sql += " AND finished = 0" if running else ""
        sql += f" ORDER BY id {'DESC' if newest else 'ASC'} LIMIT :limit OFFSET :offset"
        return self._database.views(sql, {"task": task, "name": name, "limit": limit, "offset": offset})

    def by_token(self, token: str) -> tuple[str, str] | None:
        """Return task and name of the running rollout with this token; None if there is none."""
        row = self._database.row("SELECT task, name FROM rollouts WHERE token = ? AND finished = 0", (token,))
        return None if row is None else (row[0], row[1])

    def steps(self, rollout: int, *, offset: int = 0, limit: int = -1) -> list[tuple[int, int, int]]:
        """Return turn, record and outcome of a rollout's steps, in order. Fold the journal before."""
        sql = "SELECT turn, record, outcome FROM steps WHERE rollout = ? ORDER BY turn LIMIT ? OFFSET ?"
        return self._database.rows(sql, (rollout, limit, offset))

    def latest_records(self, rollout: int, count: int) -> list[int]:
        """Return the records of a rollout's last steps, the last one first. Fold the journal before."""
        sql = "SELECT record FROM steps WHERE rollout = ? ORDER BY turn DESC LIMIT ?"
        return [row[0] for row in self._database.rows(sql, (rollout, count))]

    def fold(self, steps: Sequence[JournalEntry]) -> None:
        """Write steps, and the node that each rollout reached, in one transaction. Known steps are skipped."""
        last = {step.rollout: step for step in steps}
        with self._database.transaction():
            self._database.execute_many("INSERT OR IGNORE INTO steps VALUES (?, ?, ?, ?)", steps)
            self._database.execute_many(
                "UPDATE rollouts SET calls = ?1, node = COALESCE((SELECT target FROM records WHERE id = ?2), node) "
                "WHERE id = ?3 AND calls < ?1",
                [(step.turn + 1, step.record, step.rollout) for step in last.values()],
            )

    def put_note(self, rollout: int, protocol: str, value: str) -> None:
        """Write what a protocol remembers of a running rollout, as JSON; other protocols' notes stay. 0.1 ms."""
        sql = (
            "INSERT INTO notes VALUES (?1, json_object(?2, json(?3))) "
            "ON CONFLICT DO UPDATE SET value = json_set(value, '$.' || ?2, json(?3))"
        )
        with self._database.transaction() as execute:
            execute(sql, (rollout, protocol, value))

    def notes(self, task: str, protocol: str) -> dict[str, str]:
        """Return a protocol's notes on a task's running rollouts, by the rollouts' names."""
        sql = (
            "SELECT r.name, json_extract(n.value, '$.' || ?2) AS note FROM notes n JOIN rollouts r ON r.id = n.rollout "
            "WHERE r.task = ?1 AND r.finished = 0 AND note IS NOT NULL"
        )
        return dict(self._database.rows(sql, (task, protocol)))
