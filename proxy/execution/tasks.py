"""Tasks and rollouts by name: read back from the store when they are first asked for, made when they are new."""

import asyncio
import secrets
import time
from collections.abc import Mapping
from itertools import takewhile

from proxy.execution.call_order import CallOrder
from proxy.execution.root_state import tree_key
from proxy.refusals import RefusalError
from proxy.storage.drafts import Draft
from proxy.storage.journal import Journal
from proxy.storage.store import Store
from proxy.tree.environments import EnvironmentRequest, spec_for
from proxy.tree.keys import CallKey
from proxy.tree.rollout import Rollout
from proxy.tree.task import Task, Walkers
from proxy.tree.tree import Node, Tree
from sandboxes.driver import Driver
from sandboxes.pool.pool import Pool
from sandboxes.spec import EnvironmentSpec
from snapshots.cache import SnapshotCache

FORGOTTEN = "it was forgotten; rollouts that stood there go on alone"


class Tasks:
    """What is open in this process. A task that nobody asks for costs no memory until somebody does."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        cache: SnapshotCache,
        pool: Pool,
        drivers: Mapping[str, Driver],
        walkers: Walkers,
        order: CallOrder,
        default_spec: EnvironmentSpec,
        *,
        any_image: bool = False,
    ) -> None:
        self._store, self._journal, self._cache, self._pool, self._drivers = store, journal, cache, pool, drivers
        self._walkers, self._order = walkers, order
        self._default_spec, self._any_image = default_spec, any_image
        self._tasks: dict[str, Task] = {}
        self._trees: dict[int, Tree] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self.rollouts: dict[tuple[str, str], Rollout] = {}

    async def open(self, name: str) -> Task:
        """Return a task; an unknown one is made, with the default spec.

        Raises:
            SpecError: what its spec names cannot be used.
        """
        task = self._tasks.get(name)
        if task is not None:
            task.used_at = time.monotonic()
            return task
        async with self._opening.setdefault(name, asyncio.Lock()):
            task = self._tasks.get(name)
            if task is None:
                row = self._store.tasks.get(name)
                spec = EnvironmentSpec.model_validate_json(row["spec"]) if row and row["spec"] else None
                key = await tree_key(self._drivers, spec or self._default_spec)
                if row is None:
                    self._store.tasks.put(name, None)
                task = self._admit(name, spec, key, row["created_at"] if row else time.time())
            return task

    def spec(self, name: str) -> EnvironmentSpec:
        """Return what a task's spec is, without opening it or making it."""
        task = self._tasks.get(name)
        if task is not None:
            return task.spec
        row = self._store.tasks.get(name)
        return EnvironmentSpec.model_validate_json(row["spec"]) if row and row["spec"] else self._default_spec

    async def put(self, name: str, spec: EnvironmentSpec) -> tuple[Task, bool]:
        """Give a task this spec, and say whether it is new. Rollouts that run keep the tree they began in.

        Raises:
            SpecError: what spec names cannot be used; the task stays as it was.
        """
        async with self._opening.setdefault(name, asyncio.Lock()):
            key = await tree_key(self._drivers, spec)
            row = self._store.tasks.get(name)
            self._store.tasks.put(name, spec.model_dump_json())
            task = self._admit(name, spec, key, row["created_at"] if row else time.time())
            return task, row is None

    async def find(self, name: str) -> Task:
        """Return a task that exists.

        Raises:
            Refused: 404, there is none of this name.
        """
        if name not in self._tasks and self._store.tasks.get(name) is None:
            raise RefusalError(404, "no-such-task", f"there is no task {name!r}. PUT it, or send it a first call.")
        return await self.open(name)

    async def rollout(self, task_name: str, name: str) -> Rollout:
        """Return the running rollout of this name; a new one stands at the root of its task."""
        rollout = self.rollouts.get((task_name, name))
        if rollout is None:
            task = await self.open(task_name)
            # Look again: another first call may have come in while the task was opened.
            rollout = task.rollouts.get(name) or self.begin(task, name, task.tree, task.tree.root)
        return rollout

    async def running(self, task_name: str, name: str) -> Rollout | None:
        """Return the running rollout of this name; None where none is, and then none is made."""
        task = await self.open(task_name)
        return task.rollouts.get(name)

    @property
    def size(self) -> int:
        """How many nodes and records are in memory."""
        return sum(tree.size for tree in self._trees.values())

    def running_in(self, task_name: str) -> list[Rollout]:
        """Return the rollouts of a task that run, as far as it is open."""
        task = self._tasks.get(task_name)
        return [] if task is None else list(task.rollouts.values())

    async def opened(
        self, task_name: str, name: str, parent: str = "", wanted: EnvironmentRequest | None = None
    ) -> Rollout:
        """Return the rollout of this name, or a new one: at the root, or where a running one, parent, stands.

        wanted: what its client asks for; another environment than the task's own has a tree of its own.

        Raises:
            Refused: 404, no such parent runs, or there is no such image; 400, no environment can be as wanted.
            SpecError: what is wanted cannot be used.
        """
        if wanted is not None and not parent:
            return await self._in_environment(task_name, name, wanted)
        if not parent:
            return await self.rollout(task_name, name)
        task = await self.open(task_name)
        source = task.rollouts.get(parent)
        if source is None:
            raise RefusalError(404, "no-such-rollout", f"there is no rollout {parent!r} that runs, to fork from.")
        return self.begin(task, name, source.tree, source.node)

    async def _in_environment(self, task_name: str, name: str, wanted: EnvironmentRequest) -> Rollout:
        running = self.rollouts.get((task_name, name))
        if running is not None:
            return running
        task = await self.open(task_name)
        given = None if task.origin is None else task.spec
        spec = spec_for(wanted, given, self._default_spec, self._drivers.keys(), any_image=self._any_image)
        key = await tree_key(self._drivers, spec)
        # Look again: another first request may have come in meanwhile.
        tree = self._tree(task_name, key, spec)
        return task.rollouts.get(name) or self.begin(task, name, tree, tree.root)

    def begin(self, task: Task, name: str, tree: Tree, node: Node) -> Rollout:
        """Start a rollout at node.

        Raises:
            Refused: 409, one of this name is running.
        """
        if name in task.rollouts:
            raise RefusalError(
                409,
                "rollout-exists",
                f"rollout {name!r} of {task.name!r} is running. Finish it, or choose another name.",
            )
        token = "fp_" + secrets.token_urlsafe(24)
        number = self._store.rollouts.create(task.name, name, tree.id, node.id, token)
        rollout = Rollout(number, name, task.name, tree, node, cached=tree.spec.cache == "always")
        rollout.used_at = time.monotonic()
        self._enter(task, rollout)
        return rollout

    async def finish(self, rollout: Rollout) -> None:
        """End a rollout; its sandbox is left to others where they may use it, its record stays. Its name is free."""
        rollout.finished = True
        self._store.rollouts.finish(rollout.id)
        self._leave(rollout)
        task = self._tasks.get(rollout.task)
        if task is not None:
            task.rollouts.pop(rollout.name, None)
        if rollout.cached:
            await self._pool.release_owner(rollout.id)
        else:
            await self._pool.close_where(lambda slot: slot.owner == rollout.id)

    async def finish_in_turn(self, rollout: Rollout) -> None:
        """End a rollout after its call in flight, if it has not ended by then."""
        async with self._order.hold(rollout):
            if not rollout.finished:
                await self.finish(rollout)

    async def delete(self, name: str) -> None:
        """Delete a task with all that is known of it; its running rollouts end."""
        task = await self.find(name)
        for rollout in list(task.rollouts.values()):
            await self.finish(rollout)
        # Steps that are still in the journal must not come back for rollouts that are gone.
        self._journal.fold()
        gone = self._store.trees.sole_ids(name)
        for tree in [self._trees[tree_id] for tree_id in gone if tree_id in self._trees]:
            for node in tree.nodes.values():
                node.detached = True
            del self._trees[tree.id]
        for tree_id in gone:
            self._cache.drop_tree(tree_id)
        self._store.tasks.delete(name)
        del self._tasks[name]
        await self._pool.close_where(lambda slot: isinstance(slot.position, Node) and slot.position.detached)

    async def forget(self, tree: Tree, node: Node, *, end_rollouts: bool) -> tuple[int, list[str], list[str]]:
        """Forget node and what came from it; return how many nodes no other rollout will come to, and which rollouts
        that stood there ended, and go on.

        Those that go on keep the states that they came through, for themselves alone; what else is there goes at once,
        and the rest when the last of them has ended (`sweep_forgotten`).

        Raises:
            Refused: 409, node is the root.
        """
        if node is tree.root:
            raise RefusalError(
                409, "root", "the root cannot be forgotten. DELETE the task, or PUT it with another spec."
            )
        if node.diverged == FORGOTTEN:
            return 0, [], []
        gone = tree.closure(node)
        there = [rollout for rollout in self.rollouts.values() if rollout.node in gone]
        if end_rollouts:
            for rollout in there:
                await self.finish(rollout)
        # Others may have come or gone while those ended.
        staying = [rollout for rollout in self.rollouts.values() if rollout.node in gone]
        count = len(gone)
        self._journal.fold()
        if staying and node.origin is not None:
            lost = tree.set_aside(node.origin, FORGOTTEN)
            self._store.records.save_set_aside(lost)
            await self._forget_but(tree, node, {rollout.node for rollout in staying})
        elif not node.detached:
            await self._forget(tree, node)
        ended = sorted(rollout.name for rollout in there) if end_rollouts else []
        return count, ended, sorted(rollout.name for rollout in staying)

    async def sweep_forgotten(self) -> int:
        """Forget for good what was kept for rollouts that have ended since; return how many nodes went."""
        swept = 0
        for tree in list(self._trees.values()):
            tops = [record.target for record in tree.aside if record.target.diverged == FORGOTTEN]
            for top in [top for top in tops if top.origin is not None and top.origin in tree.aside]:
                if top.detached:
                    continue
                standing = {rollout.node for rollout in self._walkers.of(tree.id)}
                if not standing & tree.closure(top):
                    swept += await self._forget(tree, top)
        return swept

    async def _forget_but(self, tree: Tree, top: Node, standing: set[Node]) -> None:
        """Forget what came from top but for the ways to the nodes where rollouts stand."""
        ways = set()
        for node in standing:
            while node not in ways:
                ways.add(node)
                if node is top or node.origin is None:
                    break
                node = node.origin.source  # noqa: PLW2901 - the walk up
        for node in tree.closure(top):
            if node not in ways and not node.detached and node.origin is not None and node.origin.source in ways:
                await self._forget(tree, node)

    async def _forget(self, tree: Tree, node: Node) -> int:
        nodes, records = tree.forget(node)
        self._store.records.forget(nodes, records)
        for lost in nodes:
            self._cache.drop(lost)
        await self._pool.close_where(lambda slot: isinstance(slot.position, Node) and slot.position.detached)
        return len(nodes)

    async def require_room(self, name: str, spec: EnvironmentSpec, key: str, *, beside: bool) -> int | None:
        """Return the id of the empty tree that task has for this root state; None where it has none.

        beside: it may be another tree than that of the task's spec.

        Raises:
            Refused: 409, the task has another spec, or calls are recorded there, or rollouts run.
        """
        if self._store.tasks.get(name) is not None:
            task = await self.open(name)
            if not beside and task.tree.key != key:
                raise RefusalError(
                    409,
                    "task-exists",
                    f"task {name!r} has another root state. DELETE it, or import under another name.",
                )
        known = self._store.trees.id_of(name, key, spec)
        if known is None:
            return None
        others = [rollout.name for rollout in self.rollouts.values() if rollout.tree.id == known]
        others += [task.name for task in self._tasks.values() if task.tree.id == known and task.name != name]
        if others or not self._store.trees.is_empty(known):
            raise RefusalError(
                409, "tree-exists",
                f"calls of this root state are recorded here, or somebody uses it: {', '.join(sorted(others)[:5])}. "
                "DELETE the tasks that have it first.",
            )  # fmt: skip
        return known

    async def adopt(self, name: str, spec: EnvironmentSpec, key: str, draft: Draft, *, beside: bool) -> Tree:
        """Make a tree that was written piece by piece the one of task; see `require_room`.

        beside: the task keeps its spec; the tree is that of the rollouts that ask for this environment.

        Raises:
            Refused: 409, there is no room for it any more.
        """
        async with self._opening.setdefault(f"import {name}", asyncio.Lock()):
            instead = await self.require_room(name, spec, key, beside=beside)
            self._journal.fold()
            self._store.drafts.publish(draft, name, key, spec, instead=instead)
            gone = self._trees.pop(instead or 0, None)
            if gone is not None:
                gone.root.detached = True
                self._cache.drop_tree(gone.id)
            row = self._store.tasks.get(name)
            created_at = row["created_at"] if row else time.time()
            if not beside:
                self._store.tasks.put(name, spec.model_dump_json())
                return self._admit(name, spec, key, created_at).tree
            known = self._tasks.get(name)
            if row is None:
                self._store.tasks.put(name, None)
            if known is not None and known.tree is gone:
                return self._admit(name, None if known.origin is None else known.spec, key, created_at).tree
            return self._tree(name, key, spec)

    def place(self, task: Task, node_id: int) -> tuple[Tree, Node] | None:
        """Return a node of task with its tree, whichever of the task's it is; None where none has it.

        In the current tree it is found at once. Else the store is asked once, and the tree read back if it is not open.
        """
        node = task.tree.nodes.get(node_id)
        if node is not None:
            return task.tree, node
        tree_id = self._store.trees.id_with_node(task.name, node_id)
        if tree_id is None:
            return None
        tree = self.tree(tree_id)
        node = tree.nodes.get(node_id)
        return None if node is None else (tree, node)

    def node(self, tree_id: int, node_id: int) -> Node | None:
        """Return a node of any tree, reading the tree back where it is not open; None where it is gone."""
        if tree_id not in self._trees and not self._store.trees.exists(tree_id):
            return None
        return self.tree(tree_id).nodes.get(node_id)

    def in_memory(self, tree_id: int) -> Tree | None:
        """Return a tree that is open; None for one that would have to be read back."""
        return self._trees.get(tree_id)

    def tree(self, tree_id: int) -> Tree:
        """Return a tree that the store has, reading it back where it is not open."""
        known = self._trees.get(tree_id)
        return self._own(self._store.trees.load(tree_id)) if known is None else known

    def close_cold(self, *, most: int, idle_s: float) -> int:
        """Let go of the tasks used longest ago until at most `most` nodes and records are in memory; return how many.

        Whatever they are is in the store, and is read back when somebody asks. One that was used within idle_s seconds,
        or has a live sandbox, stays.
        """
        closed = 0
        size = sum(tree.size for tree in self._trees.values())
        for task in sorted(self._tasks.values(), key=lambda task: task.last_used_at):
            if size <= most or time.monotonic() - task.last_used_at < idle_s:
                break
            elsewhere = {
                tree_id for other in self._tasks.values() if other is not task for tree_id in self._used(other)
            }
            used = self._store.trees.ids_of(task.name)
            trees = [self._trees[i] for i in used if i in self._trees and i not in elsewhere]
            nodes = {node for tree in trees for node in tree.nodes.values()}
            if any(slot.position in nodes for slot in self._pool.roster.slots):
                continue
            self._journal.fold()
            for rollout in task.rollouts.values():
                self._leave(rollout)
            for tree in trees:
                del self._trees[tree.id]
                size -= tree.size
            del self._tasks[task.name]
            closed += 1
        return closed

    def _used(self, task: Task) -> set[int]:
        """Return the trees that an open task, or one of its running rollouts, has in memory."""
        return {task.tree.id, *(rollout.tree.id for rollout in task.rollouts.values())}

    def _admit(self, name: str, spec: EnvironmentSpec | None, key: str, created_at: float) -> Task:
        spec_now = spec or self._default_spec
        tree = self._tree(name, key, spec_now)
        known = self._tasks.get(name)
        origin = None if spec is None else spec.model_dump_json()
        rollouts = known.rollouts if known else {}
        task = Task(name, spec_now, tree, origin, created_at, time.monotonic(), rollouts)
        self._tasks[name] = task
        if known is None:
            self._read_rollouts(task)
        return task

    def _tree(self, task: str, key: str, spec: EnvironmentSpec) -> Tree:
        """Return a task's tree under this root key, reading it back or making it where it is not open."""
        tree = self._trees.get(self._store.trees.id_of(task, key, spec) or 0)
        if tree is None:
            tree = self._own(self._store.trees.open(task, key, spec))
        if spec.shared:
            self._store.trees.share(task, tree.id)
            # Equal but for where the databases came from: the newest place is the one that is surely there.
            tree.spec = spec
        return tree

    def _read_rollouts(self, task: Task) -> None:
        self._journal.fold()
        for row in self._store.rollouts.of_task(task.name, running=True):
            tree = self.tree(row["tree"])
            node = tree.nodes.get(row["node"])
            if node is None:
                self._store.rollouts.finish(row["id"])
                continue
            cached = tree.spec.cache == "always"
            rollout = Rollout(row["id"], row["name"], task.name, tree, node, cached=cached, calls=row["calls"])
            rollout.polled_keys, rollout.arrived_at = self._polled_keys(rollout), time.monotonic()
            self._enter(task, rollout)

    def _polled_keys(self, rollout: Rollout) -> set[CallKey]:
        """Return the keys of observations that a rollout has made since it arrived at its node."""
        if rollout.node.state is not None:
            return set()
        here = {record.id: record.key for record in rollout.node.records.values() if record.observation}
        latest = self._store.rollouts.latest_records(rollout.id, len(here) + 1)
        return {here[number] for number in takewhile(here.__contains__, latest)}

    def _enter(self, task: Task, rollout: Rollout) -> None:
        task.rollouts[rollout.name] = rollout
        self.rollouts[task.name, rollout.name] = rollout
        self._walkers.add(rollout)

    def _leave(self, rollout: Rollout) -> None:
        self.rollouts.pop((rollout.task, rollout.name), None)
        self._walkers.discard(rollout)

    def _own(self, tree: Tree) -> Tree:
        self._trees[tree.id] = tree
        self._cache.reattach(tree.id, tree.nodes)
        return tree
