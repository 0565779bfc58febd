"""The kept states of the tasks that this member owns: what the engine and the member call."""

import structlog

from proxy.cluster.gate import ClusterGate
from proxy.cluster.owned import DroppedError, Owned
from proxy.cluster.states.fetching import Fetcher
from proxy.cluster.states.objects import ObjectStore, ObjectStoreError
from proxy.cluster.states.recordings import SharedRecordings
from proxy.cluster.states.sending import Sender
from proxy.cluster.states.sweeping import Sweeper
from proxy.cluster.states.task_states import TaskStates
from proxy.engine import Engine
from proxy.lifecycle import BackgroundWork
from sandboxes.task_owner import TaskOwner

log = structlog.get_logger()

TIDY_EVERY_S = 60.0
"""Interval at which garbage is looked for, in seconds; a tenth of the grace that it has."""


class SharedStates:
    """Sends, fetches and deletes kept states. Implements `proxy.execution.gate.KeptElsewhere`."""

    def __init__(self, objects: ObjectStore) -> None:
        self.objects, self._tasks = objects, TaskOwner()

    def attach(self, engine: Engine, gate: ClusterGate) -> None:
        """Take the engine and its gate, which are created with this object and are not open yet."""
        objects = self.objects
        self._gate, self._engine = gate, engine
        self._folder = engine.settings.data / "cluster" / "incoming"
        self._known: dict[str, TaskStates] = {}
        self._sender = Sender(objects, engine, self.of, self._tasks)
        self._fetcher = Fetcher(objects, engine, self.of, self._folder, self._tasks)
        self._sweeper = Sweeper(objects, engine.snapshots)
        recordings = SharedRecordings(objects, engine, self.of, self._folder)
        self.send_recordings, self.fetch_recordings = recordings.send, recordings.fetch
        self.fetch, self.stepped, self.flush = self._fetcher.fetch, self._sender.add, self._sender.flush
        engine.lifecycle.background.append(BackgroundWork("states", TIDY_EVERY_S, self.tidy))

    def open(self) -> None:
        """Remove what a kill left of states that arrived."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.iterdir():
            file.unlink()

    async def aclose(self) -> None:
        """Send and fetch nothing more."""
        await self._tasks.end()
        self._fetcher.close()

    def of(self, tree: int) -> TaskStates | None:
        """Return the states of the task that a tree belongs to; None if this member does not own it."""
        owned = self._gate.owned_tree(tree)
        return None if owned is None else self._of(owned)

    async def tidy(self) -> None:
        """End imports that are not used, and delete garbage of the tasks of this member, until the store fails."""
        self._fetcher.close_idle()
        self._known = {task: states for task, states in self._known.items() if not states.owned.is_dropped}
        for owned in tuple(self._gate.owned.values()):
            states = self._of(owned)
            if not self._sweeper.is_needed(states):
                continue
            try:
                if deleted := await self._sweeper.sweep(states):
                    log.info("garbage was deleted from the store", task=owned.task, objects=deleted)
            except DroppedError:
                continue
            except ObjectStoreError as error:
                # A store that is slow takes its whole patience for each task. The next round tries again.
                log.warning("garbage stays in the store", task=owned.task, error=str(error))
                return

    def _of(self, owned: Owned) -> TaskStates:
        known = self._known.get(owned.task)
        if known is None or known.owned is not owned:
            known = self._known[owned.task] = TaskStates(owned)
            self._resume(known)
        return known

    def _resume(self, states: TaskStates) -> None:
        """Note the snapshots that this member has of a task from before it owned the task, or from before its start."""
        trees = set(self._engine.store.trees.ids_of(states.owned.task))
        for snapshot in self._engine.snapshots:
            node = self._engine.trees.node(snapshot.tree, snapshot.node) if snapshot.tree in trees else None
            if node is not None and node.id in states.kept:
                states.here.add(node.id)
            elif node is not None:
                self._sender.add(self._engine.trees.load(snapshot.tree), node)
