"""Warm forks: sandboxes made ahead of their use, where rollouts are expected to leave the tree.

A warm fork is an idle sandbox without an owner. It is made in the background from snapshots and replays alone, and is
among the first to be closed if the budget is needed. No call waits for one to be made.

`note_step` notes each step; `work` then makes the most valuable forks, in the four steps numbered below.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import structlog

from proxy.execution.restore import Restorer
from proxy.telemetry.counters import Counters
from proxy.tree.departures import Departure, targets
from proxy.tree.restore_plan import plan_restore
from proxy.tree.rollout import Rollout
from proxy.tree.task import Walkers
from proxy.tree.tree import Node, Tree
from sandboxes.pool.lifecycle import SandboxState
from sandboxes.pool.pool import OverloadedError, Pool
from sandboxes.pool.room import available_bytes
from sandboxes.pool.roster import Slot
from sandboxes.task_owner import TaskOwner
from snapshots.costs import Costs

log = structlog.get_logger()

_THINKING_S = 0.02
"""A rollout without a call for this long is thinking; rounds of `work` are at least as far apart.

Several times the gap between two calls of a replayed workload, and far below the time a model thinks. With a quarter of
it, forks are made for rollouts that are about to move on, and the rounds take 3 % of the time of a busy event loop."""
_PAUSE_SHARE = 50
"""A round of `work` is followed by a pause this many times as long, so that it takes at most 2 % of a core."""
_MAX_STARTS = 2
"""Warm forks that are made at the same time. The pool allows four starts, so an agent's call finds one free."""
_COOLDOWN_S = 10.0
"""How long a node at which no sandbox could be made is not tried again. An estimate of how long the cause of a failure
lasts."""
_STALE_S = 5.0
"""How long a warm fork stays where no rollout is expected any more, before it may be closed for a better one. An
estimate: longer than an agent thinks between two calls, so that forks are not closed and made again meanwhile."""


_MEMORY_READ_EVERY_S = 1.0
"""How long the machine's free memory counts as known, because nearly every miss asks for it. Until it is read again,
forks may take up to a hundred megabytes more."""


@dataclass(slots=True)
class WarmBatch:
    """Forks that a trainer requested at the root of a tree."""

    count: int  # Number of forks still to be made.
    until: float  # When the request expires, on the monotonic clock.


