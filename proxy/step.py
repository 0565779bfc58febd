"""The product on one screen: how a tool call is answered.

1. Hit. The tree has a record of the call at the rollout's node, and a way back to its target; else the call is a miss.
   The answer is read before the step is taken: it can be sent. `take` writes the step to the journal. Nothing awaits.
2. Miss. `run` waits for the rollout's turn and executes the call in a sandbox in the node's state, once for all
   rollouts that make it there (`executor`). The result is recorded before it is answered.
3. Either way the rollout moves to the record's target node, and `notes` passes the step on.
"""

import asyncio
import time
from typing import cast

import structlog
from structlog.contextvars import bind_contextvars

from proxy.execution.call_order import CallOrder
from proxy.execution.errors import RolloutGoneError
from proxy.execution.executor import AnyCall, Executor
from proxy.execution.gate import Gate
from proxy.execution.step_notes import Answer, StepNotes
from proxy.storage.journal import Journal
from proxy.storage.journal_segments import JournalEntry
from proxy.telemetry.timing import Timing
from proxy.tree.keys import CallKey
from proxy.tree.polling import holds, key_for
from proxy.tree.restore_plan import has_way_back
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Record
from sandboxes.listener import Listener
from sandboxes.task_owner import TaskOwner


class Stepper:
    """Answers all calls. `order` has their turns, `calls` the tasks in flight, `notes` what follows from a step."""

    def __init__(self, executor: Executor, journal: Journal, notes: StepNotes, gate: Gate | None = None) -> None:
        """Take the steps of all rollouts; `journal` takes each step before its answer is sent."""
        self._executor, self._journal, self.notes, self._gate = executor, journal, notes, gate
        self.order, self.calls = CallOrder(), TaskOwner()
        self._log = structlog.get_logger().bind()  # Otherwise each line binds a logger, whether or not it is written.

    def find(self, rollout: Rollout, key: CallKey, *, expected: int = 0) -> Record | None:
        """Return the record that answers a call, or None. No step is taken: `take` follows, without an await. O(1)."""
        if self.order.busy(rollout, but_for=expected) or not rollout.cached:
            return None
        own = key if rollout.node.state is not None else key_for(rollout, key, time.monotonic())
        record = rollout.tree.record(rollout.node, own)
        return record if record is not None and has_way_back(record, rollout.tree) else None

    def take(self, rollout: Rollout, record: Record) -> None:
        """Take the step of a record that `find` returned and whose answer was read. 2 us with the journal."""
        self._advance(rollout, record, Outcome.HIT, None)

    def known(self, rollout: Rollout, key: CallKey, *, expected: int = 0) -> Record | None:
        """Answer a call from the tree and take the step, or return None. `expected`: 1 for a call noted by `expect`."""
        record = self.find(rollout, key, expected=expected) if self._gate is None else None  # Its log is first.
        if record is not None and self._executor.is_readable(rollout.tree, record):
            self.take(rollout, record)
            return record
        return None

    async def run(self, rollout: Rollout, call: AnyCall, key: CallKey, listener: Listener | None = None) -> Answer:
        """Answer a call; the listener receives its output meanwhile. A cancelled caller ends no execution."""
        self.detach(rollout)
        return await asyncio.shield(self.begin(rollout, call, key, listener))

    async def poll(self, rollout: Rollout, call: AnyCall, key: CallKey) -> Answer | None:
        """Answer a call as `run` does, but do not `detach`. None: no new output, no new state, so no record."""
        return await asyncio.shield(self.begin(rollout, call, key))

    def begin(
        self, rollout: Rollout, call: AnyCall, key: CallKey, listener: Listener | None = None, *, commutes: bool = False
    ) -> asyncio.Task[Answer]:
        """Begin to answer a call; nothing may cancel the task. For `commutes` see `CallOrder.turn`."""
        self.order.arrive(rollout)
        name, answer = f"call of {rollout.task}/{rollout.name}", self._answer(rollout, call, key, listener, commutes)
        return cast("asyncio.Task[Answer]", self.calls.spawn(name, answer, awaited=True))  # None after `poll` alone

    def detach(self, rollout: Rollout) -> None:
        """Let the process of the rollout's in-flight call continue in the background: the client has moved on."""
        self._executor.flights.detach(rollout)

    async def _answer(
        self, rollout: Rollout, call: AnyCall, key: CallKey, listener: Listener | None, commutes: bool
    ) -> Answer | None:
        timing, began, record = Timing(), time.perf_counter(), None
        async with self.order.turn(rollout, key, commutes=commutes):
            await self._executor.whole(rollout.tree)
            node = rollout.node
            bind_contextvars(task=rollout.task, rollout=rollout.name, node=f"n{node.id}")
            if self._gate is not None and (record := await self._gate.admit(rollout)) is not None:
                return Answer(record, Outcome.HIT, timing)  # The call is made again, and has taken its step.
            if rollout.finished or node.detached:
                raise RolloutGoneError(f"rollout {rollout.name!r} ended while this call waited. Start another rollout.")
            while record is None:
                now = time.monotonic()
                own = key_for(rollout, key, now)
                record, outcome = await self._executor.recorded(rollout, own)
                if record is not None and self._executor.is_readable(rollout.tree, record):
                    break
                timing.wait_s = time.perf_counter() - began
                record, outcome = await self._executor.execute(rollout, node, call, own, timing, listener)
                if record is None:
                    return None
                if outcome is Outcome.WAIT and not holds(record, rollout, now):
                    record = None  # It joined the execution of a rollout whose processes have another age.
                elif listener is None:  # One that was passed on while it arrived may be too large for the memory.
                    self._executor.read_answer(record)
            if self._gate is not None:
                await self._gate.logged(rollout, record, outcome)
            self._advance(rollout, record, outcome, timing)
            self._log.debug("answered", outcome=outcome.name.lower(), record=record.id, tool_s=timing.tool_s)
        return Answer(record, outcome, timing)

    def _advance(self, rollout: Rollout, record: Record, outcome: Outcome, timing: Timing | None) -> None:
        # The journal comes first: after a crash, the rollout continues where its agent last saw it.
        self._journal.append(JournalEntry(rollout.id, rollout.calls, record.id, outcome))
        rollout.advance(record, outcome, time.monotonic())
        self.notes.add(rollout, record, outcome, timing)
