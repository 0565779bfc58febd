"""The product on one screen: how a tool call is answered.

1. Hit. The tree has a record of the call at the rollout's node. Its answer is read first, so that a step is never
   taken for an answer that cannot be sent. Then `take` writes the step to the journal. Nothing here awaits.
2. Miss. `run` waits for the rollout's turn and executes the call in a sandbox in the node's state, once for all
   rollouts that make it there (`executor`). The result is recorded before it is answered.
3. Either way the rollout moves to the record's target node, and `warm` may prepare a sandbox where it is heading.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog
from structlog.contextvars import bind_contextvars

from proxy.execution.call_order import CallOrder
from proxy.execution.errors import RolloutGoneError
from proxy.execution.executor import AnyCall, Executor
from proxy.execution.root_state import RootChangedError
from proxy.execution.tracing import Traces
from proxy.execution.warm_forks import WarmForks
from proxy.storage.errors import DamagedError
from proxy.storage.journal import Journal
from proxy.storage.journal_segments import JournalEntry
from proxy.storage.rollouts import Overhead
from proxy.telemetry.counters import Counters
from proxy.telemetry.timing import Timing
from proxy.tree.keys import CallKey
from proxy.tree.polling import holds, key_for
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Record
from sandboxes.listener import Listener
from sandboxes.task_owner import TaskOwner

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Answer:
    """The record that answers a call, how the record was obtained, and where the time went."""

    record: Record
    outcome: Outcome
    timing: Timing


class Step:
    """Answers the calls of all rollouts. `order` has each rollout's turns; `calls` are the tasks of calls in flight."""

    def __init__(
        self,
        executor: Executor,
        journal: Journal,
        counts: Counters,
        warm: WarmForks,
        read: Callable[[Record], object],
        traces: Traces | None = None,
        note: Callable[[Rollout, Record, Outcome], None] | None = None,
    ) -> None:
        """Create the step of all rollouts.

        Args:
            executor: Runs the calls that the tree does not know.
            journal: Takes each step before its answer is sent.
            counts: Where answers are counted.
            warm: Is told of each step.
            read: Reads a record's answer, and raises `DamagedError` if it is not what was written.
            traces: Exports spans; None if no endpoint is set.
            note: Learns from each step; None if nothing is executed ahead.
        """
        self._executor, self._journal, self._counts, self._warm, self._traces = executor, journal, counts, warm, traces
        self._read, self._note = read, note
        self.order, self.calls = CallOrder(), TaskOwner()
        self._overheads: dict[int, Overhead] = {}
        # Moves a rollout that has seen nothing to the current tree; see `Tasks.renew`.
        self.renew: Callable[[Rollout], Awaitable[bool]] | None = None

    def find(self, rollout: Rollout, key: CallKey, *, expected: int = 0) -> Record | None:
        """Return the record that answers a call, or None. No step is taken: `take` follows, without an await. O(1)."""
        if self.order.busy(rollout, but_for=expected) or not rollout.cached:
            return None
        if rollout.node.state is None:
            key = key_for(rollout, key, time.monotonic())
        return rollout.node.records.get(key)

    def take(self, rollout: Rollout, record: Record) -> None:
        """Take the step of a record that `find` returned and whose answer was read. 2 us with the journal."""
        self._advance(rollout, record, Outcome.HIT)

    def known(self, rollout: Rollout, key: CallKey, *, expected: int = 0) -> Record | None:
        """Answer a call from the tree and take the step, or return None. The answer is in memory then.

        `expected` is 1 for a call that `CallOrder.expect` has noted itself: it does not wait for itself.
        """
        record = self.find(rollout, key, expected=expected)
        if record is None or not self._is_readable(rollout, record):
            return None
        self.take(rollout, record)
        return record

    async def run(
        self, rollout: Rollout, call: AnyCall, key: CallKey, listener: Listener | None = None, *, commutes: bool = False
    ) -> Answer:
        """Answer a call; the listener receives its output meanwhile. For `commutes` see `CallOrder.turn`.

        If the caller is cancelled, the execution continues, and its result is recorded.
        """
        self.detach(rollout)
        answer = await self.poll(rollout, call, key, listener, commutes=commutes)
        assert answer is not None, "only polls of background processes can have nothing to return"
        return answer

    async def poll(
        self, rollout: Rollout, call: AnyCall, key: CallKey, listener: Listener | None = None, *, commutes: bool = False
    ) -> Answer | None:
        """Answer a call as `run` does, but do not `detach`. None: no new output, no new state, so no record."""
        self.order.arrive(rollout)
        answering = self.calls.spawn("call", self._answer(rollout, call, key, listener, commutes), awaited=True)
        return await asyncio.shield(answering)

    def detach(self, rollout: Rollout) -> None:
        """Let the process of the rollout's in-flight call continue in the background: the client has moved on."""
        self._executor.flights.detach(rollout)

    async def drain(self) -> None:
        """Wait for the calls in flight. Processes that can continue in the background do so."""
        self._executor.flights.detach_all()
        await self.calls.wait()

    async def _answer(
        self, rollout: Rollout, call: AnyCall, key: CallKey, listener: Listener | None, commutes: bool
    ) -> Answer | None:
        timing, began = Timing(), time.perf_counter()
        async with self.order.turn(rollout, key, commutes=commutes):
            node = rollout.node
            bind_contextvars(task=rollout.task, rollout=rollout.name, node=f"n{node.id}")
            if rollout.finished or node.detached:
                raise RolloutGoneError(f"rollout {rollout.name!r} ended while this call waited. Start another rollout.")
            while True:
                now = time.monotonic()
                own = key_for(rollout, key, now)
                record, outcome = node.records.get(own), Outcome.HIT
                if record is not None and self._is_readable(rollout, record):
                    break
                timing.wait_s = time.perf_counter() - began
                try:
                    record, outcome = await self._executor.execute(rollout, node, call, own, timing, listener)
                except RootChangedError:
                    # The base changed after the rollout began. If it has seen nothing yet, it begins with the new one.
                    if self.renew is None or not await self.renew(rollout):
                        raise
                    record, outcome = await self._executor.execute(rollout, rollout.node, call, key, timing, listener)
                if record is None:
                    return None
                # The execution that this call joined may be one of a rollout whose processes have another age.
                if outcome is Outcome.WAIT and not holds(record, rollout, now):
                    continue
                # A response that was passed on while it arrived may be too large for the memory, and is not read.
                if listener is None:
                    self._read(record)
                break
            self._advance(rollout, record, outcome, timing)
            self._note_overhead(rollout, timing)
            log.debug("answered", outcome=outcome.name.lower(), record=record.id, tool_s=timing.tool_s)
        return Answer(record, outcome, timing)

    def take_overheads(self) -> dict[int, Overhead]:
        """Return what calls took beside their tools since the last time, by the numbers of their rollouts."""
        taken, self._overheads = self._overheads, {}
        return taken

    def _note_overhead(self, rollout: Rollout, timing: Timing) -> None:
        spent = self._overheads.get(rollout.id, Overhead(0.0, 0.0, 0.0))
        self._overheads[rollout.id] = Overhead(
            spent.restore_s + timing.restore_s, spent.replay_s + timing.replay_s, spent.wait_s + timing.wait_s
        )

    def _is_readable(self, rollout: Rollout, record: Record) -> bool:
        """Return whether a record's answer can be read; a damaged one answers no call any more.

        Raises:
            StoreError: The store cannot be read now. No step was taken, so the client may send the call again.
        """
        try:
            self._read(record)
        except DamagedError as error:
            self._executor.discard(rollout.tree, record, str(error))
            return False
        return True

    def _advance(self, rollout: Rollout, record: Record, outcome: Outcome, timing: Timing | None = None) -> None:
        # The journal comes first: after a crash, the rollout continues where its agent last saw it.
        self._journal.append(JournalEntry(rollout.id, rollout.calls, record.id, outcome))
        rollout.advance(record, outcome, time.monotonic())
        self._counts.answered(outcome, record.seconds)
        self._warm.note_step(rollout)
        if self._note is not None:
            self._note(rollout, record, outcome)
        if self._traces is not None:
            self._traces.answered(rollout, record, outcome, timing)
