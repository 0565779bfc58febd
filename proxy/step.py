"""The product on one screen: how a tool call is answered.

1. Hit. The tree has a record of the call at the rollout's node. `known` writes the step to the journal and returns the
   record, without an `await` and without a sandbox.
2. Miss. `run` waits for the rollout's turn and executes the call in a sandbox in the node's state, once for all
   rollouts that make it there (`executor`). The result is recorded before it is answered.
3. Either way the rollout moves to the record's target node, and `warm` may prepare a sandbox where it is heading.
"""

import asyncio
import time
from dataclasses import dataclass

import structlog
from structlog.contextvars import bind_contextvars

from proxy.execution.call_order import CallOrder
from proxy.execution.errors import RolloutGoneError
from proxy.execution.executor import AnyCall, Executor
from proxy.execution.tracing import Traces
from proxy.execution.warm_forks import WarmForks
from proxy.storage.journal import Journal, JournalEntry
from proxy.telemetry.counters import Counters
from proxy.telemetry.timing import Timing
from proxy.tree.keys import CallKey
from proxy.tree.polling import key_for
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
        self, executor: Executor, journal: Journal, counts: Counters, warm: WarmForks, traces: Traces | None = None
    ) -> None:
        self._executor, self._journal, self._counts, self._warm, self._traces = executor, journal, counts, warm, traces
        self.order, self.calls = CallOrder(), TaskOwner()

    def known(self, rollout: Rollout, key: CallKey) -> Record | None:
        """Answer a call from the tree and take the step, or return None. O(1): about 2 us with the journal entry."""
        if self.order.busy(rollout) or not rollout.cached:
            return None
        if rollout.polled_keys or rollout.node.settling:
            key = key_for(rollout, key, time.monotonic())
        record = rollout.node.records.get(key)
        if record is not None:
            self._advance(rollout, record, Outcome.HIT)
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
            key = key_for(rollout, key, time.monotonic())
            record, outcome = node.records.get(key), Outcome.HIT
            if record is None:
                timing.wait_s = time.perf_counter() - began
                record, outcome = await self._executor.execute(rollout, node, call, key, timing, listener)
                if record is None:
                    return None
            self._advance(rollout, record, outcome, timing)
            log.debug("answered", outcome=outcome.name.lower(), record=record.id, tool_s=timing.tool_s)
        return Answer(record, outcome, timing)

    def _advance(self, rollout: Rollout, record: Record, outcome: Outcome, timing: Timing | None = None) -> None:
        # The journal comes first: after a crash, the rollout continues where its agent last saw it.
        self._journal.append(JournalEntry(rollout.id, rollout.calls, record.id, outcome))
        rollout.advance(record, outcome, time.monotonic())
        self._counts.answered(outcome, record.seconds)
        self._warm.note_step(rollout)
        if self._traces is not None:
            self._traces.answered(rollout, record, outcome, timing)
