"""Last ways: a state that may exist only in an idle sandbox is frozen before this sandbox is closed.

Most states get no snapshot, because a replay is cheap. But a replay that nobody has tried may reach another state, as
with a random number. While the sandbox lives, nothing is lost. So before it is closed for being idle, on request or at
the end of the proxy, its state is frozen. States are left out that no rollout needs, or that a replay has reached.
"""

import asyncio
import time
from collections.abc import Iterable

import structlog

from proxy.execution.open_trees import OpenTrees
from proxy.execution.snapshot_value import SnapshotValue
from proxy.tree.tree import Node, Tree
from sandboxes.errors import NotFreezableError, SandboxError
from sandboxes.pool.lifecycle import SandboxState
from sandboxes.pool.pool import Pool
from sandboxes.pool.roster import Slot
from snapshots.capture import Capture

log = structlog.get_logger()


class LastWays:
    """Freezes idle sandboxes that are about to be closed."""

    def __init__(self, pool: Pool, capture: Capture[Node], value: SnapshotValue, trees: OpenTrees) -> None:
        self._pool, self._capture, self._value, self._trees = pool, capture, value, trees

    async def close(self, slots: Iterable[Slot], *, within_s: float) -> int:
        """Close idle sandboxes, after freezing those that are the last known way to a state that is needed.

        Args:
            slots: The sandboxes. Those that are not idle stay.
            within_s: How long the freezes may take together. Sandboxes beyond that are closed without one.

        Returns:
            How many were closed.
        """
        positions = {slot: slot.position for slot in slots}
        deadline = time.monotonic() + within_s
        for slot, node in positions.items():
            if not isinstance(node, Node):
                continue
            tree = next((tree for tree in self._trees if tree.nodes.get(node.id) is node), None)
            if tree is not None and self._value.is_last_way(node, tree):
                await self._freeze(slot, tree, node, deadline - time.monotonic())
        # A call may have taken a sandbox meanwhile: then it is in use, or in another state that is not kept yet.
        return await self._pool.close_where(lambda slot: positions.get(slot) is slot.position and slot in positions)

    async def _freeze(self, slot: Slot, tree: Tree, node: Node, within_s: float) -> None:
        if within_s <= 0:
            log.warning("a sandbox is closed without a snapshot, because others took too long", node=node.id)
            return
        # A warm fork was made by a replay or a snapshot, so there is another way.
        if slot.state is not SandboxState.IDLE or slot.warm or not await self._pool.lease(slot, node, slot.owner):
            return
        try:
            async with asyncio.timeout(within_s):
                await self._capture.freeze_leased(slot, tree, node)
        except (NotFreezableError, SandboxError, OSError, TimeoutError) as error:
            log.warning("the last sandbox of a state is closed without a snapshot", node=node.id, error=str(error))
