"""Tasks by name, and where their rollouts begin: read back from the store when needed, created when they are new."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial

from proxy.execution.gate import Gate
from proxy.execution.open_trees import OpenTrees
from proxy.execution.rollouts import Rollouts
from proxy.execution.root_state import RootChanges
from proxy.refusals import RefusalError
from proxy.shares import Share
from proxy.storage.errors import DamagedError
from proxy.storage.store import Store
from proxy.tree.environments import EnvironmentRequest, spec_for
from proxy.tree.labels import Labels
from proxy.tree.rollout import Rollout
from proxy.tree.task import Task
from proxy.tree.tree import Node, Tree
from sandboxes.driver import Driver
from sandboxes.spec import EnvironmentSpec


class Tasks:
    """The tasks in memory, and their running rollouts. A task that no request names costs no memory."""

    def __init__(
        self,
        store: Store,
        rollouts: Rollouts,
        trees: OpenTrees,
        drivers: Mapping[str, Driver],
        default_spec: EnvironmentSpec,
        roots: RootChanges,
        *,
        runs_images: bool = True,
        any_image: bool = False,
        gate: Gate | None = None,
        share: Share | None = None,
    ) -> None:
        """Create an empty registry. Tasks that were given no environment have the default one.

        `runs_images` says whether the image that a client names is run. If not, `any_image` says that an image means
        the default environment, instead of an error. `share` is None for all tasks.
        """
        self._store, self.rollouts, self._trees, self._drivers = store, rollouts, trees, drivers
        self._default_spec, self._roots, self._gate = default_spec, roots, gate
        self._runs_images, self._any_image = runs_images, any_image
        self._share = share
        self._tasks: dict[str, Task] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    def __iter__(self) -> Iterator[Task]:
        """Iterate over a copy of the tasks in memory."""
        return iter(tuple(self._tasks.values()))

    def get(self, name: str) -> Task | None:
        """Return a task that is in memory; None if it is not."""
        return self._tasks.get(name)

    async def open(self, name: str, *, whole: bool = True) -> Task:
        """Return a task; an unknown name becomes one with the default environment. Raises SpecError.

        Only calls of rollouts need no `whole` trees: those that are known are answered while a tree is read back.
        """
        # Without a lock: most requests find the task in memory, and a hit must not wait for another task's opening.
        task = self._tasks.get(name)
        if task is None:
            task = await self._open(name, whole=whole)
        task.used_at = time.monotonic()
        if whole and not self._trees.are_whole:
            for tree in {task.tree, *(rollout.tree for rollout in task.rollouts.values())}:
                await self._trees.whole(tree)
        return task

    async def _open(self, name: str, *, whole: bool) -> Task:
        self._require(name)
        # One opening for each name: two would read the rollouts twice, and each rollout would exist as two objects.
        async with self._opening.setdefault(name, asyncio.Lock()):
            # Look again: another request may have opened the task while this one waited for the lock.
            task = self._tasks.get(name)
            if task is None:
                row = self._store.tasks.get(name)
                spec = EnvironmentSpec.model_validate_json(row["spec"]) if row and row["spec"] else None
                # Awaits: a driver may have to digest a directory. The lock keeps others from opening the task
                # meanwhile.
                key = await self.key(spec or self._default_spec)
                # Only after the spec has proved usable, so that a failed request leaves no task behind.
                if row is not None:
                    await self._read_back(name, spec or self._default_spec, key, whole=whole)
                # It may have been deleted meanwhile.
                if row is None or not self._store.tasks.exists(name):
                    self._put(name, None)
                task = self.admit(name, spec, key)
            return task

    async def find(self, name: str) -> Task:
        """Return a task that exists. Raises RefusalError (404) if there is none of this name."""
        if name not in self._tasks and self._store.tasks.get(name) is None:
            raise RefusalError(404, "no-such-task", f"there is no task {name!r}. PUT it, or send it a first call.")
        return await self.open(name)

    async def key(self, spec: EnvironmentSpec) -> str:
        """Return the key of the tree that a spec means now; see `tree_key`."""
        return await self._roots.key(spec)

    def spec(self, name: str) -> EnvironmentSpec:
        """Return a task's environment without opening the task; the default one for an unknown name."""
        task = self._tasks.get(name)
        if task is not None:
            return task.spec
        row = self._store.tasks.get(name)
        return EnvironmentSpec.model_validate_json(row["spec"]) if row and row["spec"] else self._default_spec

    async def put(self, name: str, spec: EnvironmentSpec) -> tuple[Task, bool]:
        """Give a task an environment, for new rollouts, or raise SpecError; return it and whether it is new."""
        self._require(name)
        async with self._opening.setdefault(name, asyncio.Lock()):
            # Before anything is written: a spec that cannot be used leaves the task as it was.
            key = await self.key(spec)
            await self._read_back(name, spec, key)
            is_new = not self._store.tasks.exists(name)
            self._put(name, spec.model_dump_json())
            return self.admit(name, spec, key), is_new

    def _require(self, name: str) -> None:
        """Raise RefusalError if another member of the cluster owns a task, or another worker has it."""
        if self._gate is not None:
            self._gate.require(name)
        if self._share is not None:
            self._share.require(name)

    def _put(self, name: str, spec: str | None) -> None:
        if self._gate is not None:
            # Another member may have taken it over meanwhile.
            self._gate.require(name)
        self._store.tasks.put(name, spec)
        if self._gate is not None:
            self._gate.task_put(name)

    async def _read_back(self, name: str, spec: EnvironmentSpec, key: str, *, whole: bool = True) -> None:
        """Read the trees that `admit` will need, in slices: large ones would hold up the hits of all tasks.

        Without `whole`, return as soon as known calls of the running rollouts can be answered.
        """
        current = self._store.trees.id_of(name, key, spec)
        # Where the rollouts are, by tree.
        needed: dict[int, set[int]] = {} if current is None else {current: set()}
        if name not in self._tasks:
            # The journal has their last steps.
            self.rollouts.fold()
            for tree, node in self._store.rollouts.positions_of(name):
                needed.setdefault(tree, set()).add(node)
        for tree, nodes in needed.items():
            # `admit` meets the damage again, and says which rollouts are lost by it.
            with suppress(DamagedError):
                # In a cluster, the log has each step before its answer is sent, and its steps name records by number.
                if whole or self._gate is not None or not self._trees.begin(tree, nodes, partial(self._give_up, tree)):
                    await self._trees.read_back(tree)

    def _give_up(self, tree: int) -> None:
        """Remove the tasks from memory whose tree could not be read: their next request opens them again."""
        for task in self:
            if any(used.id == tree for used in (task.tree, *(rollout.tree for rollout in task.rollouts.values()))):
                self.close(task)

    def admit(self, name: str, spec: EnvironmentSpec | None, key: str) -> Task:
        """Put a task of the store into memory, with its environment (None for the default one) and its root key."""
        row = self._store.tasks.get(name)
        assert row is not None
        spec_now = spec or self._default_spec
        tree = self._trees.open(name, key, spec_now)
        known = self._tasks.get(name)
        origin = None if spec is None else spec.model_dump_json()
        # The same dictionary: rollouts that run stay in the task, each in the tree that it began in.
        rollouts = known.rollouts if known else {}
        task = Task(name, spec_now, tree, origin, row["created_at"], time.monotonic(), rollouts)
        self._tasks[name] = task
        # Only once: a task that is in memory knows its rollouts better than the store, which lags by the journal.
        if known is None:
            self.rollouts.read_back(task)
        return task

    def close(self, task: Task) -> None:
        """Remove a task and its rollouts from memory; the store keeps them."""
        self.rollouts.close(task)
        self._tasks.pop(task.name, None)

    def position(self, task: Task, node_id: int) -> tuple[Tree, Node] | None:
        """Return a node with its tree, whichever of the task's trees it is in; None if it is in none."""
        # Node ids are unique in the store and not only in a tree, so the id alone finds the tree.
        node = task.tree.nodes.get(node_id)
        if node is not None:
            return task.tree, node
        tree_id = self._store.trees.id_with_node(task.name, node_id)
        if tree_id is None:
            return None
        tree = self._trees.load(tree_id)
        node = tree.nodes.get(node_id)
        return None if node is None else (tree, node)

    async def rollout(self, task_name: str, name: str, labels: Labels | None = None) -> Rollout:
        """Return the running rollout of this name; a new one begins at the root of its task's tree.

        Raises RefusalError (409), as `running` does, if the rollout runs but its position is lost.
        """
        rollout = self.rollouts.running.get((task_name, name))
        if rollout is None:
            task = await self.current(await self.open(task_name, whole=False))
            # Another first call may have begun the rollout while the task was opened.
            rollout = task.rollouts.get(name) or self.rollouts.begin(
                task, name, task.tree, task.tree.root, labels=labels
            )
        return rollout

    async def current(self, task: Task) -> Task:
        """Return a task with the tree that its environment means now, in which new rollouts begin."""
        if await self._roots.is_usable(task.tree):
            return task
        async with self._opening.setdefault(task.name, asyncio.Lock()):
            # The task may have got another environment, or have left the memory, while this one waited.
            known = self._tasks.get(task.name, task)
            key = await self.key(known.spec)
            if self._store.tasks.get(task.name) is None or key == known.tree.key:
                return known
            return self.admit(task.name, None if known.origin is None else known.spec, key)

    async def renew(self, rollout: Rollout) -> bool:
        """Move a rollout that has seen nothing of its root state, now lost, to today's tree; return if there is one."""
        task = self._tasks.get(rollout.task)
        if task is None or rollout.calls or rollout.node is not rollout.tree.root:
            return False
        tree = self._trees.open(task.name, await self.key(rollout.tree.spec), rollout.tree.spec)
        if tree is rollout.tree or rollout.finished:
            return False
        self.rollouts.move(rollout, tree)
        return True

    async def running(self, task_name: str, name: str) -> Rollout | None:
        """Return the running rollout of this name; None if there is none."""
        task = await self.open(task_name)
        self.rollouts.require_position(task_name, name)
        return task.rollouts.get(name)

    async def dismiss(self, task_name: str, name: str) -> bool:
        """End a rollout whose position is lost, so that its name is free; return whether there was one."""
        if not self._store.tasks.exists(task_name):
            return False
        await self.open(task_name)
        return self.rollouts.finish_lost(task_name, name)

    async def open_rollout(
        self,
        task_name: str,
        name: str,
        parent: str = "",
        environment: EnvironmentRequest | None = None,
        labels: Labels | None = None,
    ) -> Rollout:
        """Return the running rollout of this name, or begin one: at the node of a running parent, or at the root.

        `environment` is the client's, with a tree of its own; None for the task's, or with a parent. Raises
        RefusalError if there is no such parent or image (404) or environment (400), and SpecError.
        """
        if parent:
            task = await self.open(task_name)
            self.rollouts.require_position(task_name, parent)
            source = task.rollouts.get(parent)
            if source is None:
                raise RefusalError(404, "no-such-rollout", f"there is no running rollout {parent!r} to fork from.")
            # No await between the look-up of the parent and the begin: the parent is still at that node.
            return self.rollouts.begin(task, name, source.tree, source.node, labels=labels)
        running = self.rollouts.running.get((task_name, name))
        if environment is None or running is not None:
            return running or await self.rollout(task_name, name, labels)
        task = await self.open(task_name)
        own_spec = None if task.origin is None else task.spec
        spec = spec_for(
            environment, own_spec, self._default_spec, runs_images=self._runs_images, any_image=self._any_image
        )
        key = await self.key(spec)
        # Another first request may have begun the rollout meanwhile.
        tree = self._trees.open(task_name, key, spec)
        return task.rollouts.get(name) or self.rollouts.begin(task, name, tree, tree.root, labels=labels)
