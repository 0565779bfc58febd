"""Totals of each task over all of its rollouts, read from the steps on disk without blocking the event loop."""

import asyncio
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from proxy.control.refreshed import Refreshed
from proxy.storage.store import Store
from proxy.tree.rollout import Outcome

_MIN_AGE_S = 1.0
"""Totals are reused for at least this long."""


@dataclass(slots=True)
class OutcomeTotals:
    """Totals of one task.

    Attributes:
        calls: Number of answered calls.
        hits: Calls answered as a hit.
        waits: Calls that shared another rollout's execution.
        misses: Calls that were executed and recorded.
        bypasses: Calls whose record serves their own rollout alone.
        executed_s: Seconds that tools ran for misses and bypasses.
        saved_s: Seconds that tools would have run for hits and waits.
        running: Number of running rollouts.
        used_at: When a rollout made its latest call, or began, in seconds since 1970.
    """

    calls: int = 0
    hits: int = 0
    waits: int = 0
    misses: int = 0
    bypasses: int = 0
    executed_s: float = 0.0
    saved_s: float = 0.0
    running: int = 0
    used_at: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of calls that no tool ran for, from 0 to 1."""
        return (self.hits + self.waits) / self.calls if self.calls else 0.0


def task_totals(store: Store) -> Refreshed[Mapping[str, OutcomeTotals]]:
    """Return the totals of all tasks by name."""

    async def read() -> Mapping[str, OutcomeTotals]:
        return await asyncio.to_thread(store.database.read_apart, read_totals)

    return Refreshed(read, min_age_s=_MIN_AGE_S)


def read_totals(connection: sqlite3.Connection) -> dict[str, OutcomeTotals]:
    """Read the totals of all tasks. Call it in a thread: it visits every step, 1 s for a million."""
    by_task: dict[str, OutcomeTotals] = {}
    sql = (
        "SELECT r.task, s.outcome, COUNT(*), COALESCE(SUM(c.seconds), 0) FROM rollouts r "
        "JOIN steps s ON s.rollout = r.id LEFT JOIN records c ON c.id = s.record GROUP BY r.task, s.outcome"
    )
    for task, outcome, count, seconds in connection.execute(sql):
        totals = by_task.setdefault(task, OutcomeTotals())
        totals.calls += count
        match Outcome(outcome):
            case Outcome.HIT:
                totals.hits += count
            case Outcome.WAIT:
                totals.waits += count
            case Outcome.MISS:
                totals.misses += count
            case Outcome.BYPASS:
                totals.bypasses += count
        if outcome in (Outcome.HIT, Outcome.WAIT):
            totals.saved_s += seconds
        else:
            totals.executed_s += seconds
    rollouts = "SELECT task, SUM(finished = 0), MAX(used_at) FROM rollouts GROUP BY task"
    for task, running, used_at in connection.execute(rollouts):
        totals = by_task.setdefault(task, OutcomeTotals())
        totals.running, totals.used_at = running, used_at
    return by_task
