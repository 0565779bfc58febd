"""The engine: the parts of a running proxy, opened and closed in order. It answers calls and knows no protocol.

`build_engine` creates the parts and gives each what it uses; nothing in the engine reaches a part through another one.
The rooms above (endpoints, control plane) read the parts and add their own work to the engine's `Lifecycle`.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import structlog

from proxy.audit.auditor import Auditor
from proxy.audit.prover import Prover
from proxy.execution.executor import Executor
from proxy.execution.forgetting import Forgetting
from proxy.execution.gate import Gate, KeptElsewhere, NothingElsewhere
from proxy.execution.last_ways import LastWays
from proxy.execution.open_trees import Collector, OpenTrees
from proxy.execution.quotas import Quotas
from proxy.execution.restore import Restorer
from proxy.execution.rollouts import Rollouts
from proxy.execution.root_state import RootChanges
from proxy.execution.sandbox_maker import SandboxMaker
from proxy.execution.single_flight import SingleFlight
from proxy.execution.snapshot_value import SnapshotValue
from proxy.execution.step_notes import StepNotes
from proxy.execution.tasks import Tasks
from proxy.execution.tracing import Traces
from proxy.execution.warm_forks import WarmForks
from proxy.http.access import Access, configured_access
from proxy.http.answer_cache import Answers
from proxy.lifecycle import STAGE_S, BackgroundWork, EngineEnd, Lifecycle
from proxy.settings import Settings
from proxy.shares import Share
from proxy.step import Stepper
from proxy.storage.backup import STATES, back_up
from proxy.storage.data_dir import STORE, make_private
from proxy.storage.journal import Journal
from proxy.storage.journal_segments import JournalEntry
from proxy.storage.store import Store
from proxy.telemetry.counters import Counters
from proxy.transfer.adopt import Adopter
from proxy.transfer.service import TransferService
from proxy.tree.rollout import Rollout, is_moving
from proxy.tree.task import Walkers
from proxy.tree.tree import Node, Tree
from sandboxes.driver import Driver
from sandboxes.pool.lifecycle import SandboxState
from sandboxes.pool.pool import Pool
from sandboxes.pool.room import Room, available_bytes
from sandboxes.pool.roster import Slot
from snapshots.cache import DiskQuota, SnapshotCache
from snapshots.capture import Capture, StateTree
from snapshots.store import SnapshotStore

log = structlog.get_logger()

_FOLD_EVERY_S = 2.0
"""Interval at which steps are folded from the journal into the store: the journal then holds few megabytes."""
_SWEEP_EVERY_S = 10.0
"""Interval at which idle sandboxes, cold tasks and snapshots over budget are removed."""
_EVICT_EVERY_S = 1.0
"""Interval at which it is seen whether states come faster than proofs."""
_COLLECT_EVERY_S = 1.0
"""Interval at which new nodes and records are frozen, if there are enough."""

_AUDIT_EVERY_S = 1.0
"""Interval at which the auditor checks whether sampled hits wait for it."""
_END_EVERY_S = 0.5
"""Interval at which sandboxes are closed in which processes of ended rollouts run. A look takes microseconds."""


IN_FLIGHT_S = 10.0
"""How long calls that are still in flight may take. Uvicorn has waited 30 s for their responses before.

Most of them have lost their clients by then, and wait for a process that can be detached only now. Halved, calls that
would soon have ended are cut off on a busy machine; doubled, service managers must allow the proxy so much more.
"""
HAND_OVER_S = 60.0
"""How long a member of a cluster may take to hand over its states and its lease.

These have limits of their own, 10 s each; this one is for defects.
"""
LAST_FREEZES_S = 10.0
"""How long the states of sandboxes that are closed may take to be frozen together. Thousands of files take a second.

