"""Removes what is known: nodes and tasks for good on request, and unused tasks from memory alone.

No rollout is answered from a forgotten node or from below it. Rollouts that are there now go on: their paths stay until
they end. The three steps are numbered below.
"""

import time
from collections import Counter
from dataclasses import dataclass

from proxy.execution.gate import Gate
from proxy.execution.open_trees import OpenTrees
from proxy.execution.tasks import Tasks
from proxy.refusals import RefusalError
from proxy.storage.journal import Journal
from proxy.storage.store import Store
from proxy.tree.task import Task, Walkers
from proxy.tree.tree import Node, Tree
from sandboxes.pool.pool import Pool
from snapshots.cache import SnapshotCache

FORGOTTEN = "it was forgotten; rollouts that stood there go on alone"
"""Why a node was set aside. The store holds this text, so a change would orphan the nodes of existing files."""


@dataclass(frozen=True, slots=True)
class ForgetResult:
    """What forgetting a node did: the names of the rollouts that were ended, and of those that are still there."""

    nodes: int  # How many nodes no other rollout comes to any more.
    ended: list[str]
    going_on: list[str]


class Forgetting:
    """Deletes nodes and tasks, and removes unused tasks from memory."""

    def __init__(
        self,
        tasks: Tasks,
        trees: OpenTrees,
        walkers: Walkers,
        store: Store,
        journal: Journal,
        cache: SnapshotCache,
        pool: Pool,
        gate: Gate | None = None,
    ) -> None:
        self._tasks, self._trees, self._walkers = tasks, trees, walkers
        self._store, self._journal, self._cache, self._pool = store, journal, cache, pool
        self._gate = gate

    async def forget(self, tree: Tree, node: Node, *, end_rollouts: bool) -> ForgetResult:
        """Forget a node, not the root (RefusalError, 409), with all below; end the rollouts there if requested."""
        if node is tree.root:
            raise RefusalError(
                409, "root", "the root cannot be forgotten. DELETE the task, or PUT it with another spec."
            )
        if node.diverged == FORGOTTEN:
            return ForgetResult(0, [], [])
        below = tree.closure(node)
        present = [rollout for rollout in self._tasks.rollouts.running.values() if rollout.node in below]
        # Ended before the deletion, so their sandboxes are released while their nodes still exist.
        if end_rollouts:
            for rollout in present:
                await self._tasks.rollouts.finish(rollout)
        # Other rollouts may have come or gone while those ended.
        staying = [rollout for rollout in self._tasks.rollouts.running.values() if rollout.node in below]
        count = len(below)
        # The journal may hold steps to nodes that are deleted below. Folded later, they would refer to nothing.
        self._journal.fold()
        # 1. Set aside: the record that leads here answers no other rollout. Saved before the deletion: a kill in
        # between leaves too much on disk, never a path with a gap.
        if staying and node.origin is not None:
            aside = tree.set_aside(node.origin, FORGOTTEN)
            self._store.records.save_set_aside(aside)
            if self._gate is not None:
                self._gate.edits.changed(tree, aside)
            # 2. Everything below goes now, except for the paths to the nodes where rollouts are. Their sandboxes can be
            # restored along these paths, also after a restart.
            await self._delete_but_paths(tree, node, {rollout.node for rollout in staying})
        elif not node.detached:
            await self._delete(tree, node)
        ended = sorted(rollout.name for rollout in present) if end_rollouts else []
        return ForgetResult(count, ended, sorted(rollout.name for rollout in staying))

    async def sweep(self) -> int:
        """Delete what was kept for rollouts that have ended since; return how many nodes were deleted."""
        deleted = 0
        for tree in self._trees:
            # 3. When the last rollout has ended, the rest goes. The tops of forgotten parts: the node on which `forget`
            # was requested, and not what came from it.
            tops = [record.target for record in tree.aside if record.target.diverged == FORGOTTEN]
            for top in [top for top in tops if top.origin is not None and top.origin in tree.aside]:
                # An earlier round of this loop deleted it together with a node above.
                if top.detached:
                    continue
                occupied = {rollout.node for rollout in self._walkers.of(tree.id)}
                # The whole closure counts: a rollout deep below needs the path from here to be restored.
                if not occupied & tree.closure(top):
                    deleted += await self._delete(tree, top)
        return deleted

    async def delete_task(self, name: str) -> None:
        """Delete a task with trees, snapshots and running rollouts. Raises RefusalError (404) if there is none."""
        task = await self._tasks.find(name)
        # A copy, because each `finish` removes the rollout from the dictionary.
        for rollout in list(task.rollouts.values()):
            await self._tasks.rollouts.finish(rollout)
        # Steps that are still in the journal must not be folded later, into rollouts that no longer exist.
        self._journal.fold()
        tree_ids = self._store.trees.sole_ids(name)
        # Trees that other tasks share stay: only the task's own are deleted.
        for tree_id in tree_ids:
            tree = self._trees.close(tree_id)
            for node in () if tree is None else tree.nodes.values():
                # A call that still runs in this tree finds its node detached and records nothing
                # (`Executor._record`).
                node.detached = True
            self._cache.drop_tree(tree_id)
        # A kill before this line leaves the task without its snapshots, which costs time and no answer.
        self._store.tasks.delete(name)
        if self._gate is not None:
            self._gate.deleted(name)
        self._tasks.close(task)
        # Sandboxes last: a close takes time, and by now no call can find the task half deleted.
        await self._close_detached()

    def close_cold(self, *, max_records: int, idle_s: float) -> int:
        """Remove what was used longest ago from memory, until `max_records` nodes and records are left.

        Returns how many trees were removed. Trees that no task in memory uses go first: a view, a proof or an eviction
        has read them back. What was used within `idle_s` stays, and so does a tree with a live sandbox.
        """
        # Counted once and reduced below: a sum over all trees for each task would be quadratic.
        size, closed, before = self._trees.size, 0, time.monotonic() - idle_s
        if size <= max_records:
            return 0
        uses = Counter(tree_id for task in self._tasks for tree_id in _trees_of(task))
        for tree in self._trees.unnamed_since(before):
            if size > max_records and not uses[tree.id] and not self._is_live(tree):
                self._trees.close(tree.id)
                size, closed = size - tree.size, closed + 1
        for task in sorted(self._tasks, key=lambda task: task.last_used_at):
            if size <= max_records or task.last_used_at > before:
                break
            own = _trees_of(task)
            if any(tree is not None and self._is_live(tree) for tree in map(self._trees.get, own)):
                continue
            # The rollouts are read back from the store, so their latest steps have to be there first.
            self._journal.fold()
            self._tasks.close(task)
            uses.subtract(own)
            # A tree may be shared: by a task with the same environment, or by a rollout that began in another one.
            for gone in [self._trees.close(tree_id) for tree_id in own if not uses[tree_id]]:
                if gone is not None:
                    size, closed = size - gone.size, closed + 1
        return closed

    def _is_live(self, tree: Tree) -> bool:
        """Return whether a sandbox stands in a tree: closed, it would have no position, and its state would be lost."""
        positions = (slot.position for slot in self._pool.roster.slots)
        return any(isinstance(node, Node) and tree.nodes.get(node.id) is node for node in positions)

    async def _delete_but_paths(self, tree: Tree, top: Node, occupied: set[Node]) -> None:
        """Delete everything below a node, except for the paths from it to the occupied nodes."""
        kept = set()
        for node in occupied:
            # Each node is walked up once, however many rollouts share the path.
            while node not in kept:
                kept.add(node)
                if node is top or node.origin is None:
                    break
                node = node.origin.source  # noqa: PLW2901 - the walk up
        # `node.detached`: an earlier deletion of this loop may have taken it along.
        for node in tree.closure(top):
            if node not in kept and not node.detached and node.origin is not None and node.origin.source in kept:
                await self._delete(tree, node)

    async def _delete(self, tree: Tree, node: Node) -> int:
        # Memory first: `forget` names what is lost, and no call can find a node while the store deletes it.
        nodes, records = tree.forget(node)
        self._store.records.forget(nodes, records)
        if self._gate is not None:
            self._gate.edits.forgot(tree, nodes, records)
        for deleted in nodes:
            # Snapshots after the store: after a kill in between, `SnapshotCache.reattach` drops those of missing
            # nodes.
            self._cache.drop(deleted)
        await self._close_detached()
        return len(nodes)

    async def _close_detached(self) -> None:
        # A leased sandbox is not idle: its call raises `RolloutGoneError`, and the lease then closes it.
        await self._pool.close_where(lambda slot: isinstance(slot.position, Node) and slot.position.detached)


def _trees_of(task: Task) -> set[int]:
    """Return the numbers of the trees that a task in memory or its running rollouts use."""
    return {task.tree.id, *(rollout.tree.id for rollout in task.rollouts.values())}
