"""Audits: recorded calls are run again in fresh sandboxes, and answers and states compared, while nobody waits.

What differs is marked, and by policy put in quarantine: from then on the call is run for everybody who makes it there.
Nothing else of a tree is changed. How many of those looked at differ bounds the rate of wrong answers (`bounds`).
"""

import asyncio
import random
import re
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import structlog

from proxy.audit.noise_masks import Masks, masked
from proxy.audit.sampling import Walk, chosen, walks
from proxy.dialects.rule_schema import steady
from proxy.execution.divergence import differs, gap_s, require_its_due
from proxy.execution.errors import StateLostError
from proxy.execution.restore import Attach
from proxy.refusals import RefusalError
from proxy.storage.journal import JournalEntry
from proxy.storage.store import Store
from proxy.telemetry.counters import Counters
from proxy.tree.rollout import Outcome
from proxy.tree.tree import Node, Record, Tree
from sandboxes.calls import Execution, ToolResult
from sandboxes.driver import Sandbox, rest
from sandboxes.errors import SandboxError, SpecError
from sandboxes.pool.pool import OverloadedError

log = structlog.get_logger()

SampleSource = Literal["hits", "records"]
"""What a sample was drawn from: the hits that were given, or the calls that are recorded."""
Judge = Callable[[Record, Execution], Awaitable[str]]
"""Says how a call that was run again differs from its record; empty where it does not."""
_QUEUED = 1000
_LOOK_AGAIN_S = 0.05
_PATIENCE_S = 2.0
"""An audit that somebody asked for waits this long for calls under way to end, at each call of its own."""
_ROOM_S = 60.0


@dataclass(slots=True)
class Tally:
    """What an audit saw. unreachable: calls at states to which no way is known; failed: the machine's fault."""

    of: int = 0
    checked: int = 0
    differing: int = 0
    unreachable: int = 0
    failed: int = 0
    found: list[int] = field(default_factory=list)


