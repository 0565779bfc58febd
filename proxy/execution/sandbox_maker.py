"""Sandboxes that did not exist before: a fresh one at the root of a tree, or one that is restored from a snapshot.

Both are leased at once. If a rollout needs a restored sandbox and this machine has no room, it may run on another one.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum

import structlog

from proxy.execution.root_state import RootChangedError, RootChanges
from proxy.telemetry.counters import Counters
from proxy.tree.tree import Node, Tree
from sandboxes.driver import Driver, Sandbox
from sandboxes.errors import NotFreezableError, RootLostError
from sandboxes.pool.pool import Pool
from sandboxes.pool.roster import Slot
from snapshots.cache import SnapshotCache
from snapshots.capture import Capture

log = structlog.get_logger()


class Owner(IntEnum):
    """Owners of leases that are not rollouts. Ids of rollouts are positive."""

    CONTROL_PLANE = 0
    """A lease requested through the control plane, to take a snapshot."""
    SCRATCH = -1
    """A throw-away fork: never takes another rollout's sandbox."""


def is_rollout(owner: int | None) -> bool:
    """Return whether the owner of a lease is a rollout. None, for a warm fork, is not."""
    return owner is not None and owner > 0


class SandboxMaker:
    """Makes sandboxes and leases them."""

    def __init__(
        self,
        drivers: Mapping[str, Driver],
        pool: Pool,
        cache: SnapshotCache,
        capture: Capture[Node],
        counts: Counters,
        roots: RootChanges,
    ) -> None:
        self._drivers, self._pool, self._cache, self._capture = drivers, pool, cache, capture
        self._counts, self._roots = counts, roots

    async def restore(self, node: Node, tree: Tree, owner: int | None) -> Slot:
        """Lease a sandbox that is restored from a node's snapshot, and note how long it took."""
        driver = self._drivers[tree.spec.driver]
        began = time.perf_counter()
        # The lease keeps the snapshot from being evicted while the pool waits for room.
        with self._cache.leased(node) as frozen:
            slot = await self._launch(lambda: driver.restore(tree.spec, frozen), node, owner)
        slot.live_from = time.monotonic() - node.kept_age_s
        # Includes the wait for room: that is what a restore costs a call on this machine now.
        seconds = time.perf_counter() - began
        self._counts.restores += 1
        self._counts.restore_s.observe(seconds)
        self._cache.restored(node, seconds)
        return slot

    async def start(self, tree: Tree, owner: int | None) -> Slot:
        """Lease a fresh sandbox at the root of a tree; take the root's snapshot, if it has none.

        Raises RootChangedError if what the spec refers to is not what the tree was recorded on; else as `restore`.
        """
        driver, costs = self._drivers[tree.spec.driver], self._cache.costs
        # The content that the spec refers to may have changed on disk; its records would then be of another root state.
        await self._require_current(tree)
        began = time.perf_counter()
        slot = await self._launch(lambda: driver.start(tree.spec), tree.root, owner)
        try:
            # A change between that look and the mount is noticed here, before anything is recorded in this sandbox.
            await self._require_current(tree)
            seconds = time.perf_counter() - began
            self._counts.starts += 1
            self._counts.start_s.observe(seconds)
            costs[tree.spec.driver] = costs[tree.spec.driver].started(seconds)
            if tree.root.snapshot is None and slot.sandbox is not None:
                await self._freeze_root(slot.sandbox, tree)
        except BaseException:
            await self._pool.close(slot)
            raise
        return slot

    async def _freeze_root(self, sandbox: Sandbox, tree: Tree) -> None:
        """Take the snapshot of a tree's root, in a sandbox that has just started.

        A call that leads back to the root merges by its digest. Raises RootLostError if it is another state than the
        tree was recorded on: a set-up with random names or times is then run again.
        """
        recorded = tree.root.state
        try:
            state = await self._capture.freeze(sandbox, tree, tree.root)
        except NotFreezableError:
            log.info("set-up left processes, so each sandbox of this task starts fresh", tree=tree.id)
            return
        if recorded is not None and state is not None and state.content != recorded.content:
            self._cache.drop(tree.root)
            raise RootLostError

    async def _require_current(self, tree: Tree) -> None:
        if not await self._roots.is_current(tree):
            raise RootChangedError

    async def _launch(self, make: Callable[[], Awaitable[Sandbox]], node: Node, owner: int | None) -> Slot:
        # Warm forks must not make room by closing sandboxes, so they have a door of their own.
        if owner is None:
            return await self._pool.start_warm(make, node)
        return await self._pool.start(make, node, owner)
