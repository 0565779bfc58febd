"""The parts of the control plane that the engine does not know: activity, scratch forks, totals and readers."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from proxy.control.activity import Activity
from proxy.control.browsing import Browser
from proxy.control.history import History
from proxy.control.refreshed import Refreshed
from proxy.control.scratch_forks import ScratchForks
from proxy.control.subtree_totals import SubtreeTotals
from proxy.control.task_totals import TaskTotals, task_totals
from proxy.control.tree_reader import Reader
from proxy.engine import Engine
from proxy.lifecycle import BackgroundWork
from proxy.tree.rollout import Rollout

_ACTIVITY_EVERY_S = 1.0
"""Interval of the activity timeline: a `Second` counts what happened in one second."""
_SCRATCH_SHARE = 4
"""At most one in four sandboxes of the budget may be a scratch fork; the rest is for rollouts."""


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """The engine, and the parts that show it."""

    engine: Engine
    activity: Activity  # The last hour, second by second, and its event streams.
    history: History  # The last day, minute by minute.
    scratch_forks: ScratchForks  # The sandboxes that people open to inspect a state.
    subtree_totals: SubtreeTotals  # Totals below each node of a tree.
    task_totals: Refreshed[Mapping[str, TaskTotals]]  # By the task's name.
    reader: Reader  # Makes the views of nodes, trees and rollouts.
    browser: Browser  # Makes the views of large trees, one page at a time.
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
            engine,
            activity,
            history,
            ScratchForks(engine.restorer, max_open=max(2, engine.pool.bound.most // _SCRATCH_SHARE)),
            SubtreeTotals(engine.walkers),
            task_totals(engine.store),
            Reader(engine.store),
            Browser(engine.store),
            time.time(),
        )
