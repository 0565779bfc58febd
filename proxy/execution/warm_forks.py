"""Warm forks: sandboxes made ahead of their use, where `prefetch` expects rollouts to leave the tree.

A warm fork is an idle sandbox that nobody owns. It is made in the background as for an agent's call (`Attach`), from
snapshots and replays alone, and is among the first to give way; no call ever waits for one to be made.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from proxy.execution.restore import Restorer
from proxy.telemetry.counters import Counters
from proxy.tree.departures import Target, targets
from proxy.tree.restore_plan import plan_restore
from proxy.tree.rollout import Rollout
from proxy.tree.task import Walkers
from proxy.tree.tree import Node, Tree
from sandboxes.pool.lifecycle import SandboxState
from sandboxes.pool.pool import OverloadedError, Pool
from sandboxes.pool.roster import Slot
from snapshots.costs import Costs

log = structlog.get_logger()

_THINKS_S = 0.005
"""A rollout whose last call was this long ago is thinking, and worth looking ahead for; one in full run soon stands
elsewhere. Looks are as far apart."""
_SHARE = 50
"""A look is followed by a pause at least this many times as long: looking takes no more than 2 % of a core."""
_AT_ONCE = 2
"""Warm forks that are being made at the same time: an agent's call finds a start free."""
_COOL_S = 10.0
"""How long a node at which no sandbox could be made is left alone."""
_STALE_S = 5.0
"""A warm fork that stands this long where nobody is expected any more gives way to a better one."""


@dataclass(slots=True)
class WarmBatch:
    """Forks that were asked for at the root of a tree: how many are still to be made, and until when."""

    count: int
    until: float