class WarmForks:
    """Makes warm forks in the background."""

    def __init__(
        self,
        restorer: Restorer,
        pool: Pool,
        costs: Mapping[str, Costs],
        counts: Counters,
        walkers: Walkers,
        *,
        max_forks: int,
        idle_s: float,
        reserve_bytes: int,
    ) -> None:
        """Prepare to make forks, `max_forks` at once at most (0 turns them off), for `costs` by driver.

        An idle sandbox is kept for `idle_s`; a rollout without calls for as long is not looked at. Forks leave
        `reserve_bytes` of memory free on the machine.
        """
        self._restorer, self._pool, self._costs, self._counts, self._walkers = restorer, pool, costs, counts, walkers
        self.max_forks, self._idle_s, self._reserve_bytes = max_forks, idle_s, reserve_bytes
        self._moved: set[Rollout] = set()
        self._unfinished: set[Tree] = set()
        self._wake = asyncio.Event()
        self._batches: dict[Tree, WarmBatch] = {}
        self._starts = TaskOwner()
        self._starting: Counter[Node] = Counter()
        self._cooling: dict[Node, float] = {}
        self._memory_read_at, self._is_short = -math.inf, False

    def note_step(self, rollout: Rollout) -> None:
        """Note that a rollout took a step. Part of every hit."""
        # 1. A set and a flag and no more, because every hit does it.
        if self.max_forks:
            self._moved.add(rollout)
            self._wake.set()

    def request(self, tree: Tree, count: int) -> int:
        """Have forks ready at a tree's root for as long as an idle sandbox is kept; return how many are granted."""
        granted = min(count, self.max_forks)
        missing = max(0, granted - self.ready(tree.root))
        self._batches[tree] = WarmBatch(missing, time.monotonic() + self._idle_s)
        self._wake.set()
        return granted

    def forks(self) -> list[Slot]:
        """Return the warm forks that exist or are being made."""
        return [slot for slot in self._pool.roster.slots if slot.warm]

    def ready(self, node: Node) -> int:
        """Return how many sandboxes at a node any rollout may take, now or as soon as its freeze or start ends."""
        shared = node.snapshot is not None or node.origin is None
        existing = sum(
            slot.state is SandboxState.FREEZING or (slot.state is SandboxState.IDLE and (shared or slot.owner is None))
            for slot in self._pool.roster.at(node)
        )
        return existing + self._starting[node]

    async def work(self) -> None:
        """Wait for a step, then start the forks that are worth it. One round; it returns when the next may come."""
        # Cleared before the work: a step that comes while this round runs wakes the next one.
        await self._wake.wait()
        self._wake.clear()
        began = time.perf_counter()
        before = time.monotonic() - _THINKING_S
        # 2. Rollouts whose last call was some milliseconds ago: their agents are thinking. A rollout in full run would
        # be elsewhere before a sandbox is ready; it stays in the set for the next round.
        thinking = {rollout for rollout in self._moved if rollout.used_at < before}
        self._moved -= thinking
        # Trees that were cut short in the last round, or that a trainer waits for, need no step.
        trees = {rollout.tree for rollout in thinking if not rollout.finished} | self._unfinished
        if self._batches:
            trees |= self._requested()
        self._unfinished.clear()
        if trees and self.max_forks and not self._short_of_memory():
            # Nothing is taken from a call: the pool refuses warm starts when its room gets scarce.
            await self._start(self._worthwhile(trees))
        await asyncio.sleep(max(_THINKING_S, _PAUSE_SHARE * (time.perf_counter() - began)))
        # Rollouts that were still running are thinking by now, and no step of theirs will wake the next round.
        if self._moved:
            self._wake.set()

    async def drain(self) -> None:
        """Wait for the warm forks that are being made."""
        await self._starts.wait()

    async def aclose(self) -> None:
        """Cancel the forks that are being made, and make no more."""
        # First the number: the end of a start wakes `work`, which must start nothing then.
        self.max_forks = 0
        self._starts.cancel()
        await self.drain()

    def _requested(self) -> set[Tree]:
        now = time.monotonic()
        # A forgotten root has no state, so nothing can be made there.
        self._batches = {
            tree: batch for tree, batch in self._batches.items() if batch.until > now and not tree.root.detached
        }
        return set(self._batches)

    def _worthwhile(self, trees: Iterable[Tree]) -> list[tuple[Tree, Departure]]:
        """Return the sandboxes that are worth making in these trees, the most valuable first."""
        now = time.monotonic()
        self._cooling = {node: until for node, until in self._cooling.items() if until > now}
        worthwhile: list[tuple[Tree, Departure]] = []
        for tree in trees:
            if tree.spec.upstreams:
                # A replay ahead of its use would send requests to servers that are not ours.
                continue
            # `cached`: a rollout that shares nothing takes no fork, because its records are its own.
            running = [r for r in self._walkers.of(tree.id) if r.cached and now - r.used_at < self._idle_s]
            # A rollout with a call in flight has a sandbox at work for it already.
            thinking = (r for r in running if not r.waiting and r.used_at < now - _THINKING_S)
            walking = Counter(rollout.node for rollout in thinking if not self._has_own(rollout))
            requested = {tree.root: self._at_root(tree, running)}
            # 3. Where sandboxes are worth having: from the tree's own statistics, and from what a trainer requested at
            # the root for its next batch.
            # Ready sandboxes count against the expected ones, so a second round does not make them again.
            candidates = targets(walking, requested, ready=self.ready, saved_s=partial(self._saved_s, tree))
            worthwhile += [(tree, target) for target in candidates if target.node not in self._cooling]
        return sorted(worthwhile, key=lambda pair: -pair[1].worth_s)

    def _has_own(self, rollout: Rollout) -> bool:
        return any(slot.owner == rollout.id for slot in self._pool.roster.at(rollout.node))

    def _at_root(self, tree: Tree, running: list[Rollout]) -> int:
        """Return how many forks to have at the root: one for the rest of a begun group, or what is requested."""
        batch = self._batches.get(tree)
        missing = batch.count if batch is not None else 0
        return max(1 if running else 0, self.ready(tree.root) + missing if missing else 0)

    def _saved_s(self, tree: Tree, node: Node) -> float:
        """Return how many seconds a sandbox that is ready at the node saves the call that needs it."""
        # Without idle sandboxes: the question is what the call pays if no fork is there.
        plan = plan_restore(node, idle_at=lambda _: False, costs=self._costs[tree.spec.driver])
        # A replay that may diverge is left to the call that needs it: by then there may be a snapshot.
        if plan is None or any(record.doubtful for record in plan.suffix):
            return 0.0
        return plan.cost_s

    async def _start(self, worthwhile: list[tuple[Tree, Departure]]) -> None:
        # 4. The most valuable first, within `max_forks`, the pool's spare room and the memory reserve. If all forks are
        # there already, the oldest one that no rollout is expected at is closed for a better one.
        nodes = {target.node for _, target in worthwhile}
        for tree, target in worthwhile:
            if target.worth_s <= 0 or not self._pool.has_spare_room:
                # Sorted by worth: once room is short, the rest is worth less still.
                break
            if len(self._starts) >= _MAX_STARTS:
                # The end of a start wakes `work`, which then continues with these trees.
                self._unfinished.add(tree)
                continue
            if len(self.forks()) >= self.max_forks and not await self._close_stale(nodes):
                break
            batch = self._batches.get(tree)
            if batch is not None and target.node is tree.root:
                batch.count -= 1
            # Counted before the task runs, so that the next target at this node sees the fork that is on its way.
            self._starting[target.node] += 1
            self._starts.spawn("warm fork", self._make(tree, target.node)).add_done_callback(
                partial(self._started, target.node)
            )

    # Also after a failure: `_make` has put the node on its cooldown by then.
    def _started(self, node: Node, _task: "asyncio.Task[None]") -> None:
        self._starting[node] -= 1
        if not self._starting[node]:
            del self._starting[node]
        self._wake.set()

    async def _make(self, tree: Tree, node: Node) -> None:
        try:
            if await self._restorer.prepare(tree, node):
                self._counts.warm_made += 1
            else:
                # No way leads to the node. A later round tries again, after the cooldown.
                self._cooling[node] = time.monotonic() + _COOLDOWN_S
        except Exception as error:  # noqa: BLE001 - a background task ends here; a call that needs the state retries
            self._cooling[node] = time.monotonic() + _COOLDOWN_S
            # A full machine is no failure: the fork was only a wish.
            if not isinstance(error, OverloadedError):
                self._counts.failure("warm")
                log.warning("warm fork failed", node=node.id, error=repr(error))

    async def _close_stale(self, nodes: set[Node]) -> bool:
        """Close the oldest warm fork that is at none of the nodes; return False if there is none to close."""
        before = time.monotonic() - _STALE_S
        stale = [
            slot
            for slot in self.forks()
            # Only idle ones: a fork that is being made or frozen is not counted as stale.
            if slot.state is SandboxState.IDLE and slot.position not in nodes and slot.used_at < before
        ]
        if not stale:
            return False
        await self._pool.close(min(stale, key=lambda slot: slot.used_at))
        return True

    def _short_of_memory(self) -> bool:
        now = time.monotonic()
        if self._reserve_bytes and now - self._memory_read_at >= _MEMORY_READ_EVERY_S:
            self._memory_read_at, self._is_short = now, available_bytes() < self._reserve_bytes
        return self._is_short
