"""Execution of a call that the tree does not know: single flight, a sandbox at the node, one record.

1. Rollouts that make the same call at the same node share one execution (`single_flight`).
2. The first of them leases a sandbox in the node's state (`restore`) and runs the call there.
3. The result is written to the store, then added to the tree. Only then do the rollouts get their answers, so a call
   that cannot be written is not known to the tree either.
"""

import asyncio
import time
from collections.abc import Callable

from proxy.execution.errors import RolloutGoneError
from proxy.execution.restore import Restorer
from proxy.execution.single_flight import SingleFlight
from proxy.storage.records import RecordStore
from proxy.telemetry.timing import Timing, Timings
from proxy.tree.keys import CallKey, private_key
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Node, Record, doubtful
from sandboxes.calls import Execution, ToolCall
from sandboxes.driver import execute
from sandboxes.listener import Listener

CallFactory = Callable[[Node, CallKey, asyncio.Event], ToolCall]
"""Builds a call once its node and key are known; not invoked on a hit. The event is `Flight.detach`."""
AnyCall = ToolCall | CallFactory


class Executor:
    """Executes and records the calls that the tree does not know.

    Attributes:
        flights: The calls being executed.
        timings: Where the time of the latest calls went.
    """

    def __init__(self, restorer: Restorer, records: RecordStore) -> None:
        self._restorer, self._records = restorer, records
        self.flights, self.timings = SingleFlight(), Timings()

    async def execute(
        self, rollout: Rollout, node: Node, call: AnyCall, key: CallKey, timing: Timing, listener: Listener | None
    ) -> tuple[Record | None, Outcome]:
        """Return the record of a call and how it was obtained; None if there is nothing to record.

        Args:
            rollout: The rollout that makes the call and has its turn.
            node: The rollout's node.
            call: The call, or a factory that builds it.
            key: Key under which the tree has no record at the node.
            timing: Takes the seconds of each part.
            listener: Receives the output of the execution while it runs, if this rollout's call is the one executed.
        """
        began = time.perf_counter()
        with self.flights.join(rollout, node, key) as flight:
            # Built before the lock is there: the factory's owner needs the process number while the call waits, too.
            built = call if isinstance(call, ToolCall) else call(node, key, flight.detach)
            async with flight.lock:
                timing.wait_s += time.perf_counter() - began
                # Look again: another rollout may have recorded the call while this one waited for the lock.
                record, outcome = node.records.get(key), Outcome.WAIT
                if record is None:
                    record = await self._execute(rollout, node, built, key, timing, listener)
                    outcome = Outcome.BYPASS if record is not None and record.private else Outcome.MISS
        if record is not None:
            self.timings.note(rollout.id, rollout.calls, timing)
        return record, outcome

    async def _execute(
        self, rollout: Rollout, node: Node, call: ToolCall, key: CallKey, timing: Timing, listener: Listener | None
    ) -> Record | None:
        async with self._restorer.lease_at(rollout, node, timing) as slot:
            assert slot.sandbox is not None
            # Taken before the call runs: the answer shows the sandbox as it was after this long.
            dwell_s = rollout.dwell_s(time.monotonic())
            execution = await execute(slot.sandbox, call, listener)
            timing.tool_s = execution.seconds
            slot.calls += 1
            if execution.is_empty:
                return None
            record = self._record(rollout, node, call, key, execution, dwell_s)
            self._restorer.moved(slot, record.target)
            return record

    def _record(
        self, rollout: Rollout, node: Node, call: ToolCall, key: CallKey, execution: Execution, dwell_s: float
    ) -> Record:
        if node.detached:
            raise RolloutGoneError(f"the state n{node.id} was forgotten while its call ran. Start another rollout.")
        tree = rollout.tree
        private = not (rollout.cached and execution.shareable) or key in node.quarantined
        # A rollout that shares nothing has a private key already (`polling.key_for`).
        if rollout.cached and private:
            key = private_key(key, rollout.id, rollout.calls)
        destination = tree.destination(node, execution.effect, execution.state, private=private)
        new_node = None
        if destination.known is None:
            number = self._records.new_node_id()
            new_node = Node(number, state=destination.state, witness=execution.witness, diverged=node.diverged)
            new_node.settling = execution.settling
        record = Record(
            self._records.new_record_id(), key, node, destination.known or new_node or node, execution.effect,
            execution.seconds, time.time(), private=private, doubtful=doubtful(call, execution), dwell_s=dwell_s,
        )  # fmt: skip
        self._records.save(tree.id, record, new_node, execution.replay or call, execution.result)
        if new_node is not None:
            tree.add_node(new_node, private=private)
        tree.add_record(record)
        return record
