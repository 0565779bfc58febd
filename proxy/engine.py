"""All parts of a running Forkpoint, built and handed to one another."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import structlog

from proxy.audit.auditor import Audit
from proxy.control.activity import Pulse
from proxy.control.browsing import passed
from proxy.control.scratch_forks import Visits
from proxy.control.subtree_totals import Sums
from proxy.control.task_totals import Overview
from proxy.control.views.common import Passed
from proxy.control.views.resources import Collected
from proxy.execution.restore import Attach
from proxy.execution.snapshot_value import Keeper
from proxy.execution.tasks import Tasks
from proxy.execution.tracing import Traces
from proxy.execution.warm_forks import Warm, available_bytes
from proxy.http.access import Access, read_tokens
from proxy.http.answer_cache import Answers
from proxy.settings import Settings
from proxy.step import Step
from proxy.storage.journal import Journal, JournalEntry
from proxy.storage.store import Store
from proxy.telemetry.counters import Counters
from proxy.transfer.service import Carrying
from proxy.tree.rollout import Walkers
from proxy.tree.tree import Node, Tree
from sandboxes.driver import Driver
from sandboxes.pool.pool import Pool
from snapshots.store import SnapshotStore

log = structlog.get_logger()

_FOLD_EVERY_S = 2.0
_SWEEP_EVERY_S = 10.0
_BEAT_EVERY_S = 1.0
_AUDIT_EVERY_S = 1.0
_VISITS_SHARE = 4
"""Of the sandboxes that may live, one in so many may be a person's."""


