"""Capture: a sandbox's state becomes a snapshot while the agent thinks.

A lease becomes a freeze (1), which starts after a delay (2), is written to disk (3) and attached to its node (4). Then
the sandbox is idle again. A state that the driver refuses to freeze is never tried again (`node.unfreezable`). A
snapshot that cannot be written costs nothing else. A sandbox that fails while it is frozen is closed; its state is then
reached by replay.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import structlog

from sandboxes.driver import EarlyFreezing, FrozenState, Sandbox, fulfils, settle
from sandboxes.effects import StateDigest
from sandboxes.errors import NotFreezableError, NotFreezableNowError, SandboxError
from sandboxes.pool.pool import Pool
from sandboxes.pool.roster import Slot
from sandboxes.task_owner import TaskOwner
from snapshots.cache import SnapshotCache, SnapshotCounters
from snapshots.snapshot import StateNode, snapshot_kind

log = structlog.get_logger()
N = TypeVar("N", bound=StateNode)

FREEZE_DELAY_S = 0.02
"""How long a freeze is put off if no call wants the sandbox. Drivers move what a call wrote into a layer of its own
within 5 ms after it anyway. A freeze before that waits for it and delays other answers meanwhile; a freeze after it
takes 0.1 ms (measured with `local`)."""


class StateTree(Protocol):
    """What the snapshot rooms know of a tree. `proxy.tree.tree.Tree` is one."""

    id: int

    @property
    def root(self) -> StateNode:
        """Node of the root state."""
        ...

    def set_root_state(self, state: StateDigest | None) -> None:
        """Give the root its digest, which is first known when a sandbox in the root state is frozen."""
        ...


class Capture(Generic[N]):
    """Freezes sandboxes into snapshots."""

    def __init__(
        self,
        cache: SnapshotCache,
        pool: Pool,
        counters: SnapshotCounters,
        save_node: Callable[[N], None],
        taken: Callable[[StateTree, N], None],
    ) -> None:
        """Capture sandboxes of a pool for a cache; `save_node` writes a root to the store once its digest is known.

        `taken` is called when a node has got a snapshot that was taken here.
        """
        self._cache, self._pool, self._counters, self._save_node = cache, pool, counters, save_node
        self._freezes = TaskOwner()
        # The nodes whose sandboxes run on while their frozen states are completed, and what is set when they are.
        self._arriving = dict[N, asyncio.Event]()
        self._taken = taken

    async def give_back(self, slot: Slot, tree: StateTree, node: N, *, freeze: bool) -> None:
        """End the lease on a sandbox in a node's state; `freeze` freezes the state in the background first."""
        if not freeze or node in self._arriving:
            await self._pool.release(slot)
            return
        # 1. The lease becomes a freeze without a moment between, so that no call can change the state first.
        self._pool.begin_freeze(slot)
        # In a task: the answer to the call goes out meanwhile. `drain` waits for it at shutdown.
        self._freezes.spawn("freeze", self._freeze_later(slot, tree, node))

    async def arrival(self, node: N) -> None:
        """Wait for a frozen state of the node that is being completed."""
        if (arriving := self._arriving.get(node)) is not None:
            await arriving.wait()

    async def freeze_leased(self, slot: Slot, tree: StateTree, node: N) -> bool:
        """Freeze a leased sandbox now, end its lease, and return whether the node has a snapshot.

        Raises NotFreezableError if the driver cannot freeze the state; the node remembers why, and the sandbox is idle.
        Raises SandboxError or OSError if the sandbox failed, and closes it.
        """
        # Only a leased sandbox may be frozen (`sandboxes.pool.lifecycle`), so a person's request leases it first too.
        self._pool.begin_freeze(slot)
        async with self._pool.freezing(slot) as sandbox:
            # The state may be on its way from here.
            await self.arrival(node)
            if node.snapshot is not None:
                return True
            refusal = await self._freeze(sandbox, tree, node, slot.live_from)
        # Raised outside the block, which closes the sandbox on any error.
        if refusal is not None:
            raise refusal
        return node.snapshot is not None

    async def freeze(
        self, sandbox: Sandbox, tree: StateTree, node: N, live_from: float = math.inf
    ) -> StateDigest | None:
        """Freeze a sandbox, if the disk allows, into a snapshot of the node; return the state's digest, or None.

        Its processes have run since `live_from`, on the monotonic clock; infinite where none run. Raises
        NotFreezableError if the driver cannot freeze the state, and SandboxError or OSError if the sandbox failed.
        """
        # What the last call left to do is no part of a freeze's cost: the next call would have waited for it too.
        await settle(sandbox)
        # 3. The driver freezes. From here to `attach` the sandbox is not leased to any call.
        start = time.perf_counter()
        age_s = _age_s(live_from)
        return self._keep(await sandbox.freeze(), tree, node, start, age_s)

    def _keep(
        self, frozen: FrozenState, tree: StateTree, node: N, start: float, age_s: float = 0.0
    ) -> StateDigest | None:
        freeze_s = time.perf_counter() - start
        self._counters.freeze_s.observe(freeze_s)
        # The root exists before any sandbox of it; its digest is first known here, and `merge` needs it in the
        # index.
        if node is tree.root and node.state is None:
            tree.set_root_state(frozen.state)
            self._save_node(node)
        try:
            # One file, which takes less than a change of threads.
            snapshot = self._cache.save(frozen, tree=tree.id, node=node.id, cost_s=freeze_s, age_s=age_s)
        except OSError as error:
            # Nothing is lost but the snapshot: the sandbox is unchanged and goes on.
            self._report(node, error)
            # The driver holds its storage until the next `collect`.
            self._cache.used_bytes += frozen.size_bytes
            return frozen.state
        # The root is frozen on the way to an answer, right after the set-up: its cost says nothing about other states.
        if node is not tree.root:
            costs, driver = self._cache.costs, snapshot.driver
            # Includes the disk, because that is what a freeze costs; `freeze_s` above is the driver's part.
            costs[driver] = costs[driver].froze(snapshot_kind(snapshot), time.perf_counter() - start)
        # The node may have been forgotten, or got a snapshot, during the awaits above: `attach` drops this one then.
        self._counters.snapshots_taken += 1
        # 4. Attached without an await between its check and its set, so two freezes cannot both attach.
        if self._cache.attach(snapshot, node):
            self._taken(tree, node)
        return frozen.state

    async def renew(self, slot: Slot, tree: StateTree, node: N, error: SandboxError) -> None:
        """Replace a snapshot that could not be restored by one of a leased sandbox that a replay brought there."""
        if self._cache.failures.is_renewal(node):
            # No snapshot of this state can be restored. This one goes once replays have proven their way.
            node.unfreezable = f"its snapshots cannot be restored: {error}"
            return
        try:
            with self._cache.failures.renewing(node):
                assert slot.sandbox is not None
                await self.freeze(slot.sandbox, tree, node, slot.live_from)
        except NotFreezableError as refusal:
            log.info("a snapshot that cannot be restored is not replaced", node=node.id, error=str(refusal))

    def adopt(self, frozen: FrozenState, tree: StateTree, node: N, *, cost_s: float) -> bool:
        """Make a state from another machine the snapshot of a node; return False if the node goes without. Blocking."""
        # Checked before the write, so that nothing has to be removed then.
        if node.detached or node.snapshot is not None:
            return False
        try:
            return self._cache.attach(self._cache.save(frozen, tree=tree.id, node=node.id, cost_s=cost_s), node)
        except OSError as error:
            self._report(node, error)
            return False

    async def drain(self) -> None:
        """Wait for the freezes in progress, without their delay."""
        # A freeze may be spawned while this waits, so the delay is cut short in each round.
        while self._freezes:
            self._pool.flush_pending_freezes()
            # `wait` and not `gather`: a freeze that fails has been reported by its own task.
            await asyncio.wait(tuple(self._freezes))

    async def _freeze_later(self, slot: Slot, tree: StateTree, node: N) -> None:
        try:
            # 2. The delay ends early if a call waits for the sandbox or for its room (`freeze_now`).
            async with self._pool.freezing(slot, after_s=FREEZE_DELAY_S) as sandbox:
                await settle(sandbox)
                if not fulfils(sandbox, EarlyFreezing):
                    await self._freeze(sandbox, tree, node, slot.live_from)
                    return
                start, age_s = time.perf_counter(), _age_s(slot.live_from)
                try:
                    frozen = await sandbox.begin_freeze()
                except NotFreezableError as refusal:
                    _note(node, refusal)
                    return
                # Noted before a call may run: one that changes nothing would freeze the state again.
                arrived = asyncio.Event()
                arriving = self._arriving.setdefault(node, arrived)
            try:
                self._keep(await frozen, tree, node, start, age_s)
            finally:
                arrived.set()
                # Of two sandboxes at the node, the one that froze first is waited for.
                if arriving is arrived:
                    del self._arriving[node]
        # The pool has closed the sandbox by now. Calls that need its state replay, so the error ends here.
        except (NotFreezableNowError, SandboxError, OSError) as error:
            self._report(node, error)

    async def _freeze(self, sandbox: Sandbox, tree: StateTree, node: N, live_from: float) -> NotFreezableError | None:
        try:
            await self.freeze(sandbox, tree, node, live_from)
        except NotFreezableError as refusal:
            _note(node, refusal)
            return refusal
        return None

    def _report(self, node: N, error: Exception) -> None:
        self._counters.failure("freeze")
        log.warning("freeze failed", node=node.id, error=str(error))


def _note(node: StateNode, refusal: NotFreezableError) -> None:
    # The reason is a property of the state: no other sandbox at this node is tried.
    # In memory only: after a restart the state is tried once more.
    if not isinstance(refusal, NotFreezableNowError):
        node.unfreezable = str(refusal)


def _age_s(live_from: float) -> float:
    return max(0.0, time.monotonic() - live_from)
