"""Replay: run the recorded calls that lead from a sandbox's node to another one, and check what they do.

After each call the sandbox is compared with the record (`divergence`). If it differs, the replay was too fast, or it
missed the state and is tried once more, or it has diverged. In each case the sandbox is closed: its state is unknown. A
call whose replay did reach its state is no longer doubtful.
"""

import time
from enum import Enum
from functools import partial

import structlog

from proxy.dialects.rule_schema import steady
from proxy.dialects.tool_failures import as_shared
from proxy.execution.divergence import divergence, gap_s, require_conclusive
from proxy.storage.errors import DamagedError
from proxy.storage.records import RecordStore
from proxy.telemetry.counters import Counters
from proxy.telemetry.timing import Timing
from proxy.tree.restore_plan import RestorePlan
from proxy.tree.rollout import is_moving
from proxy.tree.tree import Record, Tree
from sandboxes.driver import expect, rest
from sandboxes.pool.pool import Pool
from sandboxes.pool.roster import Slot
from snapshots.cache import SnapshotCache

log = structlog.get_logger()


class ReplayResult(Enum):
    """How a replay ended."""

    REACHED = "reached"
    """The sandbox is in the state of the target node."""
    DIVERGED = "diverged"
    """A call reached another state. Its record is marked, and the sandbox is closed."""
    TOO_FAST = "too fast"
    """A call reached another state, possibly because background processes had less time. The sandbox is closed."""
    MISSED = "missed"
    """A call reached another state, possibly by chance, for the first time. The sandbox is closed."""


class Replayer:
    """Replays recorded calls in leased sandboxes."""

    def __init__(self, pool: Pool, cache: SnapshotCache, records: RecordStore, counts: Counters) -> None:
        self._pool, self._cache, self._records, self._counts = pool, cache, records, counts

    async def replay(
        self, slot: Slot, plan: RestorePlan, tree: Tree, timing: Timing, missed: set[Record], *, patient: bool
    ) -> ReplayResult:
        """Run the calls of a plan in a leased sandbox at the plan's start; it is closed if the replay fails.

        `missed` are records that have missed their state before, for the same lease; further ones are added. A patient
        replay gives background processes the time that they had between the recorded calls. Raises SandboxError if the
        sandbox failed, or a call did not get the time or memory that it had before.
        """
        began = time.perf_counter()
        try:
            result = await self._replay(slot, plan, tree, timing, missed, patient=patient)
        except BaseException:
            await self._pool.close(slot)
            raise
        # A call that diverged left a state that no node has.
        if result is not ReplayResult.REACHED:
            await self._pool.close(slot)
        # A replay that is about to be repeated is not a measurement of one.
        if plan.suffix and result in (ReplayResult.REACHED, ReplayResult.DIVERGED):
            self._counts.replay_s.observe(time.perf_counter() - began)
        return result

    async def _replay(
        self, slot: Slot, plan: RestorePlan, tree: Tree, timing: Timing, missed: set[Record], *, patient: bool
    ) -> ReplayResult:
        proven: list[Record] = []
        try:
            return await self._replay_all(slot, plan, tree, timing, missed, proven, patient=patient)
        finally:
            # The calls before one that diverged are proven too: they did reach their states.
            if proven:
                self._records.save_proven(proven)

    async def _replay_all(
        self,
        slot: Slot,
        plan: RestorePlan,
        tree: Tree,
        timing: Timing,
        missed: set[Record],
        proven: list[Record],
        *,
        patient: bool,
    ) -> ReplayResult:
        for record in plan.suffix:
            # In the recorded order: each call must find the state that its predecessor left.
            try:
                reason = await self._run(slot, record, tree, timing, patient=patient)
            except DamagedError as error:
                # The call, or the answer that would have to repeat, is not what was written: nothing can be checked.
                self._mark_divergence(record, str(error))
                return ReplayResult.DIVERGED
            # Without a gap the first replay had as much time as the recorded calls, so a second one would not help.
            # 1. Too fast: background processes had less time than when the call was recorded. A server may not have
            # listened yet, so the replay is tried once more, patiently: with the recorded gaps.
            if reason and not patient and gap_s(record) > 0:
                return ReplayResult.TOO_FAST
            # 2. Missed: a command may leave another state once in many runs, so it is tried once more. Not where only
            # the answer names the state: there a second try would accept by chance what cannot be compared. And not
            # if the call used the clock or random numbers.
            if reason and record.target.state is not None and not record.doubtful and record not in missed:
                missed.add(record)
                log.info("replay missed a state, and is tried again", record=record.id, difference=reason)
                return ReplayResult.MISSED
            # 3. Diverged: the record does not reproduce its state. `plan_restore` looks for a way around it.
            if reason:
                self._mark_divergence(record, reason)
                return ReplayResult.DIVERGED
            if record.repeated(time.time()):
                proven.append(record)
            # After each call and not at the end, so that a failure in between leaves the slot at the node where its
            # sandbox really was.
            if not is_moving(record.source):
                slot.live_from = time.monotonic()
            self._pool.roster.move(slot, record.target)
        return ReplayResult.REACHED

    async def _run(self, slot: Slot, record: Record, tree: Tree, timing: Timing, *, patient: bool) -> str:
        """Run one recorded call; return how it differs from its record, or an empty string."""
        assert slot.sandbox is not None
        if patient:
            # Before the call: processes of the previous call were still starting in the gap between the two.
            await rest(slot.sandbox, gap_s(record))
        start = time.perf_counter()
        # Read from the store: calls may carry uploads of megabytes, so the tree holds only their numbers.
        call, course = self._records.call_and_course(record)
        # A second run may write in another order and get other pids, which later calls could see.
        await expect(slot.sandbox, course)
        execution = as_shared(tree.spec, call, await slot.sandbox.execute(call))
        self._counts.egress.note(execution.exchanges, tree.id, record.source.id, None, time.time())
        # What the replay costs beside the tool itself: plans add it for each call of a suffix.
        overhead_s = max(0.0, time.perf_counter() - start - execution.seconds)
        costs, driver = self._cache.costs, tree.spec.driver
        costs[driver] = costs[driver].replayed(overhead_s)
        timing.replayed_calls += 1
        self._counts.replayed_calls += 1
        self._counts.replayed_s += execution.seconds
        # A replay that ran out of time says nothing about the record, so it is an error and no divergence.
        require_conclusive(record, execution)
        return divergence(record, execution, partial(self._records.result, record), partial(steady, tree.spec, call))

    def _mark_divergence(self, record: Record, reason: str) -> None:
        # In memory first: the next plan must not choose this record again, whatever the store does.
        record.reproducible = False
        self._counts.divergences += 1
        # In the store as well: after a restart the next process must not trust this record either.
        self._records.save_divergence(record, [])
        log.warning("replay diverged", record=record.id, source=record.source.id, difference=reason)