class Engine:
    """Owns the store, the drivers and the background work, from `open` to `aclose`."""

    def __init__(self, settings: Settings, drivers: Mapping[str, Driver]) -> None:
        self.settings, self.drivers = settings, drivers
        self.counts = Counters()
        power = settings.durability == "power"
        self.store = Store(settings.data / "forkpoint.sqlite", sync="FULL" if power else "NORMAL")
        self.journal = Journal(settings.data / "journal", self._fold, sync=power)
        self.snapshots = SnapshotStore(settings.data / "snapshots")
        self.pool = Pool(budget=settings.max_sandboxes, patience_s=settings.sandbox_patience_s)
        walkers = Walkers()
        self.keeper = Keeper(
            self.snapshots, drivers, self.pool, self.store, self.counts, walkers,
            budget_bytes=settings.snapshot_bytes, checkpoint_bytes=settings.checkpoint_bytes,
        )  # fmt: skip
        self.attach = Attach(drivers, self.pool, self.keeper, self.store, self.counts)
        self.warm = Warm(
            self.attach, self.pool, self.keeper, self.counts, walkers,
            most=min(settings.warm_sandboxes, settings.max_sandboxes // 2), idle_s=settings.sandbox_idle_s,
            reserve_bytes=settings.memory_reserve_bytes,
        )  # fmt: skip
        self.answers = Answers(self.store, budget_bytes=settings.answer_memory_bytes)
        self.traces = None if settings.otel_endpoint is None else Traces(self.store, settings.otel_endpoint)
        self.step = Step(self.attach, self.store, self.journal, self.counts, self.warm, self.traces)
        self.tasks = Tasks(
            self.store, self.journal, self.keeper, self.pool, drivers, walkers, settings.default_spec,
            any_image=settings.any_image,
        )  # fmt: skip
        self.visits = Visits(self.attach, most=max(2, settings.max_sandboxes // _VISITS_SHARE))
        self.sums, self.overview = Sums(walkers), Overview(self.store)
        self.pulse = Pulse(self.counts, lambda: len(self.pool.roster), self.tasks.running_in)
        self.audit = Audit(
            self.attach, self.store, self.counts, lambda: self.step.under_way, self.tasks.in_memory,
            share=settings.audit_share, quarantine=settings.audit_quarantine,
        )  # fmt: skip
        self.carrying = Carrying(
            self.store, self.journal, self.tasks, self.keeper, drivers, settings.data / "imports",
            max_bytes=settings.import_bytes,
        )  # fmt: skip
        secret = None if settings.token is None else settings.token.get_secret_value()
        self.access = Access(read_tokens(secret, settings.token_file))
        self.store.namespace = self.access.namespace
        self.names = None if self.access.needs_token else settings.names
        """Of hosts that requests may be sent to; None: any, for a page that another name led here has no token."""
        self.ready = False
        self.closing = asyncio.Event()
        self.beside: list[Callable[[], Awaitable[None]]] = []
        """Awaited first when it closes: what protocols have under way."""
        self._chores: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Read back what was there, sweep what a killed process left, and begin the background work.

        Raises:
            StoreError, SandboxError, OSError: this data directory or machine cannot be used.
        """
        for driver in self.drivers.values():
            await driver.open()
        self.carrying.open()
        steps, kept = self.journal.open(), self.snapshots.open()
        await self.keeper.fit(self.tasks.node)
        loop = asyncio.get_running_loop()
        self._chores = [
            loop.create_task(self._every(_FOLD_EVERY_S, "fold", self.journal.trickle)),
            loop.create_task(self._every(_SWEEP_EVERY_S, "sweep", self._sweep)),
            loop.create_task(self._every(0.0, "warm", self.warm.work)),
            loop.create_task(self._every(_BEAT_EVERY_S, "pulse", self.pulse.beat)),
            loop.create_task(self._every(_AUDIT_EVERY_S, "audit", self.audit.work)),
        ]
        self.ready = True
        log.info("open", data=str(self.settings.data), steps_read_back=steps, snapshots=kept)

    def hang_up(self) -> None:
        """End what would go on for ever: streams of events, terminals."""
        self.closing.set()
        self.pulse.close()

    async def passed(self, tree: Tree, node: Node, limit: int) -> list[Passed]:
        """Return the latest rollouts that a call led to node."""
        self.journal.fold()
        ask = partial(passed, tree=tree.id, node=node.id, most=limit)
        rows = await asyncio.to_thread(self.store.apart, ask)
        return [Passed(task=row[0], rollout=row[1], turn=row[2], finished=bool(row[3])) for row in rows]

    async def collect(self) -> Collected:
        """Free what nothing needs, now rather than when it is in the way."""
        before = self.keeper.used_bytes + self.store.size_bytes()
        swept = await self.tasks.sweep_forgotten()
        await self.pool.close_unused(self.settings.sandbox_idle_s)
        evicted = await self.keeper.fit(self.tasks.node)
        self.journal.fold()
        self.store.delete_unused()
        await asyncio.to_thread(self.store.checkpoint)
        after = self.keeper.used_bytes + self.store.size_bytes()
        return Collected(
            evicted=evicted, forgotten_nodes=swept, freed_bytes=max(0, before - after),
            snapshot_bytes=self.keeper.used_bytes, store_bytes=self.store.size_bytes(),
        )  # fmt: skip

    async def aclose(self) -> None:
        """Let the calls under way end, keep what is known, and leave no sandbox behind."""
        self.ready = False
        self.hang_up()
        for close in self.beside:
            await close()
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await self.audit.aclose()
        await self.warm.aclose()
        await self.step.drain()
        await self.keeper.drain()
        await self.pool.close_where(lambda _: True)
        for driver in self.drivers.values():
            await driver.aclose()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        self.journal.close()
        self.store.close()

    def _fold(self, steps: list[JournalEntry]) -> None:
        self.store.fold(steps)
        self.audit.saw(steps)

    async def _sweep(self) -> None:
        await asyncio.to_thread(self.store.checkpoint)
        await self.pool.close_unused(self.settings.sandbox_idle_s)
        await self._spare_memory()
        await self.tasks.sweep_forgotten()
        self.tasks.close_cold(most=self.settings.tree_memory_records, idle_s=self.settings.sandbox_idle_s)
        over = self.keeper.used_bytes > self.settings.snapshot_bytes
        if over or self.keeper.checkpoint_bytes > self.settings.checkpoint_bytes:
            await self.keeper.fit(self.tasks.node)

    async def _spare_memory(self) -> None:
        """Close idle sandboxes, warm ones first, while the machine has too little memory left."""
        while available_bytes() < self.settings.memory_reserve_bytes and await self.pool.close_victim():
            log.warning("little memory is left: an idle sandbox was closed")

    async def _every(self, seconds: float, name: str, chore: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await chore()
            except Exception as error:  # noqa: BLE001 - a background task ends here; the next round may do better
                self.counts.failure("background")
                log.warning("background work failed", chore=name, error=repr(error))
