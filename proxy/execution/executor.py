"""Execution of a call that the tree does not know: single flight, a sandbox at the node, one record."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import structlog

from proxy.dialects.rule_schema import steady
from proxy.dialects.tool_failures import as_shared
from proxy.execution.divergence import divergence, same_answer
from proxy.execution.errors import RolloutGoneError
from proxy.execution.gate import Gate, KeptElsewhere, NothingElsewhere
from proxy.execution.restore import Restorer
from proxy.execution.root_state import RootChangedError, RootChanges
from proxy.execution.single_flight import SingleFlight
from proxy.storage.errors import DamagedError
from proxy.storage.records import PackedCall, RecordStore, pack_large
from proxy.telemetry.counters import Counters
from proxy.telemetry.timing import Timing, Timings
from proxy.tree.keys import CallKey, private_key, withdrawn_key
from proxy.tree.restore_plan import has_way_back
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Node, Record, Tree, doubtful
from sandboxes.calls import Execution, ToolCall, ToolResult, names_any
from sandboxes.driver import execute
from sandboxes.listener import Listener

if TYPE_CHECKING:
    from proxy.execution.quotas import Quotas

log = structlog.get_logger()

CallFactory = Callable[[Node, CallKey, asyncio.Event], ToolCall]
"""Builds a call once its node and key are known; not invoked on a hit. The event is `Flight.detach`."""
AnyCall = ToolCall | CallFactory


class Executor:
    """Executes and records the calls that the tree does not know."""

    def __init__(
        self,
        restorer: Restorer,
        records: RecordStore,
        counts: Counters,
        roots: RootChanges,
        flights: SingleFlight,
        keep_answer: Callable[[Record, ToolResult], object],
        read_answer: Callable[[Record], object],
        renew: Callable[[Rollout], Awaitable[bool]],
        whole: Callable[[Tree], Awaitable[None]],
        quotas: "Quotas | None" = None,
        gate: Gate | None = None,
    ) -> None:
        """Create the executor. `keep_answer` is given each new record's answer; the gate is None without a cluster.

        `renew` moves a rollout that has seen nothing to the current tree; see `Tasks.renew`. `whole` waits until a tree
        that is read back has all that the store has of it. Quotas say how many calls
        of tasks run at once; None is without any.
        """
        self._restorer, self._records, self._counts, self._roots = restorer, records, counts, roots
        # `read_answer` raises `DamagedError` if a record's answer is not what was written.
        self._keep_answer, self.read_answer, self._gate = keep_answer, read_answer, gate
        self.flights, self.timings = flights, Timings()
        self._renew, self.whole, self.quotas = renew, whole, quotas
        self._elsewhere: KeptElsewhere = NothingElsewhere() if gate is None else gate.states

    def is_readable(self, tree: Tree, record: Record) -> bool:
        """Return whether a record's answer can be read; a damaged one is discarded.

        Raises StoreError if the store cannot be read now. No step was taken, so the client may send the call again.
        """
        try:
            self.read_answer(record)
        except DamagedError as error:
            self._discard(tree, record, str(error))
            return False
        return True

    async def recorded(self, rollout: Rollout, key: CallKey) -> tuple[Record | None, Outcome]:
        """Return the record that answers a rollout which has its turn, and how it was obtained; None if none does."""
        record, outcome = await self._safe_record(rollout.tree, rollout.node, key), Outcome.HIT
        if record is None and rollout.cached:
            # A record for this rollout and this call alone: an attempt that ended before its step was taken.
            record, outcome = rollout.node.records.get(private_key(key, rollout.id, rollout.calls)), Outcome.BYPASS
        return record, outcome

    async def _safe_record(self, tree: Tree, node: Node, key: CallKey) -> Record | None:
        """Return the record of a call, if there is a way back to its target or one can be made now; else None."""
        record = node.records.get(key)
        if record is None or self._has_way_back(record, tree):
            return record
        await self._restorer.secure(tree, record)
        # It may have been replaced meanwhile.
        record = node.records.get(key)
        return record if record is not None and self._has_way_back(record, tree) else None

    def _has_way_back(self, record: Record, tree: Tree) -> bool:
        return has_way_back(record, tree, () if self._gate is None else self._gate.stored(tree))

    def _discard(self, tree: Tree, record: Record, why: str) -> None:
        """Answer no more calls from a record with a damaged answer: the next such call runs again and replaces it.

        It remains a step of the path to its target, because its call may be whole.
        """
        self._withdraw(tree, record)
        self._counts.failure("damaged-answer")
        log.warning("recorded answer is damaged, so its call runs again", record=record.id, error=why)

    async def execute(
        self, rollout: Rollout, node: Node, call: AnyCall, key: CallKey, timing: Timing, listener: Listener | None
    ) -> tuple[Record | None, Outcome]:
        """Return the record of a call, or None if there is nothing to record, and how it was obtained.

        The rollout has its turn, and the tree has no record under the key. The listener is for its own execution.
        """
        try:
            record, outcome = await self._execute_once(rollout, node, call, key, timing, listener)
        except RootChangedError:
            # The base changed after the rollout began. If it has seen nothing yet, it begins with the new one. There,
            # at a root, a key is never that of a repeated poll.
            if not await self._renew(rollout):
                raise
            record, outcome = await self.recorded(rollout, key)
            if record is None:
                record, outcome = await self._execute_once(rollout, rollout.node, call, key, timing, listener)
        return record, outcome

    async def _execute_once(
        self, rollout: Rollout, node: Node, call: AnyCall, key: CallKey, timing: Timing, listener: Listener | None
    ) -> tuple[Record | None, Outcome]:
        began = time.perf_counter()
        # 1. Single flight: rollouts that make this call here share one execution. No await up to here since the look-up
        # of the caller, so the node is still the rollout's, and without others in the flight there is no record yet.
        with self.flights.join(rollout, node, key) as flight:
            # Built before the lock is there: the factory's owner needs the process number while the call waits, too.
            built = call if isinstance(call, ToolCall) else call(node, key, flight.detach)
            timing.endpoint, alone = built.endpoint, flight.holders == 1
            async with flight.turn():
                waited_s = time.perf_counter() - began
                timing.wait_s += waited_s
                # Look again: another rollout may have recorded the call while this one waited for the lock.
                record = None if alone else await self._safe_record(rollout.tree, node, key)
                outcome = Outcome.WAIT
                if record is None:
                    # The tree knows the call, but no way back to where it leads: each rollout executes it for itself.
                    if (known := node.records.get(key)) is not None:
                        flight.apart = timing.known = True
                        self._counts.hits_refused["unfreezable" if known.target.unfreezable else "not-kept"] += 1
                    # A call that waited for another one of its kind in vain has no new patience, or equal calls would
                    # be refused one after the other.
                    async with self._within_quota(rollout.task, 0.0 if flight.apart else waited_s):
                        record = await self._execute(rollout, node, built, key, timing, listener)
                    outcome = Outcome.BYPASS if record is not None and record.private else Outcome.MISS
                    flight.apart |= outcome is Outcome.BYPASS
        if record is not None:
            self.timings.note(rollout.id, rollout.calls, timing)
        return record, outcome

    def _within_quota(self, task: str, waited_s: float) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self.quotas is None else self.quotas.running(task, waited_s)

    async def _execute(
        self, rollout: Rollout, node: Node, call: ToolCall, key: CallKey, timing: Timing, listener: Listener | None
    ) -> Record | None:
        # 2. A sandbox at the node. If the block fails or is cancelled, the lease closes it: its state is unknown.
        async with self._restorer.lease_at(rollout, node, timing) as slot:
            assert slot.sandbox is not None
            # Taken before the call runs: the answer shows the sandbox as it was after this long.
            age_s = rollout.age_s(time.monotonic())
            execution = as_shared(rollout.tree.spec, call, await execute(slot.sandbox, call, listener))
            self._counts.egress.note(execution.exchanges, rollout.tree.id, node.id, rollout.name, time.time())
            timing.tool_s = execution.seconds
            slot.calls += 1
            if execution.short:
                self._restorer.note_shortage()
            # A poll without new output changed nothing, so the sandbox is still at the node and no step is taken.
            if execution.is_empty:
                return None
            await self._elsewhere.send_recordings(rollout.tree)
            packed = await pack_large(execution.replay or call, execution.result)
            # A base that changes shows through in sandboxes that run. So a change before the end of the call may be in
            # its result, and others must not be given that in a tree of the old base.
            current = await self._roots.is_usable(rollout.tree, looks=False)
            # 3. Recorded while the sandbox is still leased: no other call can change the state between the call and
            # its node.
            # The answer holds for this rollout alone (a time limit, a volatile rule, a base that changed), an audit has
            # found the call to differ, or the spec wants it so.
            own = not (rollout.cached and execution.shareable and current) or key in node.quarantined
            own = own or names_any(call, rollout.tree.spec.own)
            record = None if own else self._repeated(rollout.tree, node, call, key, execution)
            if record is None:
                record = self._record(rollout, node, call, key, execution, age_s, packed, own=own)
            # The sandbox follows the call to its target, where the end of the lease may freeze it.
            self._restorer.moved(slot, record)
            # A response that was passed on while it arrived may be too large for the memory.
            if listener is None:
                self._keep_answer(record, execution.result)
            return record

    def _repeated(self, tree: Tree, node: Node, call: ToolCall, key: CallKey, execution: Execution) -> Record | None:
        """Return the record that this execution has repeated, as a replay would have: it answers the call.

        A record that differs and has no way back makes way for a new one. Its own rollout goes on.
        """
        known = node.records.get(key)
        if known is None or self._has_way_back(known, tree):
            return None
        try:
            told = self._records.result(known)
            differs = divergence(known, execution, lambda: told, partial(steady, tree.spec, call))
        except DamagedError as error:
            differs = str(error)
        if differs:
            self._withdraw(tree, known)
            return None
        if known.repeated(time.time()):
            self._records.save_proven([known])
        return known if same_answer(execution.result, told, bytes) else None

    def _withdraw(self, tree: Tree, record: Record) -> None:
        """Let a record answer no more calls. It stays a step of the path to its target, where its rollouts go on."""
        key = withdrawn_key(record.key, record.id)
        self._records.save_key(record, key)
        tree.rekey(record, key)

    def _record(
        self,
        rollout: Rollout,
        node: Node,
        call: ToolCall,
        key: CallKey,
        execution: Execution,
        age_s: float,
        packed: PackedCall | None,
        *,
        own: bool,
    ) -> Record:
        # The tree has removed this node. A record from it would have no path from the root, in memory or on disk.
        if node.detached:
            raise RolloutGoneError(f"the state n{node.id} was forgotten while its call ran. Start another rollout.")
        tree = rollout.tree
        # Private: its own rollout's, or another rollout, which executed the call beside this one, has recorded it
        # meanwhile.
        private = own or key in node.records
        # A rollout that shares nothing has a private key already (`polling.key_for`).
        if rollout.cached and private:
            key = private_key(key, rollout.id, rollout.calls)
        destination = tree.destination(node, execution.effect, execution.state, private=own)
        # Merging: a digest that the tree knows already leads to the known node, and the histories join there.
        new_node = None
        if destination.known is None:
            number = self._records.new_node_id()
            new_node = Node(number, state=destination.state, witness=execution.witness, diverged=node.diverged)
        record = Record(
            # The number is taken before the write; that of a failed write is never used again.
            self._records.new_record_id(), key, node, destination.known or new_node or node, execution.effect,
            execution.seconds, time.time(), private=private, reproducible=execution.repeatable,
            doubtful=doubtful(call, execution), age_s=age_s,
        )  # fmt: skip
        written = self._records.save(
            tree.id, record, new_node, execution.replay or call, execution.result, execution.course, packed,
            execution.resources,
        )  # fmt: skip
        if new_node is not None:
            # The store comes first. If this raises, the tree does not know the call either, and another rollout
            # runs it again.
            tree.add_node(new_node, private=own)
        # From here to the end nothing awaits: the node and the record that leads to it appear in the tree together.
        tree.add_record(record)
        if self._gate is not None:
            self._gate.recorded(tree, record, written, is_first=new_node is not None)
        return record