The value is an estimate. Halved, a slow disk may lose states at a shutdown; doubled, a service manager may kill the
proxy first.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """The parts of a running proxy: traces and gate are None where unused, and `share` is None for all tasks."""

    settings: Settings
    drivers: Mapping[str, Driver]
    counts: Counters
    access: Access
    store: Store
    journal: Journal
    snapshots: SnapshotStore
    cache: SnapshotCache
    snapshot_value: SnapshotValue
    capture: Capture[Node]
    pool: Pool
    restorer: Restorer
    warm: WarmForks
    answers: Answers
    traces: Traces | None
    executor: Executor
    step: Stepper
    walkers: Walkers
    trees: OpenTrees
    tasks: Tasks
    forgetting: Forgetting
    audit: Auditor
    transfer: TransferService
    roots: RootChanges
    last_ways: LastWays
    gate: Gate | None
    share: Share | None = None
    lifecycle: Lifecycle = field(default_factory=Lifecycle)

    @property
    def names(self) -> tuple[str, ...] | None:
        """Host names that requests may be sent to, against DNS rebinding; None, with a token required, is any."""
        return None if self.access.needs_token else self.settings.names

    def has(self, task: str) -> bool:
        """Return whether this proxy shows a task: in a cluster its store may have what others own now."""
        return self.gate is None or task in self.gate.owned

    def own_tasks(self) -> tuple[str, ...] | None:
        """Return the tasks that this proxy shows; None for all that its store has."""
        return None if self.gate is None else tuple(name for name, _ in self.store.tasks.all() if self.has(name))

    async def back_up(self, target: Path) -> None:
        """Write a copy of the store, or in a cluster all tasks of the cluster. Raises StoreError, RefusalError."""
        if self.gate is not None:
            await self.gate.back_up(target)
            return
        self.journal.fold()
        await asyncio.to_thread(back_up, self.store.database, target)

    def pin(self, tree: Tree, node: Node, *, on: bool) -> None:
        """Keep the snapshot of a node from being evicted, or let it be evicted again."""
        node.pinned = on
        self.store.records.save_node(node)
        if self.gate is not None:
            self.gate.edits.changed(tree, [node])

    async def open(self) -> None:
        """Read what earlier processes left, and start background work. Raises StoreError, SandboxError or OSError."""
        for driver in self.drivers.values():
            await driver.open()
        self.transfer.open()
        recovery = self.journal.open()
        self.snapshots.open()
        # A store that was moved away, or put back from a copy, gives numbers of such trees to others.
        for tree in {snapshot.tree for snapshot in self.snapshots}:
            if not self.trees.exists(tree):
                self.cache.drop_tree(tree)
        for damage in recovery.damage:
            self.counts.failure("damaged-journal")
            log.error("the journal is damaged: its rollouts are refused from now on", damage=damage)
        await self.transfer.adopt_restored(self.settings.data / STATES)
        await self.evict_snapshots()
        self.lifecycle.background += [
            BackgroundWork("fold", _FOLD_EVERY_S, self.journal.trickle),
            BackgroundWork("sweep", _SWEEP_EVERY_S, self._sweep),
            BackgroundWork("evict", _EVICT_EVERY_S, self._evict_crowded),
            BackgroundWork("ended rollouts", _END_EVERY_S, self.close_ended),
            BackgroundWork("collect", _COLLECT_EVERY_S, Collector(self.trees).settle),
            BackgroundWork("warm", 0.0, self.warm.work),
            BackgroundWork("audit", _AUDIT_EVERY_S, self.audit.work),
            BackgroundWork("prove", _AUDIT_EVERY_S, self._prover().work),
        ]
        self.lifecycle.start(self._note_failure)
        for opened in self.lifecycle.at_open:
            await opened()
        self.lifecycle.ready = True
        log.info(
            "open",
            data=str(self.settings.data),
            steps_read_back=recovery.steps,
            snapshots=len(self.snapshots),
            rollouts_lost=recovery.lost,
        )

    async def collect_garbage(self) -> tuple[int, int]:
        """Free at once what the sweeps would free later; return how many snapshots and how many nodes went."""
        forgotten = await self.forgetting.sweep()
        await self.close_unused()
        evicted = await self.evict_snapshots()
        await self.store.drafts.sweep()
        await self.store.blobs.delete_unused()
        await asyncio.to_thread(self.store.database.checkpoint)
        return evicted, forgotten

    async def evict_snapshots(self) -> int:
        """Evict snapshots until their budgets hold, and return how many were evicted."""
        # For tasks that are not in memory, the store knows at which nodes running rollouts are.
        self.journal.fold()
        return await self.cache.fit(self.snapshot_value)

    async def _evict_crowded(self) -> None:
        if self.cache.crowded:
            await self.evict_snapshots()

    async def close_ended(self) -> None:
        """Close the idle sandboxes of ended rollouts with processes, unless one is the only way to a needed state."""
        running = {rollout.id for rollout in self.tasks.rollouts.running.values()}
        ended = [
            slot
            for slot in self.pool.roster.slots
            if slot.state is SandboxState.IDLE and slot.owner not in running and not (slot.warm or slot.irreplaceable)
            and isinstance(slot.position, Node) and is_moving(slot.position)
        ]  # fmt: skip
        await self.last_ways.close(ended, within_s=LAST_FREEZES_S)
        for slot in ended:
            # Not tried again each time.
            slot.irreplaceable = slot.state is SandboxState.IDLE

    async def close_unused(self) -> int:
        """Close sandboxes that have been idle for too long, and return how many there were."""
        unused = self.pool.roster.unused_since(time.monotonic() - self.settings.sandbox_idle_s)
        return await self.last_ways.close(unused, within_s=LAST_FREEZES_S)

    def _prover(self) -> Prover:
        def find(tree_id: int, node_id: int) -> tuple[Tree, Node] | None:
            node = self.trees.node(tree_id, node_id)
            return None if node is None else (self.trees.load(tree_id), node)

        return Prover(
            self.restorer, self.cache, self.snapshots.get, find, self.evict_snapshots, lambda: len(self.step.calls)
        )

    async def aclose(self) -> None:
        """Let calls in flight end, write what is known, and leave no sandbox; each stage has a limit (`EngineEnd`)."""
        self.lifecycle.ready = False
        self.lifecycle.hang_up()
        ending = EngineEnd(self.counts.failure)
        for close in self.lifecycle.before_close:
            await ending.stage("protocols", close(), within_s=STAGE_S if self.gate is None else HAND_OVER_S)
        # In stages of their own: if one fails, the others must still end, because they make sandboxes.
        await asyncio.gather(
            ending.stage("background work", self.lifecycle.stop()),
            ending.stage("audits", self.audit.aclose()),
            ending.stage("warm forks", self.warm.aclose()),
        )
        # Processes that can continue in the background do so, so that their calls end.
        self.executor.flights.detach_all()
        await ending.stage("calls in flight", self.step.calls.wait(), within_s=IN_FLIGHT_S)
        # Those that are left are not recorded: the sandbox of a call that is cancelled is closed.
        self.step.calls.cancel()
        # Only now: a call that has ended may have started a capture.
        await ending.stage("states that calls wait for", self.restorer.drain())
        await ending.stage("snapshots", self.capture.drain())
        await ending.stage("last states", self._keep_last_states(), within_s=LAST_FREEZES_S + STAGE_S)
        await ending.stage("trees", self.trees.aclose())
        await ending.stage("looks at sources", self.roots.background.end())
        await asyncio.gather(
            *(ending.stage(f"driver {name}", driver.aclose()) for name, driver in self.drivers.items())
        )
        if self.traces is not None:
            await ending.stage("traces", asyncio.to_thread(self.traces.close))
        self.journal.close()
        self.store.close()
        if ending.errors:
            raise ending.errors[0]

    async def _keep_last_states(self) -> None:
        """Close the idle sandboxes, after freezing the states that are nowhere else."""
        until = time.monotonic() + LAST_FREEZES_S
        await self.last_ways.close(self.pool.roster.slots, within_s=LAST_FREEZES_S, even_unkept=True)
        await self.last_ways.drain(within_s=max(0.0, until - time.monotonic()))

    async def _sweep(self) -> None:
        await asyncio.to_thread(self.store.database.checkpoint)
        await self.close_unused()
        # Idle sandboxes, warm forks first, make room while the machine has too little memory.
        while available_bytes() < self.settings.memory_reserve_bytes and await self.pool.close_victim():
            log.warning("little memory is available: an idle sandbox was closed")
        self._report_evictions()
        if self.settings.idle_finish_s is not None:
            await self.tasks.rollouts.finish_unused(self.settings.idle_finish_s)
        await self.forgetting.sweep()
        self.forgetting.close_cold(max_records=self.settings.tree_memory_records, idle_s=self.settings.sandbox_idle_s)
        if self.cache.over_budget:
            await self.evict_snapshots()
        # Last: they take seconds in a large store.
        await self.store.drafts.sweep()
        await self.store.blobs.sweep()

    def _report_evictions(self) -> None:
        if evicted := self.pool.newly_evicted():
            bound = self.pool.bound
            log.warning(
                "sandboxes were closed for room before their rollouts' next calls, which restore their states",
                closed=evicted, room_for=bound.most, bounded_by=bound.by, remedy=bound.remedy,
            )  # fmt: skip

    def _note_failure(self, name: str, error: Exception) -> None:
        self.counts.failure("background")
        log.warning("background work failed", work=name, error=repr(error))


