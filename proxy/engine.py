"""All parts of a running Forkpoint, built and handed to one another."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import structlog

from proxy.audit.auditor import Auditor
from proxy.execution.executor import Executor
from proxy.execution.forgetting import Forgetting
from proxy.execution.open_trees import OpenTrees
from proxy.execution.restore import Restorer
from proxy.execution.snapshot_value import SnapshotValue
from proxy.execution.tasks import Tasks
from proxy.execution.tracing import Traces
from proxy.execution.warm_forks import WarmForks, available_bytes
from proxy.http.access import Access, read_tokens
from proxy.http.answer_cache import Answers
from proxy.settings import Settings
from proxy.step import Step
from proxy.storage.journal import Journal, JournalEntry
from proxy.storage.store import Store
from proxy.telemetry.counters import Counters
from proxy.transfer.adopt import Adopter
from proxy.transfer.service import TransferService
from proxy.tree.task import Walkers
from sandboxes.driver import Driver
from sandboxes.pool.pool import Pool
from sandboxes.task_owner import TaskOwner
from snapshots.cache import SnapshotCache
from snapshots.capture import Capture
from snapshots.store import SnapshotStore

log = structlog.get_logger()

_FOLD_EVERY_S = 2.0
_SWEEP_EVERY_S = 10.0
_AUDIT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """Work that the engine repeats while it is open.

    Attributes:
        name: Names the work in log lines.
        every_s: Seconds between the end of one run and the start of the next.
        work: One run. A failure is logged and counted, and the next run comes as usual.
    """

    name: str
    every_s: float
    work: Callable[[], Awaitable[None]]


class Engine:
    """Owns the store, the drivers and the background work, from `open` to `aclose`."""

    def __init__(self, settings: Settings, drivers: Mapping[str, Driver]) -> None:
        self.settings, self.drivers = settings, drivers
        self.counts = Counters()
        power = settings.durability == "power"
        secret = None if settings.token is None else settings.token.get_secret_value()
        self.access = Access(read_tokens(secret, settings.token_file))
        self.store = Store(
            settings.data / "forkpoint.sqlite", sync="FULL" if power else "NORMAL", namespace=self.access.namespace
        )
        self.journal = Journal(settings.data / "journal", self._fold, sync=power)
        self.snapshots = SnapshotStore(settings.data / "snapshots")
        self.pool = Pool(budget=settings.max_sandboxes, patience_s=settings.sandbox_patience_s)
        walkers = self.walkers = Walkers()
        self.cache = SnapshotCache(
            self.snapshots, drivers, self.counts,
            budget_bytes=settings.snapshot_bytes, checkpoint_bytes=settings.checkpoint_bytes,
        )  # fmt: skip
        self.snapshot_value = SnapshotValue(self.cache, self.counts, walkers)
        self.capture = Capture(self.cache, self.pool, self.counts, self.store.records.save_node)
        self.restorer = Restorer(
            drivers, self.pool, self.cache, self.capture, self.snapshot_value, self.store.records, self.counts
        )
        self.warm = WarmForks(
            self.restorer, self.pool, self.cache.costs, self.counts, walkers,
            max_forks=min(settings.warm_sandboxes, settings.max_sandboxes // 2), idle_s=settings.sandbox_idle_s,
            reserve_bytes=settings.memory_reserve_bytes,
        )  # fmt: skip
        self.answers = Answers(self.store.records, budget_bytes=settings.answer_memory_bytes)
        self.traces = None if settings.otel_endpoint is None else Traces(self.store.records, settings.otel_endpoint)
        self.executor = Executor(self.restorer, self.store.records)
        self.step = Step(self.executor, self.journal, self.counts, self.warm, self.traces)
        self.trees = OpenTrees(self.store.trees, self.cache)
        self.tasks = Tasks(
            self.store, self.journal, self.trees, self.pool, drivers, walkers, self.step.order, settings.default_spec,
            any_image=settings.any_image,
        )  # fmt: skip
        self.forgetting = Forgetting(self.tasks, self.trees, walkers, self.store, self.journal, self.cache, self.pool)
        self.audit = Auditor(
            self.restorer, self.store, self.counts, lambda: len(self.step.calls), self.trees.get,
            share=settings.audit_share, quarantine=settings.audit_quarantine,
        )  # fmt: skip
        adopter = Adopter(self.store, self.journal, self.tasks, self.trees, self.cache)
        self.transfer = TransferService(
            self.store, self.tasks, adopter, self.cache, self.capture, drivers, settings.data / "imports",
            max_bytes=settings.import_bytes,
        )  # fmt: skip
        self.names = None if self.access.needs_token else settings.names
        """Of hosts that requests may be sent to; None: any, for a page that another name led here has no token."""
        self.ready = False
        self.closing = asyncio.Event()
        self.beside: list[Callable[[], Awaitable[None]]] = []
        """Awaited first when it closes: what protocols have under way."""
        self.at_hang_up: list[Callable[[], None]] = []
        """Called by `hang_up`: each ends streams that would never end by themselves."""
        self.background = [
            BackgroundWork("fold", _FOLD_EVERY_S, self.journal.trickle),
            BackgroundWork("sweep", _SWEEP_EVERY_S, self._sweep),
            BackgroundWork("warm", 0.0, self.warm.work),
            BackgroundWork("audit", _AUDIT_EVERY_S, self.audit.work),
        ]
        """Repeated from `open` to `aclose`. Other rooms append their own work before `open`."""
        self._running = TaskOwner()

    async def open(self) -> None:
        """Read back what was there, sweep what a killed process left, and begin the background work.

        Raises:
            StoreError, SandboxError, OSError: this data directory or machine cannot be used.
        """
        for driver in self.drivers.values():
            await driver.open()
        self.transfer.open()
        steps, kept = self.journal.open(), self.snapshots.open()
        await self.evict_snapshots()
        for work in self.background:
            self._running.spawn(work.name, self._repeat(work))
        self.ready = True
        log.info("open", data=str(self.settings.data), steps_read_back=steps, snapshots=kept)

    async def evict_snapshots(self) -> int:
        """Evict snapshots until their budgets hold, and return how many were evicted."""
        return await self.cache.fit(self.trees.node, self.snapshot_value.prospect)

    def hang_up(self) -> None:
        """End what would go on for ever: streams of events, terminals."""
        self.closing.set()
        for end in self.at_hang_up:
            end()

    async def aclose(self) -> None:
        """Let the calls under way end, keep what is known, and leave no sandbox behind."""
        self.ready = False
        self.hang_up()
        for close in self.beside:
            await close()
        self._running.cancel()
        await self._running.wait()
        await self.audit.aclose()
        await self.warm.aclose()
        await self.step.drain()
        await self.capture.drain()
        await self.pool.close_where(lambda _: True)
        for driver in self.drivers.values():
            await driver.aclose()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        self.journal.close()
        self.store.close()

    def _fold(self, steps: list[JournalEntry]) -> None:
        self.store.rollouts.fold(steps)
        self.audit.sample_hits(steps)

    async def _sweep(self) -> None:
        await asyncio.to_thread(self.store.database.checkpoint)
        await self.pool.close_unused(self.settings.sandbox_idle_s)
        await self._spare_memory()
        await self.forgetting.sweep()
        self.forgetting.close_cold(max_records=self.settings.tree_memory_records, idle_s=self.settings.sandbox_idle_s)
        if self.cache.over_budget:
            await self.evict_snapshots()

    async def _spare_memory(self) -> None:
        """Close idle sandboxes, warm ones first, while the machine has too little memory left."""
        while available_bytes() < self.settings.memory_reserve_bytes and await self.pool.close_victim():
            log.warning("little memory is left: an idle sandbox was closed")

    async def _repeat(self, background: BackgroundWork) -> None:
        while True:
            await asyncio.sleep(background.every_s)
            try:
                await background.work()
            except Exception as error:  # noqa: BLE001 - a background task ends here; the next round may do better
                self.counts.failure("background")
                log.warning("background work failed", work=background.name, error=repr(error))
