"""Restore: from a node of a tree to a leased sandbox in that node's state.

`_lease` is a loop of three steps: plan, acquire, replay. It ends with a sandbox at the node, with an error of the
machine, or because no way is left. In the last case the node, and what is only behind it, is set aside.

A snapshot that cannot be restored blocks no rollout. The next snapshot above it is tried, and after that a fresh
sandbox and a replay from the root. If that reaches the state, a new snapshot replaces the old one. If not, the snapshot
is the only way. Then its rollouts get an error of the machine for a while (`snapshots.failures.HOPELESS_S`). After that
the state counts as lost, if a fresh sandbox shows that the machine works.

A rollout may take its own sandbox, and any whose state can be had again: the node is the root or has a snapshot. A
state that exists in one sandbox only is left to the rollout that made it, or the node would become unreachable.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial

import structlog

from proxy.execution.errors import StateLostError
from proxy.execution.gate import KeptElsewhere
from proxy.execution.replay import Replayer, ReplayResult
from proxy.execution.root_state import driver_of
from proxy.execution.sandbox_maker import Owner, SandboxMaker, is_rollout
from proxy.execution.snapshot_value import SnapshotValue
from proxy.storage.records import RecordStore
from proxy.telemetry.counters import Counters
from proxy.telemetry.timing import Timing
from proxy.tree.polling import agree
from proxy.tree.restore_plan import RestorePlan, Way, arrival_age_s, plan_restore, recorded_dwell_s
from proxy.tree.rollout import Rollout, is_moving
from proxy.tree.tree import Node, Record, Tree, path
from sandboxes.driver import Driver, ReservingDriver, Sandbox, fulfils, rest
from sandboxes.errors import NotFreezableError, SandboxError, SpecError
from sandboxes.pool.pool import Pool
from sandboxes.pool.roster import Slot
from sandboxes.task_owner import TaskOwner
from snapshots.cache import SnapshotCache
from snapshots.capture import Capture

log = structlog.get_logger()

_TRIED_SNAPSHOTS = 2
"""How many snapshots a lease tries. Each failing restore may take seconds, while the call waits.

