"""The whole product on one screen: how a call is answered.

Known at the rollout's node: answered at once (`known`, no await, no sandbox). Unknown: one execution for all who ask
(`flights`), in a sandbox that stands at that node (`attach`), recorded before it is answered, and the rollout takes the
step (`journal`). Where it goes from there, a sandbox may be made ready meanwhile (`warm`).
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from structlog.contextvars import bind_contextvars

from proxy.execution.commuting import Gathering
from proxy.execution.errors import NothingHappened, RolloutGoneError
from proxy.execution.restore import Attach
from proxy.execution.single_flight import Flights
from proxy.execution.tracing import Traces
from proxy.execution.warm_forks import Warm
from proxy.storage.journal import Journal, JournalEntry
from proxy.storage.records import RecordStore
from proxy.telemetry.counters import Counters
from proxy.telemetry.timing import Timing, Timings
from proxy.tree.keys import CallKey, private_key
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Node, Record, doubtful
from sandboxes.calls import Execution, ToolCall
from sandboxes.driver import execute
from sandboxes.listener import Listener

log = structlog.get_logger()


Placed = Callable[[Node, CallKey, asyncio.Event], ToolCall]
"""Makes a call for the node at which its turn has come, and for the key that it has there, if the tree does not know
it. The event is set once somebody who waits for it has more to ask: what it runs may then be left running."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The record that answers a call, how it was come by, and where the time went."""

    record: Record
    outcome: Outcome
    timing: Timing


