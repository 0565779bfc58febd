"""Lists of a task's rollouts, in parts whose cost does not grow with the list."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from proxy.storage.database import StoreDatabase
from proxy.storage.rollouts import OF_AGENTS, SHOWN, labels_condition, mended


class RolloutIndex(StrEnum):
    """An order of a task's rollouts, by the name of its index: as they began, or by name."""

    BEGUN = "idx_rollouts_task"
    NAME = "idx_rollouts_task_name"


@dataclass(frozen=True, slots=True)
class RolloutFilters:
    """Which rollouts a list has."""

    labels: Mapping[str, str] = field(default_factory=dict)  # Only the rollouts with all of these labels.
    finished: bool | None = None  # Only those that have ended, or that have not; None for both.


class RolloutLists:
    """Reads lists of rollouts, each on a connection of its own."""

    def __init__(self, database: StoreDatabase) -> None:
        self._database = database
        # Of each task that was listed: the last rollout that was counted, and how many there were.
        self._counted: dict[str, tuple[int, int]] = {}

    def part(
        self, task: str, index: RolloutIndex, end: str, values: Mapping[str, Any], filters: RolloutFilters
    ) -> tuple[list[dict[str, Any]], int]:
        """Return a part of a task's rollouts, as `RolloutStore.of_task` has them, and how many there are.

        Fold the journal before. Blocking, for a thread. Filters read rows until the part is full, and all rows to
        count. `end` is the end of the query: a condition, an order and a limit, with the parameters in `values`.
        """
        conditions, wanted = labels_condition(filters.labels, "labels")
        conditions += [] if filters.finished is None else [f"finished = {int(filters.finished)}"]
        chosen = " AND ".join(["task = :task", OF_AGENTS, *conditions])
        with closing(self._database.open_reader()) as connection:
            connection.row_factory = sqlite3.Row
            # The planner could take another index and sort all rows.
            sql = f"SELECT {SHOWN} FROM rollouts r INDEXED BY {index} WHERE {chosen}{end}"
            rows = [dict(row) for row in connection.execute(sql, {"task": task, **wanted, **values})]
            if conditions:
                count = f"SELECT COUNT(*) FROM rollouts WHERE {chosen}"
                total = int(connection.execute(count, {"task": task, **wanted}).fetchone()[0])
            else:
                total = self._count(connection, task)
            return mended(rows, lambda query, numbers: connection.execute(query, numbers).fetchone()), total

    def _count(self, connection: sqlite3.Connection, task: str) -> int:
        """Return the number of a task's rollouts. Only the rollouts since the last count are read."""
        upto, known = self._counted.get(task, (0, 0))
        # Numbers are not used twice. Where the last one is gone, the task was deleted or has moved to another proxy.
        sql = "SELECT 1 FROM rollouts WHERE id = ? AND task = ?"
        if upto and connection.execute(sql, (upto, task)).fetchone() is None:
            upto, known = 0, 0
        sql = (
            f"SELECT MAX(id) AS upto, SUM({OF_AGENTS}) AS added FROM rollouts INDEXED BY {RolloutIndex.BEGUN} "
            "WHERE task = ? AND id > ?"
        )
        row = connection.execute(sql, (task, upto)).fetchone()
        if row["upto"] is not None:
            upto, known = row["upto"], known + row["added"]
            self._counted[task] = upto, known
        return known
