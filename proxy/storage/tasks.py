"""Tasks as rows."""

import time
from typing import Any

from proxy.storage.database import StoreDatabase
from proxy.storage.drafts import leave_remains
from proxy.storage.errors import DamagedError
from proxy.storage.schema import is_whole
from proxy.storage.trees import TREES_OF, TreeStore

_COUNTS = (
    "(SELECT COUNT(*) FROM rollouts r WHERE r.task = t.name) AS rollouts, "
    f"(SELECT COUNT(*) FROM nodes n WHERE n.tree IN ({TREES_OF.format(task='t.name')})) AS nodes"
)

_WHOLE = is_whole("tasks")


class TaskStore:
    """Writes, reads and deletes tasks."""

    def __init__(self, database: StoreDatabase, trees: TreeStore) -> None:
        self._database, self._trees = database, trees

    def put(self, name: str, spec: str | None) -> None:
        """Write a task; spec is JSON, None for the default spec."""
        with self._database.transaction() as execute:
            execute(
                "INSERT INTO tasks (name, spec, created_at) VALUES (?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET spec = excluded.spec",
                (name, spec, time.time()),
            )

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a task's columns, or None. Raises DamagedError if the row is not as it was written."""
        rows = self._database.views(f"SELECT *, {_WHOLE} AS whole FROM tasks WHERE name = :name", {"name": name})
        if rows and not rows[0]["whole"]:
            raise DamagedError(f"the environment of task {name!r} is damaged in the store. PUT the task again.")
        return rows[0] if rows else None

    def exists(self, name: str) -> bool:
        """Return whether there is a task of this name, damaged or not."""
        return self._database.row("SELECT 1 FROM tasks WHERE name = ?", (name,)) is not None

    def summary(self, name: str) -> dict[str, Any]:
        """Return an existing task with the number of its rollouts and nodes."""
        (row,) = self._database.views(f"SELECT t.*, {_COUNTS} FROM tasks t WHERE t.name = :name", {"name": name})
        return row

    def all(self) -> list[tuple[str, float]]:
        """Return name and time of creation of each task, without its counts."""
        return [
            (name, created_at) for name, created_at in self._database.rows("SELECT name, created_at FROM tasks", ())
        ]

    def delete(self, name: str) -> None:
        """Delete a task with its rollouts and the trees that nothing else uses. Sweeps delete most rows."""
        trees = self._trees.sole_ids(name)
        rollouts = [row[0] for row in self._database.rows("SELECT id FROM rollouts WHERE task = ?", (name,))]
        listed = ",".join(map(str, trees))
        with self._database.transaction() as execute:
            # The deleted rows do not show their numbers any more.
            self._database.keep_numbers(execute)
            for table in ("notes", "overheads"):
                execute(f"DELETE FROM {table} WHERE rollout IN (SELECT id FROM rollouts WHERE task = ?)", (name,))
            for table in ("findings", "audits"):
                execute(f"DELETE FROM {table} WHERE tree IN ({listed})")
            execute(f"DELETE FROM trees WHERE id IN ({listed})")
            for table in ("rollouts", "masks", "shares"):
                execute(f"DELETE FROM {table} WHERE task = ?", (name,))
            execute("DELETE FROM tasks WHERE name = ?", (name,))
            leave_remains(execute, trees=trees, rollouts=rollouts)