class Step:
    """Takes rollouts through their trees, one call at a time."""

    def __init__(
        self,
        attach: Attach,
        records: RecordStore,
        journal: Journal,
        counts: Counters,
        warm: Warm,
        traces: Traces | None = None,
    ) -> None:
        self._traces = traces
        self._attach, self._records, self._journal, self._counts, self._warm = attach, records, journal, counts, warm
        self._flights, self._gathering = Flights(), Gathering()
        self._turns: set[asyncio.Task[Answer]] = set()
        self._asked: dict[int, tuple[Node, CallKey]] = {}
        self.timings = Timings()

    def known(self, rollout: Rollout, key: CallKey) -> Record | None:
        """Answer from the tree and take the step, or return None. O(1) in the depth; a microsecond and a `write(2)`.

        None too where an earlier call of this rollout is still being answered: calls are answered in order.
        """
        if rollout.turn.locked() or not rollout.cached or self._gathering.busy(rollout):
            return None
        record = rollout.node.records.get(rollout.key_of(key) if rollout.heard or rollout.node.young else key)
        if record is not None:
            self._take(rollout, record, Outcome.HIT)
        return record

    async def run(
        self,
        rollout: Rollout,
        call: ToolCall | Placed,
        key: CallKey,
        listener: Listener | None = None,
        *,
        commutes: bool = False,
        leaves: bool = True,
    ) -> Answer:
        """Answer call, by running it if nobody has. The run goes on where the caller goes away; its result is kept.

        listener: hears what a tool server says while it runs, if it does run. commutes: it may change places with
        others of this rollout that wait and commute too. leaves: whether its client has gone on from what it asked
        before: see `Placed`.
        """
        if leaves:
            self.leave(rollout)
        rollout.waiting += 1
        rollout.asked_at = rollout.asked_at or time.monotonic()
        turn = asyncio.get_running_loop().create_task(self._turn(rollout, call, key, listener, commutes=commutes))
        self._turns.add(turn)
        turn.add_done_callback(lambda ended: self._turn_ended(rollout, ended))
        return await asyncio.shield(turn)

    @property
    def under_way(self) -> int:
        """How many calls are being answered that the tree did not know at once."""
        return len(self._turns)

    def leave(self, rollout: Rollout) -> None:
        """Note that a rollout whose call may still be under way has more to ask."""
        asked = self._asked.get(rollout.id)
        if asked is not None:
            self._flights.leave(*asked)

    async def drain(self) -> None:
        """Wait for the calls under way; what can be left running is."""
        while self._turns:
            for asked in self._asked.values():
                self._flights.leave(*asked)
            await asyncio.wait(self._turns)

    async def _turn(
        self, rollout: Rollout, call: ToolCall | Placed, key: CallKey, listener: Listener | None, *, commutes: bool
    ) -> Answer:
        timing = Timing()
        waited = time.perf_counter()
        async with self._gathering.turn(rollout, key, commutes=commutes), rollout.turn:
            here, outcome = rollout.node, Outcome.HIT
            # In each line that is logged from here on, by whatever this call needs.
            bind_contextvars(task=rollout.task, rollout=rollout.name, node=f"n{here.id}")
            if rollout.finished or here.detached:
                raise RolloutGoneError(f"rollout {rollout.name!r} ended while this call waited. Start another rollout.")
            key = rollout.key_of(key)
            record = here.records.get(key)
            if record is None:
                with self._flights.join(here, key) as flight, self._asking(rollout, here, key):
                    made = call if isinstance(call, ToolCall) else call(here, key, flight.left)
                    async with flight.lock:
                        timing.wait_s = time.perf_counter() - waited
                        # Look again: while this rollout waited, another may have recorded it.
                        record, outcome = here.records.get(key), Outcome.WAIT
                        if record is None:
                            record = await self._run(rollout, here, made, key, timing, listener)
                            outcome = Outcome.BYPASS if record.private else Outcome.MISS
            if outcome is not Outcome.HIT:
                self.timings.note(rollout.id, rollout.calls, timing)
            self._take(rollout, record, outcome, timing)
            log.debug("answered", outcome=outcome.name.lower(), record=record.id, tool_s=timing.tool_s)
            return Answer(record, outcome, timing)

    @contextmanager
    def _asking(self, rollout: Rollout, here: Node, key: CallKey) -> Iterator[None]:
        self._asked[rollout.id] = here, key
        try:
            yield
        finally:
            del self._asked[rollout.id]

    async def _run(
        self, rollout: Rollout, here: Node, call: ToolCall, key: CallKey, timing: Timing, listener: Listener | None
    ) -> Record:
        async with self._attach.standing_at(rollout, here, timing) as slot:
            assert slot.sandbox is not None
            age_s = rollout.age_s
            execution = await execute(slot.sandbox, call, listener)
            timing.tool_s = execution.seconds
            record = None if execution.nothing else self._record(rollout, here, call, key, execution, age_s)
            slot.calls += 1
            if record is not None:
                self._attach.moved(slot, record.target)
        if record is None:
            raise NothingHappened("nothing has happened since.")
        return record

    def _record(
        self, rollout: Rollout, here: Node, call: ToolCall, key: CallKey, execution: Execution, age_s: float
    ) -> Record:
        """Put an executed call into the tree, on disk first: what could not be written is not known."""
        if here.detached:
            raise RolloutGoneError(f"the state n{here.id} was forgotten while its call ran. Start another rollout.")
        tree = rollout.tree
        private = not (rollout.cached and execution.shareable) or key in here.quarantined
        if rollout.cached and private:
            key = private_key(key, rollout.id, rollout.calls)
        place = tree.place(here, execution.effect, execution.state, private=private)
        node = None
        if place.known is None:
            number = self._records.new_node_id()
            node = Node(number, state=place.state, witness=execution.witness, diverged=here.diverged)
            node.young = execution.young
        record = Record(
            self._records.new_record_id(), key, here, place.known or node or here, execution.effect, execution.seconds,
            time.time(), private=private, doubtful=doubtful(call, execution), age_s=age_s,
        )  # fmt: skip
        self._records.save(tree.id, record, node, execution.replay or call, execution.result)
        if node is not None:
            tree.add_node(node, private=private)
        tree.add_record(record)
        return record

    def _take(self, rollout: Rollout, record: Record, outcome: Outcome, timing: Timing | None = None) -> None:
        # The place is written before the answer is given: after a kill the rollout goes on where its agent saw it.
        self._journal.append(JournalEntry(rollout.id, rollout.calls, record.id, outcome))
        before = rollout.node
        rollout.advance(record, outcome)
        rollout.used_at, rollout.asked_at = time.monotonic(), 0.0
        if rollout.node is not before:
            rollout.since = rollout.used_at
        elif outcome is Outcome.HIT:
            rollout.since -= record.seconds
        self._counts.answered(outcome, record.seconds)
        self._warm.saw(rollout)
        if self._traces is not None:
            self._traces.answered(rollout, record, outcome, timing)

    def _turn_ended(self, rollout: Rollout, turn: asyncio.Task[Answer]) -> None:
        rollout.waiting -= 1
        self._turns.discard(turn)
        if not turn.cancelled():
            # Whoever still waits gets the error; where nobody does, it has been counted, and is no surprise.
            turn.exception()
