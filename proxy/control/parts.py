"""The control plane's door to a running proxy: the engine's parts that it shows and steers, and parts of its own."""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from typing import TypeVar

from proxy.control.activity import Activity
from proxy.control.browsing import Browser
from proxy.control.history import History
from proxy.control.scratch_forks import ScratchForks
from proxy.control.subtree_totals import SubtreeTotals
from proxy.control.task_totals import task_totals
from proxy.control.tree_reader import Reader
from proxy.engine import Engine
from proxy.http.change_log import ChangeLog
from proxy.lifecycle import BackgroundWork
from proxy.telemetry.alerts import Alerts
from proxy.tree.rollout import Rollout

_ACTIVITY_EVERY_S = 1.0
"""Interval of the activity timeline: a `Second` counts what happened in one second."""
_SCRATCH_SHARE = 4
"""At most one in four sandboxes of the budget may be a scratch fork; the rest is for rollouts."""
T = TypeVar("T")


class ControlPlane:
    """What the routes and the page use: the engine, and parts that only they need."""

    def __init__(self, engine: Engine) -> None:
        """Build the parts over an engine that is not open yet; the engine runs and ends their background work."""

        def running_in(name: str) -> list[Rollout]:
            task = engine.tasks.get(name)
            return [] if task is None else list(task.rollouts.values())

        self.engine, self.started_at = engine, time.time()
        self.history = History(engine.store)  # The last day, minute by minute.
        # The last hour, second by second, and its event streams.
        self.activity = Activity(engine.counts, lambda: len(engine.pool.roster), running_in, keep=self.history.add)
        # The sandboxes that people open to inspect a state.
        self.scratch_forks = ScratchForks(engine.restorer, max_open=max(2, engine.pool.bound.most // _SCRATCH_SHARE))
        self.subtree_totals = SubtreeTotals(engine.walkers)  # Totals below each node of a tree.
        self.task_totals = task_totals(engine.store)  # By the task's name.
        self.reader = Reader(engine.store)  # Makes the views of nodes, trees and rollouts.
        self.browser = Browser(engine.store)  # Makes the views of large trees, one page at a time.
        self.changes = ChangeLog(engine.settings.data)  # What people have changed.
        self.alerts = Alerts()
        engine.lifecycle.background.append(BackgroundWork("activity", _ACTIVITY_EVERY_S, self.activity.tick))
        engine.lifecycle.at_hang_up += [self.activity.close, self.history.save]

    async def read(self, read: Callable[[sqlite3.Connection], T]) -> T:
        """Return what a query function finds, in a thread, when the store has every step that was taken so far."""
        self.engine.journal.fold()
        return await asyncio.to_thread(self.engine.store.database.read_apart, read)