class Warm:
    """Makes sandboxes ready. most: warm forks that may stand at once. reserve_bytes: of memory that they leave free."""

    def __init__(
        self,
        restorer: Restorer,
        pool: Pool,
        costs: Mapping[str, Costs],
        counts: Counters,
        walkers: Walkers,
        *,
        most: int,
        idle_s: float,
        reserve_bytes: int,
    ) -> None:
        self._restorer, self._pool, self._costs, self._counts, self._walkers = restorer, pool, costs, counts, walkers
        self.most, self._idle_s, self._reserve_bytes = most, idle_s, reserve_bytes
        self._seen: set[Rollout] = set()
        self._left: set[Tree] = set()
        self._wake = asyncio.Event()
        self._batches: dict[Tree, WarmBatch] = {}
        self._making: dict[asyncio.Task[None], Node] = {}
        self._cooling: dict[Node, float] = {}

    def saw(self, rollout: Rollout) -> None:
        """Note that a rollout took a step. On the way of every hit: a set and a flag, 0.2 µs."""
        if self.most:
            self._seen.add(rollout)
            self._wake.set()

    def ask(self, tree: Tree, count: int) -> int:
        """Have forks ready at a tree's root for the next batch, as long as an idle sandbox lives; return how many."""
        granted = min(count, self.most)
        missing = max(0, granted - self.ready(tree.root))
        self._batches[tree] = WarmBatch(missing, time.monotonic() + self._idle_s)
        self._wake.set()
        return granted

    def standing(self) -> list[Slot]:
        """Return the warm forks that stand or are being made."""
        return [slot for slot in self._pool.roster.slots if slot.warm]

    def ready(self, node: Node) -> int:
        """Return how many sandboxes at node anyone may have, at once or, where its state is just being kept, soon."""
        shared = node.snapshot is not None or node.origin is None
        there = sum(
            slot.state is SandboxState.FREEZING or (slot.state is SandboxState.IDLE and (shared or slot.owner is None))
            for slot in self._pool.roster.at(node)
        )
        return there + sum(made is node for made in self._making.values())

    async def work(self) -> None:
        """Wait until something happened, then begin to make what is worth it. One round; returns soon after."""
        await self._wake.wait()
        self._wake.clear()
        began = time.perf_counter()
        before = time.monotonic() - _THINKS_S
        thinking = {rollout for rollout in self._seen if rollout.used_at < before}
        self._seen -= thinking
        trees = {rollout.tree for rollout in thinking if not rollout.finished} | self._asked_for() | self._left
        self._left.clear()
        if trees and self.most and not self._short_of_memory():
            await self._make(self._wanted(trees))
        await asyncio.sleep(max(_THINKS_S, _SHARE * (time.perf_counter() - began)))
        if self._seen:
            self._wake.set()

    async def drain(self) -> None:
        """Wait for the warm forks that are being made."""
        while self._making:
            await asyncio.wait(self._making)

    async def aclose(self) -> None:
        """Make no more of them; those under way are given up."""
        self.most = 0
        for making in self._making:
            making.cancel()
        await self.drain()

    def _asked_for(self) -> set[Tree]:
        now = time.monotonic()
        self._batches = {
            tree: batch for tree, batch in self._batches.items() if batch.until > now and not tree.root.detached
        }
        return set(self._batches)

    def _wanted(self, trees: Iterable[Tree]) -> list[tuple[Tree, Target]]:
        """Return what is worth making in these trees, most valuable first."""
        now = time.monotonic()
        self._cooling = {node: until for node, until in self._cooling.items() if until > now}
        found: list[tuple[Tree, Target]] = []
        for tree in trees:
            if tree.spec.upstreams:
                # What is replayed ahead would be sent to somebody else's server.
                continue
            running = [r for r in self._walkers.of(tree.id) if r.cached and now - r.used_at < self._idle_s]
            # One whose call is being answered has a sandbox at work for it.
            thinking = (r for r in running if not r.waiting and r.used_at < now - _THINKS_S)
            walking = Counter(rollout.node for rollout in thinking if not self._has_own(rollout))
            asked = {tree.root: self._at_root(tree, running)}
            worth = targets(walking, asked, ready=self.ready, saved_s=partial(self._saved_s, tree))
            found += [(tree, target) for target in worth if target.node not in self._cooling]
        return sorted(found, key=lambda pair: -pair[1].worth_s)

    def _has_own(self, rollout: Rollout) -> bool:
        """Whether a rollout that leaves the tree where it stands needs no other sandbox than its own."""
        return any(slot.owner == rollout.id for slot in self._pool.roster.at(rollout.node))

    def _at_root(self, tree: Tree, running: list[Rollout]) -> int:
        """Return how many forks to have at the root: one once a rollout has begun, for the others of its group."""
        batch = self._batches.get(tree)
        missing = batch.count if batch is not None else 0
        return max(1 if running else 0, self.ready(tree.root) + missing if missing else 0)

    def _saved_s(self, tree: Tree, node: Node) -> float:
        plan = plan_restore(node, standing=lambda _: False, costs=self._costs[tree.spec.driver])
        # A replay that may reach another state is begun for who needs it, not ahead: a snapshot may be on its way.
        if plan is None or any(record.doubtful for record in plan.suffix):
            return 0.0
        return plan.cost_s

    async def _make(self, wanted: list[tuple[Tree, Target]]) -> None:
        nodes = {target.node for _, target in wanted}
        for tree, target in wanted:
            if target.worth_s <= 0 or not self._pool.has_spare_room:
                break
            if len(self._making) >= _AT_ONCE:
                # What is made next wakes this again.
                self._left.add(tree)
                continue
            if len(self.standing()) >= self.most and not await self._give_way(nodes):
                break
            batch = self._batches.get(tree)
            if batch is not None and target.node is tree.root:
                batch.count -= 1
            making = asyncio.get_running_loop().create_task(self._bring(tree, target.node))
            self._making[making] = target.node
            making.add_done_callback(self._made)

    def _made(self, making: "asyncio.Task[None]") -> None:
        del self._making[making]
        self._wake.set()

    async def _bring(self, tree: Tree, node: Node) -> None:
        try:
            if await self._restorer.prepare(tree, node):
                self._counts.warm_made += 1
            else:
                self._cooling[node] = time.monotonic() + _COOL_S
        except Exception as error:  # noqa: BLE001 - a background task ends here; whoever needs the state asks for it
            self._cooling[node] = time.monotonic() + _COOL_S
            if not isinstance(error, OverloadedError):
                self._counts.failure("warm")
                log.warning("no warm fork", node=node.id, error=repr(error))

    async def _give_way(self, nodes: set[Node]) -> bool:
        """Close the oldest warm fork at which nobody is expected; False where there is none."""
        before = time.monotonic() - _STALE_S
        stale = [
            s
            for s in self.standing()
            if s.state is SandboxState.IDLE and s.position not in nodes and s.used_at < before
        ]
        if not stale:
            return False
        await self._pool.close(min(stale, key=lambda slot: slot.used_at))
        return True

    def _short_of_memory(self) -> bool:
        return bool(self._reserve_bytes) and available_bytes() < self._reserve_bytes


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory that the machine could give to new processes; plenty where it does not tell. 30 µs."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 62
