"""From a node to a sandbox that stands there: carry out the plan, replay the suffix, believe nothing unseen."""

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

import structlog

from proxy.dialects.rule_schema import steady
from proxy.execution.divergence import differs, gap_s, require_its_due
from proxy.execution.errors import StateLostError
from proxy.execution.root_state import driver_of, tree_key
from proxy.execution.snapshot_value import Keeper
from proxy.storage.records import RecordStore
from proxy.telemetry.counters import Counters
from proxy.telemetry.timing import Timing
from proxy.tree.restore_plan import RestorePlan, Way, plan_restore
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Node, Record, Tree
from sandboxes.driver import Driver, Sandbox, rest
from sandboxes.errors import NotFreezableError, SandboxError, SpecError
from sandboxes.pool.pool import Pool
from sandboxes.pool.roster import Slot
from snapshots.costs import Costs

log = structlog.get_logger()


NOBODY = 0
"""Stands for a rollout where the control plane asks for a sandbox."""
VISITOR = -1
"""Stands for a rollout where somebody looks at a state: in a sandbox of its own, which takes nobody's."""


class _TooFast(Exception):  # noqa: N818 - what it says is why to try again
    """A replay differs, and what lived there had no time to start: it may be that."""


class Attach:
    """Brings sandboxes to nodes."""

    def __init__(
        self, drivers: Mapping[str, Driver], pool: Pool, keeper: Keeper, records: RecordStore, counts: Counters
    ) -> None:
        self._drivers, self._pool, self._keeper, self._records, self._counts = drivers, pool, keeper, records, counts

    @asynccontextmanager
    async def standing_at(self, rollout: Rollout, node: Node, timing: Timing) -> AsyncIterator[Slot]:
        """Lease a sandbox that stands at node. After the block it stands where `roster.move` put it, or is closed.

        Raises:
            StateLost: no way leads to node.
            SandboxError, SpecError, Overloaded: the machine, the spec or the budget is in the way.
        """
        own = any(slot.owner == rollout.id for slot in self._pool.roster.at(node))
        slot = await self._bring(rollout.tree, node, rollout.id, timing)
        try:
            if not own and node.state is None:
                # What lives here was brought here in no time, while this rollout thought.
                with timing.measure("restore_s"):
                    await self._rest(slot, rollout.dwell_s(time.monotonic()))
            yield slot
        except BaseException:
            # Nobody knows what it did before it failed.
            await self._pool.close(slot)
            raise
        await self._keeper.give_back(slot, rollout.tree)

    @property
    def has_spare_room(self) -> bool:
        """Whether a sandbox may be made whose place nobody else needs."""
        return self._pool.has_spare_room

    async def warm(self, tree: Tree, node: Node) -> bool:
        """Make a sandbox that stands ready at node, ahead of its use; False where no way leads there.

        Raises:
            SandboxError, SpecError, Overloaded: the machine, the spec or the budget is in the way.
        """
        try:
            slot = await self._bring(tree, node, None, Timing())
        except StateLostError:
            return False
        if node.detached:
            await self._pool.close(slot)
            return False
        await self._keeper.give_back(slot, tree)
        return True

    @asynccontextmanager
    async def fork(self, tree: Tree, node: Node, *, spare: bool = False) -> AsyncIterator[Sandbox]:
        """Give a throw-away sandbox at node: what is done in it is recorded nowhere, and it is closed after the block.

        spare: made only where nobody else wants its place.

        Raises:
            StateLost: neither a snapshot nor a replay leads to node.
            SandboxError, SpecError, Overloaded: the machine, the spec or the budget is in the way.
        """
        slot = await self._bring(tree, node, None if spare else VISITOR, Timing())
        slot.owner, slot.warm = VISITOR, False
        assert slot.sandbox is not None
        try:
            if node.state is None:
                await self._rest(slot, math.inf)
            yield slot.sandbox
        finally:
            await self._pool.close(slot)

    async def keep(self, tree: Tree, node: Node) -> None:
        """Take node's snapshot now; where it has one, nothing is done.

        Raises:
            NotFreezable: the driver cannot freeze what lives there; the node remembers why.
            StateLost: no way leads to node.
            SandboxError, SpecError, Overloaded: the machine, the spec or the budget is in the way.
        """
        while node.snapshot is None:
            there = self._pool.roster.find(node, NOBODY, shared=True)
            owner = None if there is None else there.owner
            if there is None:
                slot = await self._bring(tree, node, NOBODY, Timing())
            elif await self._pool.lease(there, node, owner):
                slot = there
            else:
                continue
            slot.owner = owner
            if not await self._keeper.keep_held(slot, tree, node):
                return

    def moved(self, slot: Slot, node: Node) -> None:
        """Note that a leased sandbox stands at node now."""
        self._pool.roster.move(slot, node)

    async def _bring(self, tree: Tree, node: Node, owner: int | None, timing: Timing) -> Slot:
        """Lease a sandbox that stands at node to a rollout, or a visitor.

        Without an owner it is a warm fork, made from nobody's.
        """
        # A tree may be older than the settings: it is looked at still, but nothing runs there.
        driver_of(self._drivers, tree.spec)
        failed: dict[Node, SandboxError] = {}
        first, patient = True, False
        while True:
            plan = plan_restore(
                node,
                standing=lambda at: self._standing(at, owner) is not None,
                costs=self._keeper.costs[tree.spec.driver],
                avoid=failed,
            )
            if plan is None:
                # A snapshot that only the machine stood in the way of is no lost state.
                raise next(iter(failed.values()), None) or self._lost(tree, node, owner)
            if first and _is_rollout(owner) and (plan.way is not Way.STANDING or plan.suffix):
                self._keeper.note_demand(node)
            first = False
            with timing.measure("restore_s"):
                slot = await self._acquire(plan, tree, owner, failed)
            if slot is None:
                continue
            with timing.measure("replay_s"):
                began = time.perf_counter()
                try:
                    reached = await self._replay(slot, plan, tree, timing, patient=patient)
                except _TooFast:
                    patient = True
                    continue
                if plan.suffix:
                    self._counts.replay_s.observe(time.perf_counter() - began)
                if reached:
                    return slot

    def _standing(self, node: Node, owner: int | None) -> Slot | None:
        if owner is None or owner == VISITOR:
            return None
        # A state that lives in one sandbox only is left to its rollout: taking it could make it unreachable.
        return self._pool.roster.find(node, owner, shared=node.snapshot is not None or node.origin is None)

    async def _acquire(
        self, plan: RestorePlan, tree: Tree, owner: int | None, failed: dict[Node, SandboxError]
    ) -> Slot | None:
        """Return a sandbox at the plan's start; None where the plan no longer holds and another must be made."""
        if plan.way is Way.STANDING:
            return await self._take(plan, owner)
        if plan.way is Way.SNAPSHOT:
            return await self._restore(plan.start, tree, owner, failed)
        return await self._start(tree, owner)

    async def _take(self, plan: RestorePlan, owner: int | None) -> Slot | None:
        slot = self._standing(plan.start, owner)
        assert slot is not None
        warm = slot.warm
        if not await self._pool.lease(slot, plan.start, owner):
            return None
        if warm:
            self._counts.warm_used += 1
            if not plan.suffix:
                # Without it, a sandbox would have been wanted here: it counts as what it spared.
                self._keeper.note_demand(plan.start)
        return slot

    async def _restore(
        self, node: Node, tree: Tree, owner: int | None, failed: dict[Node, SandboxError]
    ) -> Slot | None:
        driver = self._drivers[tree.spec.driver]
        start = time.perf_counter()
        try:
            with self._keeper.leased(node) as frozen:
                slot = await self._launch(lambda: driver.restore(tree.spec, frozen), node, owner)
        except SandboxError as error:
            self._counts.failure("restore")
            log.warning("restore failed", node=node.id, error=str(error))
            self._keeper.failed(node, error)
            if node.snapshot is not None:
                failed[node] = error
            # Two in a row: it is the machine. Whoever asks again finds it better, or the snapshots dropped.
            if len(failed) > 1:
                raise
            return None
        seconds = time.perf_counter() - start
        self._counts.restores += 1
        self._counts.restore_s.observe(seconds)
        self._keeper.restored(node, seconds)
        return slot

    async def _start(self, tree: Tree, owner: int | None) -> Slot:
        driver = self._drivers[tree.spec.driver]
        if await tree_key(self._drivers, tree.spec) != tree.key:
            raise SpecError(
                "the base or an archive that this rollout's task names has changed since its tree began. "
                "PUT the task again and start another rollout."
            )
        start = time.perf_counter()
        slot = await self._launch(lambda: driver.start(tree.spec), tree.root, owner)
        seconds = time.perf_counter() - start
        self._counts.starts += 1
        self._counts.start_s.observe(seconds)
        self._learn(tree, self._costs(tree).started(seconds))
        if tree.root.snapshot is None and slot.sandbox is not None:
            # The root's digest must be known before the first record, or a call that leads back would not meet it.
            try:
                await self._keeper.keep(slot.sandbox, tree, tree.root)
            except NotFreezableError:
                log.info("set-up left processes; every sandbox of this task starts from nothing", tree=tree.id)
            except BaseException:
                await self._pool.close(slot)
                raise
        return slot

    async def _launch(self, make: Callable[[], Awaitable[Sandbox]], place: Node, owner: int | None) -> Slot:
        if owner is None:
            return await self._pool.start_warm(make, place)
        return await self._pool.start(make, place, owner)

    async def _replay(self, slot: Slot, plan: RestorePlan, tree: Tree, timing: Timing, *, patient: bool) -> bool:
        """Run the plan's suffix; False where a record turned out not to reproduce its state.

        patient: give what the calls leave running the time that it had between them.

        Raises:
            _TooFast: it was not patient, and that may be why an answer is another.
        """
        assert slot.sandbox is not None
        try:
            for record in plan.suffix:
                if patient:
                    await rest(slot.sandbox, gap_s(record))
                start = time.perf_counter()
                call = self._records.call(record)
                execution = await slot.sandbox.execute(call)
                overhead_s = max(0.0, time.perf_counter() - start - execution.seconds)
                self._learn(tree, self._costs(tree).replayed(overhead_s))
                timing.replayed_calls += 1
                self._counts.replayed_calls += 1
                self._counts.replayed_s += execution.seconds
                require_its_due(record, execution)
                must_come = partial(steady, tree.spec, call)
                difference = differs(record, execution, self._records.result(record), must_come)
                if difference and not patient and gap_s(record) > 0:
                    raise _TooFast  # noqa: TRY301 - closes it as any other end does
                if difference:
                    self._doubt(record, difference)
                    await self._pool.close(slot)
                    return False
                record.doubtful = False
                self._pool.roster.move(slot, record.target)
        except BaseException:
            await self._pool.close(slot)
            raise
        return True

    async def _rest(self, slot: Slot, age_s: float) -> None:
        assert slot.sandbox is not None
        await rest(slot.sandbox, age_s)

    def _doubt(self, record: Record, difference: str) -> None:
        record.reproducible = False
        self._counts.divergences += 1
        self._records.save_divergence(record, [])
        log.warning("replay diverged", record=record.id, source=record.source.id, difference=difference)

    def _lost(self, tree: Tree, node: Node, owner: int | None) -> StateLostError:
        """Set aside what cannot be rebuilt, so that no other rollout is led there; not before a rollout asks for it."""
        why = f"a replay of the calls that lead to n{node.id} reaches another state, and no snapshot of it is left"
        barrier = node.origin
        while barrier is not None and barrier.reproducible:
            barrier = barrier.source.origin
        if _is_rollout(owner) and barrier is not None and not barrier.target.diverged and not node.detached:
            lost = tree.set_aside(barrier, why)
            self._records.save_divergence(barrier, lost)
        return StateLostError(why)

    def _costs(self, tree: Tree) -> Costs:
        return self._keeper.costs[tree.spec.driver]

    def _learn(self, tree: Tree, costs: Costs) -> None:
        self._keeper.costs[tree.spec.driver] = costs


def _is_rollout(owner: int | None) -> bool:
    return owner not in (None, NOBODY, VISITOR)