def build_engine(
    settings: Settings,
    drivers: Mapping[str, Driver],
    gate: Gate | None = None,
    *,
    block: int = 0,
    share: Share | None = None,
) -> Engine:
    """Create the parts of an engine and connect them. Raises StoreError, or SystemExit if a library is missing."""

    def fold(steps: list[JournalEntry]) -> None:
        store.rollouts.fold(steps)
        store.rollouts.add_overhead(notes.take_overheads())
        audit.sample_hits(steps)

    def stored_positions(tree: int) -> Iterator[Node]:
        nodes = (trees.node(tree, number) for number in store.rollouts.positions(tree))
        return (node for node in nodes if node is not None)

    # Parts that are made later are named by functions: they are there when the first call comes.
    async def keep(slot: Slot) -> bool:
        return await last_ways.keep(slot)

    async def renew(rollout: Rollout) -> bool:
        return await tasks.renew(rollout)

    survives_power_loss = settings.durability == "power"
    token = None if settings.token is None else settings.token.get_secret_value()
    access, counts, walkers = configured_access(token, settings.token_file), Counters(), Walkers()
    make_private(settings.data)

    def namespace(task: str) -> str:
        # In a cluster a tree has one owner, so no task may share a tree with others.
        return access.namespace(task) if gate is None else f"{access.namespace(task)}/{task}"

    sync: Literal["FULL", "NORMAL"] = "FULL" if survives_power_loss else "NORMAL"
    store = Store(settings.data / STORE, sync=sync, namespace=namespace, block=block)
    journal = Journal(settings.data / "journal", fold, store.rollouts, store.database, sync=survives_power_loss)
    snapshots = SnapshotStore(settings.data / "snapshots", drivers)
    room = Room(
        settings.max_sandboxes, reserve_bytes=settings.memory_reserve_bytes, workers=settings.workers,
        other_files=settings.max_connections,
    )  # fmt: skip
    flights = SingleFlight()
    pool = Pool(room, patience_s=settings.sandbox_patience_s, callers=flights.callers, keep=keep)
    cache = SnapshotCache(
        snapshots, drivers, counts,
        budget_bytes=settings.snapshot_bytes, checkpoint_bytes=settings.checkpoint_bytes,
        quota_of=_disk_quotas(access, store, workers=settings.workers),
    )  # fmt: skip
    trees = OpenTrees(store.trees, cache, snapshots.of_tree)
    snapshot_value = SnapshotValue(
        cache, counts, walkers, trees, stored_positions, None if gate is None else store.records.save_set_aside
    )
    elsewhere: KeptElsewhere = NothingElsewhere() if gate is None else gate.states

    def taken(tree: StateTree, node: Node) -> None:
        # The engine's captures are of its own trees.
        elsewhere.stepped(cast("Tree", tree), node)

    capture = Capture(cache, pool, counts, store.records.save_node, taken)
    roots = RootChanges(drivers, settings.source_rules, counts)
    maker = SandboxMaker(drivers, pool, cache, capture, counts, roots)
    restorer = Restorer(drivers, pool, cache, capture, snapshot_value, store.records, counts, maker, elsewhere)
    warm = WarmForks(
        restorer, pool, cache.costs, counts, walkers,
        max_forks=min(settings.warm_sandboxes, pool.bound.most // 2), idle_s=settings.sandbox_idle_s,
        reserve_bytes=settings.memory_reserve_bytes,
    )  # fmt: skip
    answers = Answers(store.records, budget_bytes=settings.answer_memory_bytes)
    traces = None if settings.otel_endpoint is None else Traces(store.records, settings.otel_endpoint)
    quotas = None
    if settings.quotas:
        quotas = Quotas(settings.quotas, patience_s=settings.sandbox_patience_s, max_waiting=settings.max_requests // 2)
    executor = Executor(
        restorer, store.records, counts, roots, flights, answers.keep, answers.of, renew, trees.whole, quotas, gate
    )  # fmt: skip
    notes = StepNotes(counts, warm, lambda record: answers.of(record).model_tokens, traces)
    step = Stepper(executor, journal, notes, gate)
    rollouts = Rollouts(store, journal, trees, pool, walkers, step.order, gate)
    tasks = Tasks(
        store, rollouts, trees, drivers, settings.default_spec, roots,
        runs_images=settings.runs_images, any_image=settings.any_image, gate=gate, share=share,
    )  # fmt: skip
    forgetting = Forgetting(tasks, trees, walkers, store, journal, cache, pool, gate)
    audit = Auditor(
        restorer, store, counts, lambda: len(step.calls), trees.get, roots,
        share=settings.audit_share, quarantine=settings.audit_quarantine, gate=gate,
    )  # fmt: skip
    adopter = Adopter(store, journal, tasks, trees, cache, gate)
    last_ways = LastWays(pool, capture, snapshot_value, trees)
    transfer = TransferService(
        store, tasks, adopter, cache, capture, drivers, settings.data / "imports", max_bytes=settings.import_bytes
    )
    return Engine(
        settings, drivers, counts, access, store, journal, snapshots, cache, snapshot_value, capture, pool, restorer,
        warm, answers, traces, executor, step, walkers, trees, tasks, forgetting, audit, transfer, roots,
        last_ways, gate, share,
    )  # fmt: skip


def _disk_quotas(access: Access, store: Store, *, workers: int) -> Callable[[int], DiskQuota | None]:
    """Return what finds the owner of a tree: the named token whose tasks its task is one of."""
    tasks = dict[int, str]()

    def quota_of(tree: int) -> DiskQuota | None:
        # Asked for each tree at each sweep. A tree that is just imported may have no task yet.
        if not tasks.get(tree):
            tasks[tree] = store.trees.task_of(tree)
        tenant = access.tenant(tasks[tree]) if tasks[tree] else None
        if tenant is None or not tenant.name:
            return None
        return DiskQuota(f"@{tenant.name}", math.inf if tenant.disk_bytes is None else tenant.disk_bytes / workers)

    return quota_of
