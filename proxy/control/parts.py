"""The control plane's door to a running proxy: the engine's parts that it shows and steers, and parts of its own."""

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from proxy.audit.auditor import Auditor
from proxy.control.activity import Activity
from proxy.control.browsing import Browser
from proxy.control.history import History
from proxy.control.refreshed import Refreshed, SharedReads
from proxy.control.scratch_forks import ScratchForks
from proxy.control.subtree_totals import SubtreeTotals
from proxy.control.task_totals import TaskTotals, task_totals
from proxy.control.tree_reader import Reader
from proxy.engine import Engine
from proxy.execution.executor import Executor
from proxy.execution.forgetting import Forgetting
from proxy.execution.open_trees import OpenTrees
from proxy.execution.restore import Restorer
from proxy.execution.snapshot_value import SnapshotValue
from proxy.execution.tasks import Tasks
from proxy.execution.warm_forks import WarmForks
from proxy.http.answer_cache import Answers
from proxy.http.change_log import ChangeLog
from proxy.lifecycle import BackgroundWork, Lifecycle
from proxy.settings import Settings
from proxy.shares import Share
from proxy.step import Stepper
from proxy.storage.journal import Journal
from proxy.storage.store import Store
from proxy.telemetry.alerts import Alerts
from proxy.telemetry.counters import Counters
from proxy.transfer.service import TransferService
from proxy.tree.rollout import Rollout
from sandboxes.driver import Driver
from sandboxes.pool.pool import Pool
from snapshots.cache import SnapshotCache
from snapshots.store import SnapshotStore

_ACTIVITY_EVERY_S = 1.0
"""Interval of the activity timeline: a `Second` counts what happened in one second."""
_SCRATCH_SHARE = 4
"""At most one in four sandboxes of the budget may be a scratch fork; the rest is for rollouts."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """What the routes and the page use. Nothing else of the engine is in their reach."""

    tasks: Tasks
    trees: OpenTrees
    store: Store
    journal: Journal
    forgetting: Forgetting
    transfer: TransferService
    audit: Auditor
    drivers: Mapping[str, Driver]
    pool: Pool
    warm: WarmForks
    restorer: Restorer
    cache: SnapshotCache
    snapshots: SnapshotStore
    snapshot_value: SnapshotValue
    answers: Answers
    executor: Executor
    step: Stepper
    counts: Counters
    settings: Settings
    share: Share | None
    lifecycle: Lifecycle
    has: Callable[[str], bool]  # See `Engine`, as for the next four.
    own_tasks: Callable[[], tuple[str, ...] | None]
    pin: Callable[..., None]
    back_up: Callable[[Path], Awaitable[None]]
    collect_garbage: Callable[[], Awaitable[tuple[int, int]]]
    activity: Activity  # The last hour, second by second, and its event streams.
    history: History  # The last day, minute by minute.
    scratch_forks: ScratchForks  # The sandboxes that people open to inspect a state.
    subtree_totals: SubtreeTotals  # Totals below each node of a tree.
    task_totals: Refreshed[Mapping[str, TaskTotals]]  # By the task's name.
    reader: Reader  # Makes the views of nodes, trees and rollouts.
    browser: Browser  # Makes the views of large trees, one page at a time.
    changes: ChangeLog  # What people have changed.
    alerts: Alerts
    reports: SharedReads[Any]  # What the store has for a report (`reports.ReportPart`), by request.
    started_at: float  # Seconds since 1970.

    @classmethod
    def over(cls, engine: Engine) -> "ControlPlane":
        """Build the parts over an engine that is not open yet; the engine runs and ends their background work."""

        def running_in(name: str) -> list[Rollout]:
            task = engine.tasks.get(name)
            return [] if task is None else list(task.rollouts.values())

        history = History(engine.store)
        activity = Activity(engine.counts, lambda: len(engine.pool.roster), running_in, keep=history.add)
        engine.lifecycle.background.append(BackgroundWork("activity", _ACTIVITY_EVERY_S, activity.tick))
        engine.lifecycle.at_hang_up += [activity.close, history.save]
        return cls(
            tasks=engine.tasks,
            trees=engine.trees,
            store=engine.store,
            journal=engine.journal,
            forgetting=engine.forgetting,
            transfer=engine.transfer,
            audit=engine.audit,
            drivers=engine.drivers,
            pool=engine.pool,
            warm=engine.warm,
            restorer=engine.restorer,
            cache=engine.cache,
            snapshots=engine.snapshots,
            snapshot_value=engine.snapshot_value,
            answers=engine.answers,
            executor=engine.executor,
            step=engine.step,
            counts=engine.counts,
            settings=engine.settings,
            share=engine.share,
            lifecycle=engine.lifecycle,
            has=engine.has,
            own_tasks=engine.own_tasks,
            pin=engine.pin,
            back_up=engine.back_up,
            collect_garbage=engine.collect_garbage,
            activity=activity,
            history=history,
            scratch_forks=ScratchForks(engine.restorer, max_open=max(2, engine.pool.bound.most // _SCRATCH_SHARE)),
            subtree_totals=SubtreeTotals(engine.walkers),
            task_totals=task_totals(engine.store),
            reader=Reader(engine.store),
            browser=Browser(engine.store),
            changes=ChangeLog(engine.settings.data),
            alerts=Alerts(),
            reports=SharedReads(),
            started_at=time.time(),
        )

    async def read(self, read: Callable[[sqlite3.Connection], T]) -> T:
        """Return what a query function finds, in a thread, when the store has every step that was taken so far."""
        self.journal.fold()
        return await asyncio.to_thread(self.store.database.read_apart, read)
