"""What audits observed, and the noise masks that they use, as rows."""

import time
from collections.abc import Iterable

from proxy.storage.database import Execute, StoreDatabase
from proxy.storage.errors import DamagedError
from proxy.storage.records import update_diverged
from proxy.storage.schema import is_whole
from proxy.tree.tree import Node, Record


class AuditStore:
    """Writes and reads findings, counts and masks."""

    def __init__(self, database: StoreDatabase) -> None:
        self._database = database

    def save_finding(self, tree: int, record: Record, lost: Iterable[Node], *, quarantined: bool) -> None:
        """Write that a record differs from what its call does now, and which nodes were set aside for it."""
        with self._database.transaction() as execute:
            put_finding(execute, record.id, tree, record.differs, quarantined, record.reproducible, time.time())
            update_diverged(execute, lost)

    def findings(self, tree: int) -> list[tuple[int, int, int, int, str, int, float]]:
        """Return the latest 1,000 findings: record, source, target, call, why, whether in quarantine, when."""
        sql = (
            "SELECT f.record, r.source, r.target, r.call, f.why, f.quarantined, f.at FROM findings f "
            f"JOIN records r ON r.id = f.record WHERE f.tree = ? AND {is_whole('findings', 'f')} "
            "ORDER BY f.at DESC, f.record LIMIT 1000"
        )
        return self._database.rows(sql, (tree,))

    def add(self, tree: int, kind: str, checked: int, differing: int, unreachable: int) -> None:
        """Add an audit's counts to the totals of its tree and kind."""
        with self._database.transaction() as execute:
            execute(
                "INSERT INTO audits VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (tree, kind) DO UPDATE SET "
                "checked = checked + excluded.checked, differing = differing + excluded.differing, "
                "unreachable = unreachable + excluded.unreachable, at = excluded.at",
                (tree, kind, checked, differing, unreachable, time.time()),
            )

    def totals(self, tree: int | None = None) -> list[tuple[str, int, int, int, float]]:
        """Return kind, checked, differing, unreachable and last time, of one tree or (None) of all together."""
        where = f"WHERE {is_whole('audits')}{'' if tree is None else ' AND tree = ?'}"
        sql = (
            "SELECT kind, SUM(checked), SUM(differing), SUM(unreachable), MAX(at) FROM audits "
            f"{where} GROUP BY kind ORDER BY kind"
        )
        return self._database.rows(sql, () if tree is None else (tree,))

    def masks(self, task: str) -> str | None:
        """Return a task's noise masks as JSON, or None. Raises DamagedError: other masks could hide a difference."""
        row = self._database.row(f"SELECT value, {is_whole('masks')} FROM masks WHERE task = ?", (task,))
        if row is not None and not row[1]:
            raise DamagedError(f"the noise masks of task {task!r} are damaged in the store. PUT them again.")
        return None if row is None else str(row[0])

    def put_masks(self, task: str, value: str) -> None:
        """Write a task's noise masks, as JSON."""
        with self._database.transaction() as execute:
            execute("INSERT OR REPLACE INTO masks VALUES (?, ?)", (task, value))


def put_finding(
    execute: Execute, record: int, tree: int, why: str, quarantined: bool, reproducible: bool, noticed_at: float
) -> None:
    """Write a finding, and what follows from it for its record; the arguments are those of `copies.FindingCopy`."""
    values = (record, tree, why, quarantined, noticed_at)
    execute("INSERT OR REPLACE INTO findings VALUES (?, ?, ?, ?, ?)", values)
    execute("UPDATE records SET reproducible = ?, quarantined = ? WHERE id = ?", (reproducible, quarantined, record))
