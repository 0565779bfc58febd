"""Imported trees: written as drafts, a piece at a time, and then given to a task."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from proxy.execution.gate import Gate
from proxy.execution.open_trees import OpenTrees
from proxy.execution.tasks import Tasks
from proxy.refusals import RefusalError
from proxy.storage.drafts import Draft
from proxy.storage.journal import Journal
from proxy.storage.store import Store
from proxy.transfer.format import BundleError, Part
from proxy.transfer.schema import BundleLine, NodeLine
from proxy.tree.tree import Tree
from sandboxes.calls import ResourceUse
from sandboxes.errors import SpecError
from sandboxes.spec import EnvironmentSpec
from snapshots.cache import SnapshotCache


def write_draft(store: Store, draft: Draft, items: Iterable[Part | BundleLine]) -> None:
    """Write a checked bundle in one transaction; what an item names was written, or is among the items before."""
    with store.database.transaction() as execute:
        for item in items:
            if isinstance(item, Part):
                packed = item.kind == "zblob"
                store.blobs.insert_stored(execute, item.digest, packed=packed, data=item.stored)
            elif isinstance(item, NodeLine):
                exact, content = (None if text is None else bytes.fromhex(text) for text in (item.exact, item.content))
                store.drafts.add_node(execute, draft, item.node, exact, content, pinned=item.pinned)
            else:
                call, upload, answer = (
                    0 if digest is None else store.blobs.number_of(bytes.fromhex(digest))
                    for digest in (item.call, item.upload, item.answer)
                )
                store.drafts.add_record(
                    execute, draft, (item.source, item.target), bytes.fromhex(item.key), (call, upload, answer),
                    effect=item.effect, seconds=item.seconds, recorded_at=item.recorded_at,
                    reproducible=item.reproducible, age_s=item.age_s,
                    resources=ResourceUse(item.cpu_s, item.peak_bytes, item.read_bytes, item.written_bytes),
                )  # fmt: skip


class Adopter:
    """Gives imported trees to tasks. A tree is only adopted where the task has none, or an empty one."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        tasks: Tasks,
        trees: OpenTrees,
        cache: SnapshotCache,
        gate: Gate | None = None,
    ) -> None:
        self._store, self._journal, self._tasks, self._trees, self._cache = store, journal, tasks, trees, cache
        self._gate = gate

    async def require_room(self, name: str, spec: EnvironmentSpec, key: str, *, beside: bool) -> int | None:
        """Return a task's empty tree under a root key, if any. Raises RefusalError (409) if its tree is used."""
        if self._store.tasks.get(name) is not None:
            task = await self._tasks.open(name)
            if not beside and task.tree.key != key:
                raise RefusalError(
                    409,
                    "task-exists",
                    f"task {name!r} has another root state. DELETE it, or import under another name.",
                )
        known = self._store.trees.id_of(name, key, spec)
        if known is None:
            return None
        users = [rollout.name for rollout in self._tasks.rollouts.running.values() if rollout.tree.id == known]
        users += [task.name for task in self._tasks if task.tree.id == known and task.name != name]
        if users or not self._store.trees.is_empty(known):
            raise RefusalError(
                409, "tree-exists",
                f"calls of this root state are recorded here, or it is in use: {', '.join(sorted(users)[:5])}. "
                "DELETE the tasks that have it first.",
            )  # fmt: skip
        return known

    @asynccontextmanager
    async def restored(self, tree_id: int) -> AsyncIterator[Tree]:
        """Yield a restored store's tree, in memory for the block. Raises BundleError, or SpecError for a bad spec."""
        if not self._store.trees.exists(tree_id):
            raise BundleError(f"the store has no tree {tree_id}.")
        tree = self._trees.load(tree_id)
        try:
            if await self._tasks.key(tree.spec) != tree.key:
                raise SpecError("its environment means another root state here than in the backup.")
            yield tree
        finally:
            self._trees.close(tree_id)

    async def adopt(self, name: str, spec: EnvironmentSpec, key: str, draft: Draft, *, beside: bool) -> Tree:
        """Publish a draft as a tree of a task, and return it, in memory; see `require_room` for the arguments.

        With beside, an existing task keeps its environment, and the tree serves rollouts that ask for this one. Raises
        RefusalError (409) if the task has no room for the tree any more.
        """
        if self._gate is not None:
            await self._gate.edits.importing(name, draft.tree)
        instead = await self.require_room(name, spec, key, beside=beside)
        empty = None if instead is None else self._store.copies.tree(instead)
        if self._gate is not None:
            # It may have been taken over meanwhile.
            self._gate.require(name)
        self._journal.fold()
        self._store.drafts.publish(draft, name, key, spec, instead=instead)
        tree = self._put(name, spec, key, instead, beside=beside)
        if self._gate is not None:
            self._gate.edits.imported(name, tree, None if empty is None else empty.root)
        return tree

    def _put(self, name: str, spec: EnvironmentSpec, key: str, instead: int | None, *, beside: bool) -> Tree:
        replaced = None if instead is None else self._trees.close(instead)
        if replaced is not None:
            replaced.root.detached = True
            self._cache.drop_tree(replaced.id)
        if not beside:
            self._store.tasks.put(name, spec.model_dump_json())
            return self._tasks.admit(name, spec, key).tree
        if self._store.tasks.get(name) is None:
            self._store.tasks.put(name, None)
        task = self._tasks.get(name)
        if task is not None and task.tree is replaced:
            # The empty tree was the task's own: the task must see the new one instead.
            return self._tasks.admit(name, None if task.origin is None else task.spec, key).tree
        return self._trees.open(name, key, spec)
