"""Tasks and rollouts by name: read back from the store when they are first needed, created when they are new."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import takewhile

from proxy.execution.call_order import CallOrder
from proxy.execution.open_trees import OpenTrees
from proxy.execution.root_state import RootChanges
from proxy.refusals import RefusalError
from proxy.storage.errors import DamagedError
from proxy.storage.journal import Journal
from proxy.storage.store import Store
from proxy.tree.environments import EnvironmentRequest, spec_for
from proxy.tree.keys import CallKey
from proxy.tree.labels import Labels
from proxy.tree.rollout import Rollout
from proxy.tree.task import Task, Walkers
from proxy.tree.tree import Node, Tree
from sandboxes.driver import Driver
from sandboxes.pool.pool import Pool
from sandboxes.spec import EnvironmentSpec


class Tasks:
    """The tasks in memory. A task that no request names costs no memory.

    Attributes:
        rollouts: The running rollouts of all tasks in memory, by task and name.
    """

    def __init__(
        self,
        store: Store,
        journal: Journal,
        trees: OpenTrees,
        pool: Pool,
        drivers: Mapping[str, Driver],
        walkers: Walkers,
        order: CallOrder,
        default_spec: EnvironmentSpec,
        roots: RootChanges,
        *,
        any_image: bool = False,
    ) -> None:
        """Create an empty registry.

        Args:
            store: Where tasks and rollouts are written.
            journal: Holds the latest steps, which are folded before rollouts are read back.
            trees: The trees in memory.
            pool: The sandboxes that rollouts own.
            drivers: The drivers by name.
            walkers: Is kept up to date with which rollouts walk which tree.
            order: The order of each rollout's calls.
            default_spec: Environment of tasks that were given none.
            roots: Knows which trees are what their specs mean now.
            any_image: Whether an image that no driver has means the default environment, instead of an error.
        """
        self._store, self._journal, self._trees, self._pool, self._drivers = store, journal, trees, pool, drivers
        self._walkers, self._order = walkers, order
        self._default_spec, self._roots, self._any_image = default_spec, roots, any_image
        self._tasks: dict[str, Task] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self.rollouts: dict[tuple[str, str], Rollout] = {}
        # Numbers of running rollouts whose position is lost, and why, by task and name. They are no `Rollout`: nothing
        # could be executed or answered for them.
        self._lost: dict[tuple[str, str], tuple[int, str]] = {}

    def __iter__(self) -> Iterator[Task]:
        """Iterate over a copy of the tasks in memory."""
        return iter(tuple(self._tasks.values()))

    def get(self, name: str) -> Task | None:
        """Return a task that is in memory; None if it is not."""
        return self._tasks.get(name)

    async def open(self, name: str) -> Task:
        """Return a task; an unknown name becomes a task with the default environment.

        Raises:
            SpecError: The task's spec names something that cannot be used.
        """
        # Without a lock: most requests find the task in memory, and a hit must not wait for another task's opening.
        task = self._tasks.get(name)
        if task is not None:
            task.used_at = time.monotonic()
            return task
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
                    await self._read_back(name, spec or self._default_spec, key)
                # It may have been deleted meanwhile.
                if row is None or not self._store.tasks.exists(name):
                    self._store.tasks.put(name, None)
                task = self.admit(name, spec, key)
            return task

    async def find(self, name: str) -> Task:
        """Return a task that exists.

        Raises:
            RefusalError: 404, there is no task of this name.
        """
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
        """Give a task an environment. Running rollouts stay in the tree that they began in.

        Returns:
            The task, and whether it is new.

        Raises:
            SpecError: The spec names something that cannot be used; the task is unchanged.
        """
        async with self._opening.setdefault(name, asyncio.Lock()):
            # Before anything is written: a spec that cannot be used leaves the task as it was.
            key = await self.key(spec)
            await self._read_back(name, spec, key)
            is_new = not self._store.tasks.exists(name)
            self._store.tasks.put(name, spec.model_dump_json())
            return self.admit(name, spec, key), is_new

    async def _read_back(self, name: str, spec: EnvironmentSpec, key: str) -> None:
        """Read the trees that `admit` will need, in slices: large ones would hold up the hits of all tasks."""
        current = self._store.trees.id_of(name, key, spec)
        needed = set[int]() if current is None else {current}
        if name not in self._tasks:
            rows = self._store.rollouts.of_task(name, running=True)
            needed |= {row["tree"] for row in rows if row["whole"] and not row["lost"]}
        for tree in needed:
            # `admit` meets the damage again, and says which rollouts are lost by it.
            with suppress(DamagedError):
                await self._trees.read_back(tree)

    def admit(self, name: str, spec: EnvironmentSpec | None, key: str) -> Task:
        """Put a task of the store into memory, in place of what was there.

        Args:
            name: Name of the task.
            spec: Its environment; None for the default one.
            key: Root key of the environment.
        """
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
            self._read_rollouts(task)
        return task

    def close(self, task: Task) -> None:
        """Remove a task and its rollouts from memory; the store keeps them."""
        self._lost = {key: lost for key, lost in self._lost.items() if key[0] != task.name}
        for rollout in task.rollouts.values():
            self._remove(rollout)
        self._tasks.pop(task.name, None)

    def position(self, task: Task, node_id: int) -> tuple[Tree, Node] | None:
        """Return a node with its tree, whichever of the task's trees it is in; None if it is in none.

        O(1) in the task's current tree. For another tree the store is queried, and the tree may be read back.
        """
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

        Raises:
            RefusalError: 409, the rollout runs but its position is lost. `running` and `begin` raise it too.
        """
        rollout = self.rollouts.get((task_name, name))
        if rollout is None:
            task = await self.current(await self.open(task_name))
            # Another first call may have begun the rollout while the task was opened.
            rollout = task.rollouts.get(name) or self.begin(task, name, task.tree, task.tree.root, labels=labels)
        return rollout

    async def current(self, task: Task) -> Task:
        """Return a task with the tree that its environment means now, in which new rollouts begin.

        It takes microseconds, unless the base or an archive has changed. Running rollouts stay where they are.
        """
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
        """Move a rollout that has made no call to the tree that its environment means now; return whether there is one.

        Its root state cannot be started any more, and it has seen nothing of it.
        """
        task = self._tasks.get(rollout.task)
        if task is None or rollout.calls or rollout.node is not rollout.tree.root:
            return False
        tree = self._trees.open(task.name, await self.key(rollout.tree.spec), rollout.tree.spec)
        if tree is rollout.tree or rollout.finished:
            return False
        self._store.rollouts.move(rollout.id, tree.id, tree.root.id)
        self._walkers.discard(rollout)
        rollout.tree, rollout.node = tree, tree.root
        self._walkers.add(rollout)
        return True

    async def running(self, task_name: str, name: str) -> Rollout | None:
        """Return the running rollout of this name; None if there is none."""
        task = await self.open(task_name)
        self._require_position(task_name, name)
        return task.rollouts.get(name)

    async def dismiss(self, task_name: str, name: str) -> bool:
        """End a rollout whose position is lost, so that its name is free; return whether there was one."""
        if not self._store.tasks.exists(task_name):
            return False
        await self.open(task_name)
        number, _ = self._lost.pop((task_name, name), (0, ""))
        if number:
            self._store.rollouts.finish(number)
        return bool(number)

    async def open_rollout(
        self,
        task_name: str,
        name: str,
        parent: str = "",
        environment: EnvironmentRequest | None = None,
        labels: Labels | None = None,
    ) -> Rollout:
        """Return the running rollout of this name, or begin one.

        Args:
            task_name: Name of the task.
            name: Name of the rollout.
            parent: Name of a running rollout at whose node the new one begins; empty for the root.
            environment: The environment that the client requests; None for the task's own. Any other environment
                has its own tree. Ignored with a parent.
            labels: The labels of a rollout that begins; None for none.

        Raises:
            RefusalError: 404, there is no such parent or image; 400, there can be no such environment.
            SpecError: The environment names something that cannot be used.
        """
        if parent:
            task = await self.open(task_name)
            self._require_position(task_name, parent)
            source = task.rollouts.get(parent)
            if source is None:
                raise RefusalError(404, "no-such-rollout", f"there is no running rollout {parent!r} to fork from.")
            # No await between the look-up of the parent and the begin: the parent is still at that node.
            return self.begin(task, name, source.tree, source.node, labels=labels)
        running = self.rollouts.get((task_name, name))
        if environment is None or running is not None:
            return running or await self.rollout(task_name, name, labels)
        task = await self.open(task_name)
        own_spec = None if task.origin is None else task.spec
        spec = spec_for(environment, own_spec, self._default_spec, self._drivers.keys(), any_image=self._any_image)
        key = await self.key(spec)
        # Another first request may have begun the rollout meanwhile.
        tree = self._trees.open(task_name, key, spec)
        return task.rollouts.get(name) or self.begin(task, name, tree, tree.root, labels=labels)

    def begin(
        self, task: Task, name: str, tree: Tree, node: Node, token: str = "", labels: Labels | None = None
    ) -> Rollout:
        """Begin a rollout at a node.

        Args:
            task: Its task.
            name: Its name.
            tree: The tree that it walks.
            node: The node that it begins at.
            token: The token that stands for the rollout; empty for none. Only its digest is kept.
            labels: Its labels; None for none.

        Raises:
            RefusalError: 409, a rollout of this name is running.
        """
        self._require_position(task.name, name)
        if name in task.rollouts:
            raise RefusalError(
                409,
                "rollout-exists",
                f"rollout {name!r} of {task.name!r} is running. Finish it, or choose another name.",
            )
        # The store first: a rollout that only memory knows would be lost with its steps.
        number = self._store.rollouts.create(task.name, name, tree.id, node.id, token, labels)
        rollout = Rollout(number, name, task.name, tree, node, cached=tree.spec.cache == "always")
        rollout.begin(time.monotonic())
        self._add(task, rollout)
        return rollout

    async def finish(self, rollout: Rollout) -> None:
        """End a rollout. Its name is free again, and other rollouts may use its sandbox if their records may."""
        # Set before anything awaits: a call that waits for its turn sees it and gives up (`Step._answer`).
        rollout.finished = True
        self._store.rollouts.finish(rollout.id)
        self._remove(rollout)
        # The task may have been removed from memory while the rollout's last call ran.
        task = self._tasks.get(rollout.task)
        if task is not None:
            task.rollouts.pop(rollout.name, None)
        # A rollout that shares nothing leaves private state in its sandbox, which is closed and not lent on.
        if rollout.cached:
            await self._pool.release_owner(rollout.id)
        else:
            await self._pool.close_where(lambda slot: slot.owner == rollout.id)

    async def finish_in_turn(self, rollout: Rollout) -> None:
        """End a rollout after its call in flight, if it has not ended by then."""
        # In turn: a call in flight would otherwise take its step in a rollout that has ended.
        async with self._order.hold(rollout):
            if not rollout.finished:
                await self.finish(rollout)

    async def finish_unused(self, idle_s: float) -> int:
        """End the rollouts without a call for so many seconds; return how many ended."""
        self._journal.fold()
        ended = 0
        for number, task, name, calls in self._store.rollouts.unused(time.time() - idle_s):
            rollout = self.rollouts.get((task, name))
            if rollout is None:
                # Its task is not in memory.
                self._store.rollouts.finish(number)
            elif rollout.id != number or rollout.calls != calls or rollout.waiting:
                # It made a call while others were ended, or a call is running.
                continue
            else:
                await self.finish(rollout)
            ended += 1
        return ended

    def _read_rollouts(self, task: Task) -> None:
        """Read the running rollouts back, each at the node that its last step led to."""
        # The journal holds the latest steps; the store lags until it is folded.
        self._journal.fold()
        for row in self._store.rollouts.of_task(task.name, running=True):
            # Not the task's current tree: an older rollout stays in the tree that it began in.
            tree, node, why = None, None, row["lost"] if row["whole"] else "its row in the store is damaged"
            if not why:
                try:
                    tree = self._trees.load(row["tree"])
                    node = tree.nodes.get(row["node"])
                except DamagedError as error:
                    why = str(error)
            if tree is None or node is None:
                # Never silently anew: its agent believes in a state that this proxy cannot name.
                why = why or f"its state n{row['node']} was forgotten, or is damaged in the store"
                self._lost[task.name, row["name"]] = row["id"], why
                self._store.rollouts.lose({row["id"]}, why)
                continue
            cached = tree.spec.cache == "always"
            rollout = Rollout(row["id"], row["name"], task.name, tree, node, cached=cached, calls=row["calls"])
            rollout.polled_keys, rollout.arrived_at = self._polled_keys(rollout), time.monotonic()
            rollout.begin(rollout.arrived_at)
            self._add(task, rollout)

    def _require_position(self, task: str, name: str) -> None:
        """Refuse a rollout whose position is lost.

        Raises:
            RefusalError: 409.
        """
        _, why = self._lost.get((task, name), (0, ""))
        if why:
            raise RefusalError(
                409,
                "rollout-lost",
                f"the state of rollout {name!r} is not known any more: {why}. Finish it (DELETE), and begin another.",
            )

    def _polled_keys(self, rollout: Rollout) -> set[CallKey]:
        """Return the keys of observations that a rollout has made since it arrived at its node."""
        # Only beside running processes does a repeated call have a key of its own.
        if rollout.node.state is not None:
            return set()
        here = {record.id: record.key for record in rollout.node.records.values() if record.observation}
        # One more than could be here, so that the first call elsewhere ends the run.
        latest = self._store.rollouts.latest_records(rollout.id, len(here) + 1)
        return {here[number] for number in takewhile(here.__contains__, latest)}

    def _add(self, task: Task, rollout: Rollout) -> None:
        # Three indexes: by task, for the hit path, and by tree. They change together, without an await.
        task.rollouts[rollout.name] = rollout
        self.rollouts[task.name, rollout.name] = rollout
        self._walkers.add(rollout)

    def _remove(self, rollout: Rollout) -> None:
        self.rollouts.pop((rollout.task, rollout.name), None)
        self._walkers.discard(rollout)