With one, a damaged snapshot would cost a replay from the root."""
_SECURE_S = 5.0
"""How long a rollout waits for the freeze of a state that it is to be led to. Then it executes the call itself."""


class Restorer:
    """Leases sandboxes in the states of nodes."""

    def __init__(
        self,
        drivers: Mapping[str, Driver],
        pool: Pool,
        cache: SnapshotCache,
        capture: Capture[Node],
        value: SnapshotValue,
        records: RecordStore,
        counts: Counters,
        maker: SandboxMaker,
        elsewhere: KeptElsewhere,
    ) -> None:
        self.maker = maker  # Makes the sandboxes that neither a rollout has nor the pool holds.
        self._drivers, self._pool, self._cache, self._capture, self._value = drivers, pool, cache, capture, value
        self._records, self._counts = records, counts
        self._replayer = Replayer(pool, cache, records, counts)
        self._securing = TaskOwner()
        self._elsewhere = elsewhere

    @asynccontextmanager
    async def lease_at(self, rollout: Rollout, node: Node, timing: Timing) -> AsyncIterator[Slot]:
        """Lease a sandbox in the node's state. Afterwards it is where `moved` noted, or closed if the block failed.

        Raises StateLostError if no way leads to the node, and SandboxError, SpecError or OverloadedError if the
        machine, the spec or the budget does not allow it. So do the other methods that make a sandbox.
        """
        # A call that fails ends its sandbox, which may be all that is left of the state.
        driver = driver_of(self._drivers, rollout.tree.spec)
        if fulfils(driver, ReservingDriver):
            driver.require_reserve()
        # Looked up before the lease, which makes any sandbox the rollout's own.
        has_own = any(slot.owner == rollout.id for slot in self._pool.roster.at(node))
        age_s = rollout.age_s(time.monotonic())
        slot = await self._lease(rollout.tree, node, rollout.id, timing, age_s=age_s)
        try:
            if not has_own and node.state is None:
                # The replay took no time, but the agent was thinking: let background processes become as old.
                with timing.measure("restore_s"):
                    await self._rest(slot, rollout.dwell_s(time.monotonic()))
            # Inside the block the call changes the sandbox; `moved` notes its new node before the lease ends.
            yield slot
        except BaseException:
            # The call may have changed the sandbox before it failed, so its state is unknown.
            await self._pool.close(slot)
            raise
        await self._give_back(slot, rollout.tree)

    def moved(self, slot: Slot, record: Record) -> None:
        """Note that a leased sandbox has run a record's call. What the call waited for the proxy is no age."""
        slot.live_from = time.monotonic() - arrival_age_s(record)
        self._pool.roster.move(slot, record.target)

    def note_shortage(self) -> None:
        """Note that the sandboxes which live hold all that the machine has for them, such as pipes."""
        self._pool.room.note_shortage()

    @property
    def has_spare_room(self) -> bool:
        """Whether a sandbox may be made without taking room that a call may need."""
        return self._pool.has_spare_room

    async def prepare(self, tree: Tree, node: Node) -> bool:
        """Make a sandbox ahead of its use and leave it idle at the node; return False if no way leads there."""
        try:
            # Without an owner: the lease makes no idle sandbox anybody's, and the fork belongs to the first rollout
            # that comes.
            slot = await self._lease(tree, node, None, Timing())
        except StateLostError:
            return False
        if node.detached:
            # The node was forgotten while the sandbox was made.
            await self._pool.close(slot)
            return False
        await self._give_back(slot, tree)
        return True

    @asynccontextmanager
    async def fork(self, tree: Tree, node: Node, *, spare: bool = False) -> AsyncIterator[Sandbox]:
        """Yield a throw-away sandbox in the node's state; a spare one is made only if no call needs its room."""
        slot = await self._lease(tree, node, None if spare else Owner.SCRATCH, Timing())
        # A spare lease has no owner and counts as warm; from here on no rollout may take the sandbox.
        slot.owner, slot.warm = Owner.SCRATCH, False
        assert slot.sandbox is not None
        try:
            if node.state is None:
                await self._rest(slot, math.inf if spare else recorded_dwell_s(node))
            yield slot.sandbox
        finally:
            await self._pool.close(slot)

    async def prove(self, tree: Tree, node: Node) -> None:
        """Reach the node once without its snapshot, to prove records; raise StateLostError if it is the only way."""
        await self._pool.close(await self._lease(tree, node, None, Timing(), without=(node,)))

    async def take_snapshot(self, tree: Tree, node: Node) -> None:
        """Take the node's snapshot, if it has none. Raises NotFreezableError, and the node remembers why."""
        # Another call may take the snapshot during any await below: then there is nothing left to do.
        while node.snapshot is None:
            idle = self._pool.roster.find(node, Owner.CONTROL_PLANE, shared=True)
            owner = None if idle is None else idle.owner
            if idle is None:
                slot = await self._lease(tree, node, Owner.CONTROL_PLANE, Timing())
            elif await self._pool.lease(idle, node, owner):
                slot = idle
            else:
                # Another call took it meanwhile; look again.
                continue
            # The sandbox stays with the rollout that owned it, if any.
            slot.owner = owner
            if not await self._capture.freeze_leased(slot, tree, node):
                return

    async def secure(self, tree: Tree, record: Record) -> None:
        """Keep the state to which a record leads, if that is possible now, so that the record may answer calls."""
        # In a task of its own: an interrupted freeze closes its sandbox.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SECURE_S):
                await asyncio.shield(self._securing.spawn("secure", self._secure(tree, record), awaited=True))

    async def _secure(self, tree: Tree, record: Record) -> None:
        node = record.target
        for slot in self._pool.roster.at(node):
            # What has run for too long is not what a rollout that arrives now would find alone.
            if not self._value.can_freeze(node) or not self._is_as_old(node, arrival_age_s(record), slot):
                continue
            # A sandbox that is being frozen is waited for here, and not leased.
            if node.snapshot is not None or not await self._pool.lease(slot, node, slot.owner):
                continue
            try:
                await self._capture.freeze_leased(slot, tree, node)
            except (NotFreezableError, SandboxError, OSError) as error:
                log.warning("a state that other rollouts come to is not kept", node=node.id, error=str(error))
        await self._capture.arrival(node)

    async def drain(self) -> None:
        """Wait until no state is being kept for a rollout that comes to it."""
        await self._securing.wait()

    async def _give_back(self, slot: Slot, tree: Tree) -> None:
        # Given back at the position that `moved` noted, which is the target of the call and not the node of the
        # lease.
        node = slot.position
        assert isinstance(node, Node)
        await self._capture.give_back(slot, tree, node, freeze=self._value.worth_freezing(node, tree))

    async def _rest(self, slot: Slot, dwell_s: float) -> None:
        assert slot.sandbox is not None
        await rest(slot.sandbox, dwell_s)

    async def _lease(
        self,
        tree: Tree,
        node: Node,
        owner: int | None,
        timing: Timing,
        *,
        without: Collection[Node] = (),
        age_s: float = 0.0,
    ) -> Slot:
        """Lease a sandbox in the node's state, without the snapshots of some nodes.

        The owner is the id of a rollout, or an `Owner`. None is a warm fork, made from snapshots and replays alone.
        """
        # A tree may be older than the settings that turned its driver off. It can be viewed, but nothing runs in it.
        driver_of(self._drivers, tree.spec)
        await self._elsewhere.fetch_recordings(tree)
        # Only within this lease: a snapshot that failed once may well be restored by the next one.
        failed: dict[Node, SandboxError] = {}
        missed: set[Record] = set()
        demand_noted, patient, may_fetch = not is_rollout(owner), False, not without
        while True:
            # 1. Plan the cheapest way: a sandbox at the node or above it, a snapshot, or a fresh sandbox at the root;
            # then the replay of the calls in between. No await: what the plan saw is true until the next line that
            # awaits.
            plan = plan_restore(
                node,
                idle_at=lambda at: self._idle_at(at, owner, age_s if at is node else None) is not None,
                costs=self._cache.costs[tree.spec.driver],
                avoid={*_unusable(failed, node), *without},
            )
            # Once for each lease: what was fetched and fails is not fetched again.
            if may_fetch:
                may_fetch = False
                if await self._elsewhere.fetch(tree, node, plan):
                    continue
            if plan is None:
                if failed and await self._give_up(failed, tree, owner):
                    continue
                # A snapshot that the machine failed to restore is an error of the machine, not a lost state.
                raise next(iter(failed.values()), None) or self._lost(tree, node, owner)
            # Demand is counted once for each lease, not for each plan, and not if a sandbox is here already.
            if not demand_noted and (plan.way is not Way.IDLE or plan.suffix):
                self._value.note_demand(node)
            demand_noted = True
            # 2. Acquire. Each await in here may change what the plan relied on: another rollout takes the sandbox, or a
            # snapshot turns out to be damaged.
            with timing.measure("restore_s"):
                slot = await self._acquire(plan, tree, owner, failed, age_s if plan.start is node else None)
            if slot is None:
                # The plan no longer holds; `failed` keeps the next one from the same snapshot.
                continue
            # 3. Replay the calls in between and check them. The sandbox is closed unless it reached the node.
            with timing.measure("replay_s"):
                result = await self._replayer.replay(slot, plan, tree, timing, missed, patient=patient)
            if result is ReplayResult.REACHED:
                await self._renew(slot, tree, node, failed)
                return slot
            # What the replay did not reach may be in the store.
            may_fetch = not without
            # A diverged record is marked, so the next plan avoids it, and each record misses its state once at most.
            # That is why the loop ends.
            patient = patient or result is ReplayResult.TOO_FAST

    def _idle_at(self, node: Node, owner: int | None, age_s: float | None) -> Slot | None:
        """Return an idle sandbox at the node that the owner may take, if there is one.

        Live processes in another's sandbox must be `age_s` old, or, for None, as old as they were on arrival here.
        """
        # Warm forks and scratch forks are made from snapshots and replays: they take no sandbox from a rollout.
        if owner is None or owner == Owner.SCRATCH:
            return None
        # Any state with a snapshot can be had again, and so can the root; their sandboxes are free to take.
        shared = node.snapshot is not None or node.origin is None
        return self._pool.roster.find(node, owner, shared=shared, fits=partial(self._is_as_old, node, age_s))

    @staticmethod
    def _is_as_old(node: Node, age_s: float | None, slot: Slot) -> bool:
        if node.origin is None or not is_moving(node):
            return True
        expected_s = arrival_age_s(node.origin) if age_s is None else age_s
        return agree(time.monotonic() - slot.live_from, expected_s)

    async def _acquire(
        self, plan: RestorePlan, tree: Tree, owner: int | None, failed: dict[Node, SandboxError], age_s: float | None
    ) -> Slot | None:
        """Lease a sandbox at the plan's start; return None if the plan no longer holds and another must be made."""
        if plan.way is Way.IDLE:
            return await self._take(plan, tree, owner, age_s)
        if plan.way is Way.SNAPSHOT:
            return await self._restore(plan.start, tree, owner, failed)
        try:
            return await self.maker.start(tree, owner)
        except SpecError:
            # The root cannot be built any more, for example because its base has changed. That is final, but a snapshot
            # that has just failed may be restored by the next attempt.
            if failed and not any(map(self._cache.failures.is_hopeless, failed)):
                raise next(iter(failed.values())) from None
            raise

    async def _take(self, plan: RestorePlan, tree: Tree, owner: int | None, age_s: float | None) -> Slot | None:
        # There is no await between the plan and this line, so the sandbox is still idle.
        slot = self._idle_at(plan.start, owner, age_s)
        assert slot is not None
        was_warm = slot.warm
        if not await self._pool.lease(slot, plan.start, owner):
            # It was being frozen, and another rollout may have taken it, or it may have failed.
            return None
        needed = self._value.is_last_way_of_others(plan.start, tree, owner) and self._value.can_freeze(plan.start)
        if needed and not await self._keep(slot, plan.start, tree, owner):
            return None
        if was_warm:
            self._counts.warm_used += 1
            if not plan.suffix:
                # Without the warm fork there would have been no sandbox here, so this counts as demand for the state.
                self._value.note_demand(plan.start)
        return slot

    async def _keep(self, slot: Slot, node: Node, tree: Tree, owner: int | None) -> bool:
        """Freeze a leased sandbox that leaves a state of another rollout; lease it again, or return False."""
        try:
            await self._capture.freeze_leased(slot, tree, node)
        except (NotFreezableError, SandboxError, OSError) as error:
            # A state that cannot be frozen is not kept from this rollout: it could never go on otherwise.
            log.warning("a state that other rollouts need is not kept", node=node.id, error=str(error))
        return await self._pool.lease(slot, node, owner)

    async def _restore(
        self, node: Node, tree: Tree, owner: int | None, failed: dict[Node, SandboxError]
    ) -> Slot | None:
        try:
            return await self.maker.restore(node, tree, owner)
        # Only `SandboxError`: a defect or a cancellation must not be counted against the snapshot.
        except SandboxError as error:
            self._counts.failure("restore")
            log.warning("restore failed", node=node.id, error=str(error))
            # A damaged snapshot is dropped at once, another one at its second failure if a replay reaches the node
            # as well.
            is_proven = self._value.is_proven(node, tree.spec.driver)
            self._cache.failed(node, error, time.monotonic(), reproducible=is_proven)
            # A snapshot that was dropped needs no entry: the next plan does not see it.
            if node.snapshot is not None:
                failed[node] = error
            return None

    async def _renew(self, slot: Slot, tree: Tree, node: Node, failed: Mapping[Node, SandboxError]) -> None:
        """Replace the node's snapshot, if it could not be restored, now that a sandbox is in its state."""
        if node not in failed:
            return
        assert slot.sandbox is not None
        try:
            await self._capture.renew(slot, tree, node, failed[node])
        except BaseException:
            await self._pool.close(slot)
            raise

    async def _give_up(self, failed: dict[Node, SandboxError], tree: Tree, owner: int | None) -> bool:
        """Drop snapshots that are the only way and have long failed on a working machine; return if there were any."""
        hopeless = [node for node in failed if self._cache.failures.is_hopeless(node)]
        if not hopeless or not is_rollout(owner):
            return False
        # Only this shows that the machine is not to blame; nothing runs in the sandbox.
        await self._pool.close(await self.maker.start(tree, Owner.CONTROL_PLANE))
        for node in hopeless:
            self._counts.failure("lost-snapshot")
            log.error("a snapshot that is the only way is given up", node=node.id, error=str(failed.pop(node)))
            self._cache.drop(node)
        return True

    def _lost(self, tree: Tree, node: Node, owner: int | None) -> StateLostError:
        """Return the error of a node that cannot be rebuilt; if a rollout needs it, set aside what is lost with it."""
        why = f"a replay of the calls that lead to n{node.id} reaches another state, and no snapshot of it is left"
        # The record nearest to the node whose replay diverges: all that came from its target is out of reach.
        barrier = node.origin
        # Up to the first record that diverged. Everything between it and the node is as unreachable as the node.
        while barrier is not None and barrier.reproducible:
            barrier = barrier.source.origin
        if is_rollout(owner) and barrier is not None and not barrier.target.diverged and not node.detached:
            # Memory and store in one go, with no await in between: no rollout can be led to a node that is lost.
            lost = tree.set_aside(barrier, why)
            self._records.save_divergence(barrier, lost)
        return StateLostError(why)


def _unusable(failed: Collection[Node], target: Node) -> Collection[Node]:
    """Return the nodes whose snapshots a lease must not use any more: the failed ones; after two of them all."""
    # Two in a row: a third would hardly do better, and a fresh sandbox shows whether the machine is at fault.
    return failed if len(failed) < _TRIED_SNAPSHOTS else {target, *(record.source for record in path(target))}
