"""Audits: recorded calls run again in fresh sandboxes, and their answers and states compared with the records.

1. What is checked. On demand, a random sample of the calls below a node (`begin`). In the background, a share of the
   hits that rollouts were answered with (`sample_hits`, `work`). The two are counted apart, because they estimate two
   rates: wrong records, and wrong answers.
2. How. `cover` orders the sample into few paths of the tree. Each path runs in a sandbox of its own, from the root or
   a snapshot, and compares each sampled call as it passes (`_run_path`). After a call that left another state the rest
   of its path would prove nothing, so it is tried once more on another path (`_check`).
3. When. Only while no call of a rollout is in flight and a sandbox is free that nothing else needs. An audit that was
   requested waits for calls in flight only briefly, else a busy proxy would never finish it.
4. What follows. A difference marks the record. By policy the record is also put in quarantine: from then on its call
   runs again for every rollout that makes it. An audit changes nothing else of a tree.
5. The counts of checked and differing calls bound the rate of wrong answers (`confidence`).
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import structlog

from proxy.audit.noise_masks import Masks, masked
from proxy.audit.sampling import ReplayPath, cover, reaches_outside, sample_calls
from proxy.dialects.rule_schema import steady
from proxy.execution.divergence import ANSWER_DIFFERS, divergence, gap_s, require_conclusive, same_answer
from proxy.execution.errors import StateLostError
from proxy.execution.gate import Gate
from proxy.execution.restore import Restorer
from proxy.execution.root_state import RootChanges
from proxy.patterns import BytesPattern
from proxy.refusals import RefusalError
from proxy.storage.errors import StoreError
from proxy.storage.journal_segments import JournalEntry
from proxy.storage.store import Store
from proxy.telemetry.counters import Counters
from proxy.tree.rollout import Outcome
from proxy.tree.tree import Node, Record, Tree
from sandboxes.calls import Execution
from sandboxes.driver import Sandbox, expect, rest
from sandboxes.errors import SandboxError, SpecError
from sandboxes.pool.pool import OverloadedError
from sandboxes.task_owner import TaskOwner

log = structlog.get_logger()

SampleSource = Literal["hits", "records"]
"""What a sample was drawn from: the hits that were given, or the calls that are recorded."""
Judge = Callable[[Record, Execution], Awaitable[str]]
"""Returns how a call that was run again differs from its record; empty if it does not."""
_MAX_QUEUED_HITS = 1000
"""Sampled hits that wait for an audit; beyond it the oldest are dropped, so a busy proxy audits its latest answers."""
_POLL_S = 0.05
"""Interval at which an audit checks whether calls are in flight. Calls themselves never signal it: they are faster."""
_PATIENCE_S = 2.0
"""Longest time for which a requested audit waits for calls in flight, before each call of its own."""
_SANDBOX_WAIT_S = 60.0
"""Longest time for which an audit waits for a sandbox that nothing else needs."""


@dataclass(slots=True)
class AuditProgress:
    """The progress of an audit.

    Attributes:
        of: Number of calls to check.
        differing: Checked calls that differ from their records.
        unreachable: Calls at states that no path leads to.
        failed: Calls that the machine could not run; they say nothing about their records.
    """

    of: int = 0
    checked: int = 0
    differing: int = 0
    unreachable: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Check:
    tree: Tree
    judge: Judge
    tally: AuditProgress
    patience_s: float | None  # Longest wait for calls in flight, before each call; None waits until there are none.


class Auditor:
    """Runs recorded calls again and marks those that differ."""

    def __init__(
        self,
        restorer: Restorer,
        store: Store,
        counts: Counters,
        busy: Callable[[], int],
        find: Callable[[int], Tree | None],
        roots: RootChanges,
        *,
        share: float,
        quarantine: bool,
        gate: Gate | None = None,
    ) -> None:
        """Create an auditor. A `share` of the hits is checked; with `quarantine`, what differs runs again for all."""
        self._restorer, self._store, self._counts, self._busy, self._find = restorer, store, counts, busy, find
        self._roots = roots
        self._share, self.quarantine, self._gate = share, quarantine, gate
        self._random = random.Random()  # noqa: S311 - a sample, no secret
        self._queue: deque[int] = deque(maxlen=_MAX_QUEUED_HITS)
        self._running: dict[int, tuple[asyncio.Task[None], AuditProgress]] = {}
        self._owner = TaskOwner()

    # On demand

    def begin(
        self, task: str, tree: Tree, top: Node, sample: int | None, seed: int | None, before: float = math.inf
    ) -> AuditProgress:
        """Start to check a sample of the calls below a node; the returned tally grows. Raises RefusalError (409)."""
        if tree.id in self._running:
            raise RefusalError(409, "audit-runs", f"an audit of {task!r} is running. Wait for it, or DELETE it.")
        draw = self._random if seed is None else random.Random(seed)  # noqa: S311 - a sample, no secret
        records = sample_calls(top, sample, draw, before)
        tally = AuditProgress(of=len(records))
        running = self._owner.spawn("audit", self._run(tree, records, self.masks(task), tally))
        self._running[tree.id] = running, tally
        running.add_done_callback(lambda _: self._running.pop(tree.id, None))
        return tally

    def running(self, tree: Tree) -> AuditProgress | None:
        """Return the tally of the running audit of a tree; None if none runs."""
        running = self._running.get(tree.id)
        return None if running is None else running[1]

    async def stop(self, tree: Tree) -> None:
        """Stop the audit of a tree, if one runs; its findings stay."""
        running = self._running.get(tree.id)
        if running is not None:
            task, _ = running
            task.cancel()
            await asyncio.wait([task])

    async def aclose(self) -> None:
        """Stop all audits."""
        self._share = 0.0
        await self._owner.end()

    def masks(self, task: str) -> Masks:
        """Return the noise masks of a task; by default it has none."""
        value = self._store.audits.masks(task)
        return Masks() if value is None else Masks.model_validate_json(value)

    def put_masks(self, task: str, masks: Masks) -> None:
        """Set the noise masks of a task."""
        value = masks.model_dump_json()
        self._store.audits.put_masks(task, value)
        if self._gate is not None:
            self._gate.edits.masked(task, value)

    async def _run(self, tree: Tree, records: list[Record], masks: Masks, tally: AuditProgress) -> None:
        try:
            await self._check(records, self._checking(tree, masks, tally, _PATIENCE_S))
        except Exception as error:  # noqa: BLE001 - a background task ends here
            self._counts.failure("audit")
            log.warning("audit ended early", tree=tree.id, error=repr(error))
        finally:
            self._save(tree, "records", tally)

    # In the background

    def sample_hits(self, steps: Iterable[JournalEntry]) -> None:
        """Draw a share of the hits among steps that were just folded, and queue them to be checked."""
        if self._share <= 0:
            return
        draw = self._random.random
        self._queue.extend(step.record for step in steps if step.outcome == Outcome.HIT and draw() < self._share)

    async def work(self) -> None:
        """Check queued hits until the queue is empty or a call comes in."""
        while self._queue and not self._busy():
            number = self._queue.popleft()
            origin = self._store.records.origin(number)
            tree = None if origin is None else self._find(origin[0])
            node = None if tree is None or origin is None else tree.nodes.get(origin[1])
            records = () if node is None else tuple(node.records.values())
            record = next((record for record in records if record.id == number and not record.private), None)
            if tree is None or record is None or reaches_outside(tree.spec) or not record.repeatable:
                # The record was forgotten, or its tree is not in memory: reading it back is not worth one check. Or the
                # call would reach a real server once more, which only who asks for an audit may want.
                continue
            tally = AuditProgress(of=1)
            masks = self.masks(self._store.trees.task_of(tree.id))
            await self._check([record], self._checking(tree, masks, tally, None))
            self._save(tree, "hits", tally)

    # Both

    def _checking(self, tree: Tree, masks: Masks, tally: AuditProgress, patience_s: float | None) -> _Check:
        return _Check(tree, partial(self._difference, tree, masks.expressions()), tally, patience_s)

    async def _check(self, records: Sequence[Record], check: _Check) -> None:
        """Run records again along few paths; records that a difference hid are tried on other paths, once."""
        pending = list(records)
        for _ in range(2):
            paths, unreachable = cover(pending)
            pending = []
            for replay, expected in paths:
                pending += await self._run_path(replay, expected, check)
            check.tally.unreachable += len(unreachable)
        check.tally.unreachable += len(pending)

    async def _run_path(self, replay: ReplayPath, expected: Collection[Record], check: _Check) -> list[Record]:
        """Run a path's calls in a sandbox of its own; return the expected records that it did not reach."""
        pending = dict.fromkeys(expected)
        try:
            # On another base, every answer may differ, and no record would be to blame.
            if not await self._roots.is_usable(check.tree):
                return list(pending)
            await self._wait_for_sandbox(check.patience_s)
            async with self._restorer.fork(check.tree, replay.start, spare=True) as sandbox:
                for record in replay.in_order(expected):
                    if replay.start.detached or record.source.detached:
                        break
                    difference = await self._run_again(sandbox, record, check)
                    if record in pending:
                        del pending[record]
                        check.tally.checked += 1
                        check.tally.differing += bool(difference)
                    if difference:
                        self._mark(check.tree, record, difference)
                        if difference != ANSWER_DIFFERS or not (record.observation or record.target.state):
                            # The sandbox is at an unknown state now: what follows would be compared with the wrong one.
                            break
        except StateLostError:
            pass
        except (SandboxError, SpecError, OverloadedError, StoreError) as error:
            # The machine failed, not the records: nothing was learned about those that are pending.
            check.tally.failed += len(pending)
            log.info("audit path abandoned", tree=check.tree.id, error=str(error))
            return []
        return list(pending)

    async def _run_again(self, sandbox: Sandbox, record: Record, check: _Check) -> str:
        await self._wait_until_idle(check.patience_s)
        await rest(sandbox, gap_s(record))
        call, course = self._store.records.call_and_course(record)
        await expect(sandbox, course)
        execution = await sandbox.execute(call)
        require_conclusive(record, execution)
        if execution.live:
            # A host outside may say something else today. That is no fault of the record.
            raise SandboxError("the call received something from outside the sandbox that is not recorded")
        return await check.judge(record, execution)

    async def _difference(
        self, tree: Tree, expressions: Sequence[BytesPattern], record: Record, execution: Execution
    ) -> str:
        """Return how an execution differs from its record, in the state that it left or in its answer."""
        call, recorded = self._store.records.call(record), partial(self._store.records.result, record)
        steady_part = partial(steady, tree.spec, call)
        difference = divergence(record, execution, recorded, steady_part)
        if difference:
            return difference

        def compared(body: bytes) -> bytes:
            return masked(steady_part(body), expressions)

        # In a thread: users' patterns may take a minute. RE2 leaves the interpreter to others meanwhile.
        same = await asyncio.to_thread(same_answer, execution.result, recorded(), compared)
        return "" if same else ANSWER_DIFFERS

    def _mark(self, tree: Tree, record: Record, difference: str) -> None:
        if record.source.detached or record.differs:
            return
        self._counts.audit_differing += 1
        if difference != ANSWER_DIFFERS and not record.observation:
            record.reproducible = False
        lost: list[Node] = []
        record.differs = difference
        if self.quarantine:
            lost = tree.quarantine(record, difference)
        self.save_finding(tree, record, lost, quarantined=self.quarantine)
        log.warning("recorded call differs", record=record.id, node=record.source.id, difference=difference)

    def save_finding(self, tree: Tree, record: Record, lost: Iterable[Node], *, quarantined: bool) -> None:
        """Write that a record differs (`Record.differs`), and which nodes were set aside for it."""
        self._store.audits.save_finding(tree.id, record, lost, quarantined=quarantined)
        if self._gate is not None:
            self._gate.differs(tree, record, quarantined=quarantined)

    def _save(self, tree: Tree, kind: SampleSource, tally: AuditProgress) -> None:
        self._counts.audit_checked += tally.checked
        if (tally.checked or tally.unreachable) and self._store.trees.exists(tree.id):
            self._store.audits.add(tree.id, kind, tally.checked, tally.differing, tally.unreachable)

    async def _wait_for_sandbox(self, patience_s: float | None) -> None:
        """Wait until a sandbox can be created that nothing else needs, or raise OverloadedError."""
        await self._wait_until_idle(patience_s)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SANDBOX_WAIT_S
        while not self._restorer.has_spare_room:
            if loop.time() > deadline:
                raise OverloadedError("no sandbox is free for an audit. It continues when rollouts need fewer.")
            await asyncio.sleep(_POLL_S)

    async def _wait_until_idle(self, patience_s: float | None) -> None:
        """Wait until no call of a rollout is in flight, or until the patience ends."""
        loop = asyncio.get_running_loop()
        deadline = None if patience_s is None else loop.time() + patience_s
        while self._busy() and (deadline is None or loop.time() < deadline):  # noqa: ASYNC110 - see _POLL_S
            await asyncio.sleep(_POLL_S)
