"""Last ways: a state that may exist only in an idle sandbox is frozen before this sandbox is closed.

Most states get no snapshot, because a replay is cheap. But a replay that was never tried may reach another state. So
before a sandbox is closed (idle, for room, on request, or at the end), its state is frozen, unless no rollout needs it
or a replay has reached it.
"""

import asyncio
import contextlib
from collections.abc import Iterable

import structlog

from proxy.execution.open_trees import OpenTrees
from proxy.execution.snapshot_value import SnapshotValue
from proxy.tree.tree import Node, Tree
from sandboxes.errors import NotFreezableError, SandboxError
from sandboxes.pool.lifecycle import SandboxState
from sandboxes.pool.pool import Pool
from sandboxes.pool.roster import Slot
from sandboxes.task_owner import TaskOwner
from snapshots.capture import Capture

log = structlog.get_logger()


class LastWays:
    """Freezes idle sandboxes that are about to be closed."""

    def __init__(self, pool: Pool, capture: Capture[Node], value: SnapshotValue, trees: OpenTrees) -> None:
        self._pool, self._capture, self._value, self._trees = pool, capture, value, trees
        self._freezes = TaskOwner()

    async def close(self, slots: Iterable[Slot], *, within_s: float, even_unkept: bool = False) -> int:
        """Close idle sandboxes, after freezing those that are the last known way; return how many were closed.

        The freezes may take `within_s` together. With `even_unkept`, sandboxes are closed that could not be frozen.
        """
        positions, kept = {slot: slot.position for slot in slots}, set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for slot in positions:
                    # Looked up again each time: the rollout may have ended, or a replay may have reached the state.
                    if await self.keep(slot):
                        kept.add(slot)

        def may_go(slot: Slot) -> bool:
            # A call may have taken a sandbox meanwhile: then it is in use, or in another state that is not kept yet.
            return slot in positions and positions[slot] is slot.position and (even_unkept or slot in kept)

        return await self._pool.close_where(may_go)

    async def keep(self, slot: Slot) -> bool:
        """Freeze an idle sandbox, to be closed for room, if it is a last way; False if it could not be frozen."""
        if (needed := self._needed(slot)) is None:
            return True
        # In a task of its own: if the caller gives up waiting for room, the freeze must not end with it, because a
        # freeze that is interrupted closes its sandbox.
        return await asyncio.shield(self._freezes.spawn("keep", self._freeze(slot, *needed), awaited=True))

    async def drain(self, *, within_s: float) -> None:
        """Wait for the freezes whose callers gave up, and end those that take longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._freezes.wait()
        await self._freezes.end()

    def _needed(self, slot: Slot) -> tuple[Tree, Node] | None:
        """Return the tree and the node of a sandbox if it may be all that is left of a state that a rollout needs."""
        node = slot.position
        # A warm fork was made by a replay or a snapshot, so there is another way.
        if slot.warm or not isinstance(node, Node):
            return None
        tree = next((tree for tree in self._trees if tree.nodes.get(node.id) is node), None)
        return (tree, node) if tree is not None and self._value.is_last_way(node, tree) else None

    async def _freeze(self, slot: Slot, tree: Tree, node: Node) -> bool:
        """Freeze an idle sandbox; return whether its node has a snapshot now."""
        if not self._value.can_freeze(node) or slot.state is not SandboxState.IDLE:
            return False
        if not await self._pool.lease(slot, node, slot.owner):
            return False
        try:
            return await self._capture.freeze_leased(slot, tree, node)
        except (NotFreezableError, SandboxError, OSError) as error:
            log.warning("the last sandbox of a state cannot be frozen", node=node.id, error=str(error))
            return False
