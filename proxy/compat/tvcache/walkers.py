"""Walkers: rollouts for a client whose requests name none, so that reports, metrics and labels count its calls.

The client library has one connection for each rollout, so each connection and task get one. A request names its whole
chain of calls: a walker stands wherever the latest request was, and answers never depend on it.
"""

import itertools
import secrets
import time
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

from proxy.compat.endpoints import EndpointContext
from proxy.lifecycle import BackgroundWork
from proxy.tree.labels import Labels
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.task import Task
from proxy.tree.tree import Node, Record

IDLE_S = 120.0
"""How long a walker stays after its last request. A connection that comes back later gets another one."""
_EVERY_S = 10.0


@dataclass(slots=True)
class _Walker:
    rollout: Rollout
    latest: Record | None
    used_at: float


class ChainWalkers:
    """The walkers of all tasks."""

    def __init__(self, context: EndpointContext) -> None:
        self._context = context
        self._walkers: dict[tuple[str, Hashable, int], _Walker] = {}
        context.lifecycle.background.append(BackgroundWork("end idle clients", _EVERY_S, self._end_idle))
        context.lifecycle.before_close.append(partial(self._end, before=float("inf")))

    async def count_hit(self, task: Task, client: Hashable, labels: Labels, record: Record) -> None:
        """Count a hit. The library looks an answer up twice, first whether it exists: that counts once."""
        walker = self._of(task, client, labels)
        if walker.latest is record:
            walker.latest = None
            return
        walker.latest, rollout, gate = record, walker.rollout, self._context.gate
        async with self._context.step.order.hold(rollout):
            if gate is not None:
                if await gate.admit(rollout) is not None:
                    # The request is made again, and was counted.
                    return
                await gate.logged(rollout, record, Outcome.HIT)
            rollout.node = record.source
            self._context.step.take(rollout, record)

    def at(self, task: Task, client: Hashable, labels: Labels, node: Node) -> Rollout:
        """Return the rollout of a connection, placed at a node. The caller makes its call before the next request."""
        walker = self._of(task, client, labels)
        walker.latest = None
        walker.rollout.node = node
        return walker.rollout

    def _of(self, task: Task, client: Hashable, labels: Labels) -> _Walker:
        for number in itertools.count():
            walker = self._walkers.get(key := (task.name, client, number))
            # A rollout that waits for the log of a cluster is where its request has placed it.
            if walker is None or not self._context.step.order.busy(walker.rollout):
                break
        if walker is None or walker.rollout.finished or walker.rollout.tree is not task.tree:
            name = f"tvclient-{secrets.token_hex(6)}"
            rollout = self._context.tasks.rollouts.begin(task, name, task.tree, task.tree.root, labels=labels)
            walker = self._walkers[key] = _Walker(rollout, None, 0.0)
        walker.used_at = time.monotonic()
        return walker

    async def _end_idle(self) -> None:
        await self._end(before=time.monotonic() - IDLE_S)

    async def _end(self, *, before: float) -> None:
        for key, walker in list(self._walkers.items()):
            if walker.used_at < before and not walker.rollout.waiting:
                del self._walkers[key]
                if not walker.rollout.finished:
                    await self._context.tasks.rollouts.finish(walker.rollout)