class Audit:
    """Runs recorded calls again. share: of the hits; quarantine: whether what differs is taken out of the answers.

    busy: says how many calls of agents are under way. find: returns a tree that is in memory.
    """

    def __init__(
        self,
        attach: Attach,
        store: Store,
        counts: Counters,
        busy: Callable[[], int],
        find: Callable[[int], Tree | None],
        *,
        share: float,
        quarantine: bool,
    ) -> None:
        self._attach, self._store, self._counts, self._busy, self._find = attach, store, counts, busy, find
        self._share, self.quarantine = share, quarantine
        self._random = random.Random()  # noqa: S311 - a sample, no secret
        self._queue: deque[int] = deque(maxlen=_QUEUED)
        self._running: dict[int, tuple[asyncio.Task[None], Tally]] = {}

    # -- on demand ---------------------------------------------------------------------------------------------------

    def begin(self, task: str, tree: Tree, below: Node, sample: int | None, seed: int | None) -> Tally:
        """Begin to check a sample of the calls recorded at a node of a task's tree and under it; return what will be
        known of it.

        Raises:
            Refused: 409, an audit of this tree is running.
        """
        if tree.id in self._running:
            raise RefusalError(409, "audit-runs", f"an audit of {task!r} is running. Wait for it, or DELETE it.")
        records = chosen(below, sample, self._random if seed is None else random.Random(seed))  # noqa: S311
        tally = Tally(of=len(records))
        running = asyncio.get_running_loop().create_task(self._verify(tree, records, self.masks(task), tally))
        self._running[tree.id] = running, tally
        running.add_done_callback(lambda _: self._running.pop(tree.id, None))
        return tally

    def running(self, tree: Tree) -> Tally | None:
        """Return what the running audit of a tree has seen so far; None where none runs."""
        found = self._running.get(tree.id)
        return None if found is None else found[1]

    async def stop(self, tree: Tree) -> None:
        """Stop the audit of a tree; what it has seen stays known."""
        found = self._running.get(tree.id)
        if found is not None:
            found[0].cancel()
            await asyncio.wait([found[0]])

    async def aclose(self) -> None:
        """Stop all."""
        self._share = 0.0
        running = [task for task, _ in self._running.values()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def masks(self, task: str) -> Masks:
        """Return the masks of a task; none by default."""
        told = self._store.audits.masks(task)
        return Masks() if told is None else Masks.model_validate_json(told)

    async def _verify(self, tree: Tree, records: list[Record], masks: Masks, tally: Tally) -> None:
        before = Tally()
        try:
            await self._check(tree, records, masks, tally, patience_s=_PATIENCE_S)
        except Exception as error:  # noqa: BLE001 - a background task ends here
            self._counts.failure("audit")
            log.warning("audit ended early", tree=tree.id, error=repr(error))
        finally:
            self._save(tree, "records", tally, before)

    # -- in the background -------------------------------------------------------------------------------------------

    def saw(self, steps: Iterable[JournalEntry]) -> None:
        """Draw a share of the hits among steps that were just written down; beside the calls themselves."""
        if self._share <= 0:
            return
        draw = self._random.random
        self._queue.extend(s.record for s in steps if s.outcome == Outcome.HIT and draw() < self._share)

    async def work(self) -> None:
        """Check what was drawn, as far as nobody waits."""
        while self._queue and not self._busy():
            record_id = self._queue.popleft()
            place = self._store.records.origin(record_id)
            tree = None if place is None else self._find(place[0])
            node = None if tree is None or place is None else tree.nodes.get(place[1])
            there = () if node is None else tuple(node.records.values())
            record = next((r for r in there if r.id == record_id and not r.private), None)
            if tree is None or record is None:
                continue
            tally = Tally(of=1)
            masks = self.masks(self._store.trees.task_of(tree.id))
            await self._check(tree, [record], masks, tally, patience_s=None)
            self._save(tree, "hits", tally, Tally())

    # -- both --------------------------------------------------------------------------------------------------------

    async def _check(
        self, tree: Tree, records: Sequence[Record], masks: Masks, tally: Tally, *, patience_s: float | None
    ) -> None:
        """Run records again along as few ways as meet them all; what a difference hides is tried once more."""
        judge = partial(self._difference, tree, masks.expressions())
        left = list(records)
        for _ in range(2):
            ways, lost = walks(left)
            left = []
            for way, met in ways:
                left += await self._walk(tree, way, met, judge, tally, patience_s)
            tally.unreachable += len(lost)
        tally.unreachable += len(left)

    async def _walk(
        self,
        tree: Tree,
        way: Walk,
        met: Collection[Record],
        judge: Judge,
        tally: Tally,
        patience_s: float | None,
    ) -> list[Record]:
        """Run a way's calls in a sandbox of its own; return those of met that it did not come to."""
        left = dict.fromkeys(met)
        try:
            await self._room(patience_s)
            async with self._attach.fork(tree, way.start, spare=True) as sandbox:
                for record in _in_order(way, left):
                    if way.start.detached or record.source.detached:
                        break
                    difference = await self._again(sandbox, record, judge, patience_s)
                    if record in left:
                        del left[record]
                        tally.checked += 1
                        tally.differing += bool(difference)
                    if difference:
                        tally.found.append(record.id)
                        self._mark(tree, record, difference)
                        if difference != _ANSWER or not (record.observation or record.target.state):
                            # Nobody knows where this sandbox stands now.
                            break
        except StateLostError:
            pass
        except (SandboxError, SpecError, OverloadedError) as error:
            # The machine's fault: nothing was learnt of those that are left.
            tally.failed += len(left)
            log.info("audit: a way was given up", tree=tree.id, error=str(error))
            return []
        return list(left)

    async def _again(
        self,
        sandbox: Sandbox,
        record: Record,
        judge: Judge,
        patience_s: float | None,
    ) -> str:
        await self._idle(patience_s)
        await rest(sandbox, gap_s(record))
        execution = await sandbox.execute(self._store.records.call(record))
        require_its_due(record, execution)
        return await judge(record, execution)

    async def _difference(
        self, tree: Tree, expressions: Sequence[re.Pattern[bytes]], record: Record, execution: Execution
    ) -> str:
        """Say how a call that was run again differs from its record: in its answer, or in the state that it left."""
        call, recorded = self._store.records.call(record), self._store.records.result(record)
        told = differs(record, execution, recorded, partial(steady, tree.spec, call))
        if told:
            return told
        keep = partial(_steady_and_masked, partial(steady, tree.spec, call), expressions)
        # Patterns are somebody's: they may take their time.
        return await asyncio.to_thread(_answers_differ, execution.result, recorded, keep)

    def _mark(self, tree: Tree, record: Record, difference: str) -> None:
        if record.source.detached or record.differs:
            return
        self._counts.audit_differing += 1
        if difference != _ANSWER and not record.observation:
            record.reproducible = False
        lost: list[Node] = []
        record.differs = difference
        if self.quarantine:
            lost = tree.quarantine(record, difference)
        self._store.audits.save_finding(tree.id, record, lost, quarantined=self.quarantine)
        log.warning("audit: a recorded call differs", record=record.id, node=record.source.id, difference=difference)

    def _save(self, tree: Tree, kind: SampleSource, tally: Tally, before: Tally) -> None:
        checked = tally.checked - before.checked
        self._counts.audit_checked += checked
        if (checked or tally.unreachable) and self._store.trees.exists(tree.id):
            self._store.audits.add(tree.id, kind, checked, tally.differing, tally.unreachable)

    async def _room(self, patience_s: float | None) -> None:
        """Wait until a sandbox may be had that nobody else wants."""
        await self._idle(patience_s)
        until = asyncio.get_running_loop().time() + _ROOM_S
        while not self._attach.has_spare_room:
            if asyncio.get_running_loop().time() > until:
                raise OverloadedError("no sandbox is free for an audit.")
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _idle(self, patience_s: float | None) -> None:
        """Wait until no call of an agent is under way; not for ever, where somebody waits for the audit."""
        loop = asyncio.get_running_loop()
        until = None if patience_s is None else loop.time() + patience_s
        # Looked at now and then: nothing on the way of a call should have to tell who waits here.
        while self._busy() and (until is None or loop.time() < until):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_AGAIN_S)


_ANSWER = "it answered differently"


def _in_order(way: Walk, met: Collection[Record]) -> Iterable[Record]:
    """Yield what is run on a way: at each node the calls that change nothing and are to be met, then the step on."""
    nodes = [way.start, *(step.target for step in way.steps)]
    steps: list[Record | None] = [*way.steps, None]
    looks: dict[Node, list[Record]] = {}
    for record in met:
        if record.observation:
            looks.setdefault(record.source, []).append(record)
    for node, step in zip(nodes, steps, strict=True):
        yield from looks.get(node, ())
        if step is not None:
            yield step


def _steady_and_masked(
    must_come: Callable[[bytes], bytes], expressions: Sequence[re.Pattern[bytes]], body: bytes
) -> bytes:
    return masked(must_come(body), expressions)


def _answers_differ(now: ToolResult, then: ToolResult, keep: Callable[[bytes], bytes]) -> str:
    same = now.status == then.status and (now.body == then.body or keep(now.body) == keep(then.body))
    return "" if same else _ANSWER
