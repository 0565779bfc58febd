"""The running rollouts: read back from the store with their task, begun when they are new, ended once."""

import json
import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from proxy.execution.call_order import CallOrder
from proxy.execution.gate import Gate
from proxy.execution.open_trees import OpenTrees
from proxy.refusals import RefusalError
from proxy.storage.errors import DamagedError
from proxy.storage.journal import Journal
from proxy.storage.store import Store
from proxy.tree.keys import CallKey
from proxy.tree.labels import RUN, Labels
from proxy.tree.rollout import Rollout
from proxy.tree.task import Task, Walkers
from proxy.tree.tree import Node, Tree
from sandboxes.pool.pool import Pool


class Rollouts:
    """The running rollouts of all tasks in memory. `Tasks` opens their tasks, and decides where they begin."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        trees: OpenTrees,
        pool: Pool,
        walkers: Walkers,
        order: CallOrder,
        gate: Gate | None = None,
    ) -> None:
        """Create an empty registry, which keeps `walkers` up to date: which rollouts walk which tree.

        The journal's steps are folded before rollouts are read back. The gate is None without a cluster.
        """
        self._store, self._journal, self._trees, self._pool = store, journal, trees, pool
        self._walkers, self._order, self._gate = walkers, order, gate
        self.running: dict[tuple[str, str], Rollout] = {}  # The rollouts by the names of their task and of themselves.
        # Numbers of running rollouts whose position is lost, and why, by task and name. They are no `Rollout`: nothing
        # could be executed or answered for them.
        self._lost: dict[tuple[str, str], tuple[int, str]] = {}
        self.at_end: list[Callable[[Rollout], None]] = []  # Called with each rollout that has ended.
        # For each task in memory, the dictionary of its rollouts.
        self._of_tasks: dict[str, dict[str, Rollout]] = {}

    def begin(
        self, task: Task, name: str, tree: Tree, node: Node, token: str = "", labels: Labels | None = None
    ) -> Rollout:
        """Begin a rollout at a node, with its token's digest. Raises RefusalError (409) if it runs, or is lost."""
        self.require_position(task.name, name)
        if name in task.rollouts:
            raise RefusalError(
                409,
                "rollout-exists",
                f"rollout {name!r} of {task.name!r} is running. Finish it, or choose another name.",
            )
        # The store first: a rollout that only memory knows would be lost with its steps.
        number = self._store.rollouts.create(task.name, name, tree.id, node.id, token, labels)
        cached, run = tree.spec.cache == "always", (labels or {}).get(RUN, "")
        rollout = Rollout(number, name, task.name, tree, node, run=run, cached=cached)
        rollout.begin(time.monotonic())
        self._add(task, rollout)
        if self._gate is not None:
            self._gate.began(rollout)
        return rollout

    def note(self, rollout: Rollout, protocol: str, value: str) -> None:
        """Store what a protocol remembers of a running rollout, as JSON; see `NoteStore.put`."""
        self._store.notes.put(rollout.id, protocol, value)
        if self._gate is not None:
            self._gate.noted(rollout, protocol, value)

    async def finish(self, rollout: Rollout) -> None:
        """End a rollout. Its name is free again. Other rollouts may use its sandbox, unless it shares nothing."""
        # Set before anything awaits: a call that waits for its turn sees it and gives up (`Stepper._answer`).
        rollout.finished = True
        self._store_end(rollout.task, rollout.id)
        self._remove([rollout])
        # The task may have been removed from memory while the rollout's last call ran.
        self._of_tasks.get(rollout.task, {}).pop(rollout.name, None)
        for forget in self.at_end:
            forget(rollout)
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
            rollout = self.running.get((task, name))
            if rollout is None:
                # Its task is not in memory.
                self._store_end(task, number)
            elif rollout.id != number or rollout.calls != calls or rollout.waiting:
                # It made a call while others were ended, or a call is running.
                continue
            else:
                await self.finish(rollout)
            ended += 1
        return ended

    def put_labels(self, task: str, rollout: int, live: Rollout | None, labels: Labels) -> None:
        """Write a rollout's labels; `live` is the rollout while it is in memory."""
        self._store.rollouts.put_labels(rollout, labels)
        if live is not None and live.id == rollout:
            live.run = labels.get(RUN, "")
            if self._gate is not None:
                self._gate.began(live)
        elif self._gate is not None:
            self._gate.edits.labelled(task, rollout)

    def finish_lost(self, task: str, name: str) -> bool:
        """End a rollout whose position is lost, so that its name is free; return whether there was one."""
        number, _ = self._lost.pop((task, name), (0, ""))
        if number:
            self._store_end(task, number)
        return bool(number)

    def _store_end(self, task: str, rollout: int) -> None:
        self._store.rollouts.finish(rollout)
        if self._gate is not None:
            self._gate.ended(task, rollout)

    def require_position(self, task: str, name: str) -> None:
        """Raise RefusalError (409) for a rollout whose position is lost."""
        _, why = self._lost.get((task, name), (0, ""))
        if why:
            raise RefusalError(
                409,
                "rollout-lost",
                f"the state of rollout {name!r} is not known any more: {why}. Finish it (DELETE), and begin another.",
            )

    def move(self, rollout: Rollout, tree: Tree) -> None:
        """Move a rollout that has made no call to the root of another tree."""
        self._store.rollouts.move(rollout.id, tree.id, tree.root.id)
        self._walkers.discard(rollout)
        rollout.tree, rollout.node = tree, tree.root
        self._walkers.add(rollout)
        if self._gate is not None:
            self._gate.began(rollout)

    def read_back(self, task: Task) -> None:
        """Read a task's running rollouts from the store, each at the node that its last step led to."""
        self._of_tasks[task.name] = task.rollouts
        self.fold()
        for row in self._store.rollouts.of_task(task.name, running=True):
            # Not the task's current tree: an older rollout stays in the tree that it began in.
            rollout, why = None, row["lost"] if row["whole"] else "its row in the store is damaged"
            if not why:
                try:
                    tree = self._trees.opened(row["tree"])
                    node = tree.node(row["node"])
                    if tree.unread is not None and (node is None or node.state is None):
                        # It is not known yet, or which calls it has answered there.
                        node = self._trees.load(tree.id).node(row["node"])
                    if node is not None:
                        rollout = Rollout(row["id"], row["name"], task.name, tree, node, calls=row["calls"])
                        rollout.polled_keys = self._polled_keys(rollout)
                except DamagedError as error:
                    rollout, why = None, str(error)
            if rollout is None:
                # It does not begin again without an error: its agent relies on a state that this proxy does not know.
                why = why or f"its state n{row['node']} was forgotten, or is damaged in the store"
                self._lost[task.name, row["name"]] = row["id"], why
                self._store.rollouts.lose({row["id"]}, why)
                continue
            rollout.cached = rollout.tree.spec.cache == "always"
            rollout.run = json.loads(row["labels"]).get(RUN, "")
            rollout.arrived_at = time.monotonic()
            if self._gate is not None:
                # Which observations another member answered, while it owned the task, is not known here.
                rollout.note_all_polled()
            rollout.begin(rollout.arrived_at)
            self._add(task, rollout)

    def fold(self) -> None:
        """Write the steps of the journal into the store, which lags until then."""
        self._journal.fold()

    def close(self, task: Task) -> None:
        """Remove a task's rollouts from memory; the store keeps them."""
        self._lost = {key: lost for key, lost in self._lost.items() if key[0] != task.name}
        self._remove([*task.rollouts.values()])
        self._of_tasks.pop(task.name, None)

    def _polled_keys(self, rollout: Rollout) -> set[CallKey]:
        """Return the keys of observations that a rollout has made since it arrived at its node."""
        # Only beside running processes does a repeated call have a key of its own.
        if rollout.node.state is not None:
            return set()
        here = {record.id: record.key for record in rollout.node.records.values() if record.observation}
        # One more than there are observations here: the first call made elsewhere ends the search.
        latest = self._store.rollouts.latest_records(rollout.id, len(here) + 1)
        return {here[number] for number in takewhile(here.__contains__, latest)}

    def _add(self, task: Task, rollout: Rollout) -> None:
        # Three indexes: by task, for the hit path, and by tree. They change together, without an await.
        task.rollouts[rollout.name] = rollout
        self.running[task.name, rollout.name] = rollout
        self._walkers.add(rollout)

    def _remove(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self.running.pop((rollout.task, rollout.name), None)
            self._walkers.discard(rollout)
