"""Totals of each task over all of its rollouts, read from the steps on disk without blocking the event loop."""

import asyncio
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from proxy.control.refreshed import Refreshed
from proxy.storage.store import Store
from proxy.tree.call_totals import CallTotals
from proxy.tree.rollout import Outcome

_MIN_AGE_S = 1.0
"""Totals are reused for at least this long."""


@dataclass(slots=True)
class TaskTotals(CallTotals):
    """Totals of one task."""

    running: int = 0  # Number of running rollouts.
    used_at: float = 0.0  # When a rollout made its latest call, or began, in seconds since 1970.


def task_totals(store: Store) -> Refreshed[Mapping[str, TaskTotals]]:
    """Return the totals of all tasks by name."""

    async def read() -> Mapping[str, TaskTotals]:
        return await asyncio.to_thread(store.database.read_apart, read_totals)

    return Refreshed(read, min_age_s=_MIN_AGE_S)


def read_totals(connection: sqlite3.Connection) -> dict[str, TaskTotals]:
    """Read the totals of all tasks. Call it in a thread: it visits every step."""
    by_task: dict[str, TaskTotals] = {}
    sql = (
        "SELECT r.task, s.outcome, COUNT(*), COALESCE(SUM(c.seconds), 0) FROM rollouts r "
        "JOIN steps s ON s.rollout = r.id LEFT JOIN records c ON c.id = s.record GROUP BY r.task, s.outcome"
    )
    for task, outcome, count, seconds in connection.execute(sql):
        by_task.setdefault(task, TaskTotals()).answered(Outcome(outcome), seconds, count)
    rollouts = "SELECT task, SUM(finished = 0 AND lost = ''), MAX(used_at) FROM rollouts GROUP BY task"
    for task, running, used_at in connection.execute(rollouts):
        totals = by_task.setdefault(task, TaskTotals())
        totals.running, totals.used_at = running, used_at
    return by_task
