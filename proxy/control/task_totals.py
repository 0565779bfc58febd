"""What each task's rollouts were answered, over all times: read from the steps on disk, beside the event loop."""

import asyncio
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass

from proxy.storage.store import Store
from proxy.tree.rollout import Outcome

_SHARE = 20
"""Totals are used for so many times as long as reading them took."""
_LEAST_S = 1.0


@dataclass(slots=True)
class OutcomeTotals:
    """Of one task. Seconds are those of tools. running: rollouts that have not ended."""

    calls: int = 0
    hits: int = 0
    waits: int = 0
    misses: int = 0
    bypasses: int = 0
    executed_s: float = 0.0
    saved_s: float = 0.0
    running: int = 0

    @property
    def hit_rate(self) -> float:
        return (self.hits + self.waits) / self.calls if self.calls else 0.0


class TaskTotals:
    """Totals by task, not much older than reading them takes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: Mapping[str, OutcomeTotals] = {}
        self._until = 0.0
        self._reading = asyncio.Lock()

    async def totals(self) -> Mapping[str, OutcomeTotals]:
        async with self._reading:
            if time.monotonic() >= self._until:
                began = time.monotonic()
                self._known = await asyncio.to_thread(self._store.database.read_apart, read_totals)
                ended = time.monotonic()
                self._until = ended + max(_LEAST_S, _SHARE * (ended - began))
        return self._known


def read_totals(connection: sqlite3.Connection) -> dict[str, OutcomeTotals]:
    """Read the totals of all tasks. Looks at every step: 1 s for a million."""
    found: dict[str, OutcomeTotals] = {}
    sql = (
        "SELECT r.task, s.outcome, COUNT(*), COALESCE(SUM(c.seconds), 0) FROM rollouts r "
        "JOIN steps s ON s.rollout = r.id LEFT JOIN records c ON c.id = s.record GROUP BY r.task, s.outcome"
    )
    for task, outcome, count, seconds in connection.execute(sql):
        totals = found.setdefault(task, OutcomeTotals())
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
    for task, count in connection.execute("SELECT task, COUNT(*) FROM rollouts WHERE finished = 0 GROUP BY task"):
        found.setdefault(task, OutcomeTotals()).running = count
    return found
