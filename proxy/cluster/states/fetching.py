"""Fetches kept states from the store when a sandbox is needed at a node, and no cheaper way leads there.

A fetch takes no longer than the replay that it saves: after that time the call replays, and the fetch goes on for the
next call. A state that no replay reaches is waited for. If it cannot be had now, the call fails with an error of the
machine, and the state is not lost.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from proxy.cluster.lines import Kept, Unkept
from proxy.cluster.states.imports import DamagedStateError, StateImport
from proxy.cluster.states.manifests import MAX_MANIFEST_BYTES, ManifestError, StateManifest, decode, is_name
from proxy.cluster.states.objects import MissingObjectError, ObjectSizeError, ObjectStore, ObjectStoreError
from proxy.cluster.states.task_states import StatesOf, TaskStates
from proxy.cluster.states.worth import candidate
from proxy.engine import Engine
from proxy.tree.restore_plan import RestorePlan
from proxy.tree.tree import Node, Tree
from sandboxes.errors import SandboxError
from sandboxes.portability import NotPortableError, Porter, porter_of
from sandboxes.task_owner import TaskOwner

log = structlog.get_logger()

ONLY_WAY_S = 30.0
"""How long a call waits for a state that no replay reaches, in seconds. Its agent's client may wait no longer."""
FIRST_BYTES_PER_S = 50e6
"""Bytes a second that a fetch is expected to bring before one was measured."""
REQUEST_S = 0.02
"""What each fetch takes beside its bytes, in seconds, measured with a directory and with a server on this machine."""
IDLE_S = 60.0
"""After how many seconds without a fetch an import ends, so that its units may be evicted."""
PAUSE_S = 5.0
"""After the store has failed, how long states are not fetched that a replay reaches, in seconds."""


class UnreachableStateError(SandboxError):
    """A state that no replay reaches is in the store, which does not give it now."""

    def __init__(self, node: int, why: str) -> None:
        super().__init__(f"the state of n{node} is in the store, and cannot be had now: {why}. Try again.")


class Fetcher:
    """Fetches the states of the tasks that this member owns."""

    def __init__(
        self, objects: ObjectStore, engine: Engine, states_of: StatesOf, folder: Path, tasks: TaskOwner
    ) -> None:
        self._objects, self._engine, self._states_of, self._folder = objects, engine, states_of, folder
        self._imports: dict[int, StateImport] = {}
        self._fetches: dict[int, asyncio.Task[str]] = {}
        self._bytes_per_s = FIRST_BYTES_PER_S
        self._avoid_until, self._tasks = 0.0, tasks

    def close(self) -> None:
        """End all imports. No fetch may be running."""
        for tree in tuple(self._imports):
            self._imports.pop(tree).close()

    async def fetch(self, tree: Tree, node: Node, plan: RestorePlan | None) -> bool:
        """Fetch a state that is better than a plan; see `Restorer.fetch`. Raises UnreachableStateError."""
        states = self._states_of(tree.id)
        porter = porter_of(self._engine.drivers.get(tree.spec.driver))
        if states is None or porter is None:
            return False
        costs = self._engine.cache.costs[tree.spec.driver]
        # A state that turns out to be damaged is not kept any more, so the loop ends.
        while (better := candidate(node, plan, states.kept, costs)) is not None:
            line, only = states.kept[better.node.id], math.isinf(better.saved_s)
            expected_s = REQUEST_S + line.size_bytes / self._bytes_per_s
            if not only and (expected_s > better.saved_s or time.monotonic() < self._avoid_until):
                return False
            running = self._begin(states, tree, better.node, line, porter)
            # Not `wait_for`: the fetch goes on for the next call.
            await asyncio.wait([running], timeout=ONLY_WAY_S if only else better.saved_s)
            if better.node.snapshot is not None:
                return True
            if line.node in states.kept:
                if only:
                    why = running.result() if running.done() else f"it has not arrived within {ONLY_WAY_S:g} s"
                    raise UnreachableStateError(line.node, why)
                return False
        return False

    def close_idle(self) -> None:
        """End imports that are no longer used, so that budgets count what they hold."""
        now = time.monotonic()
        for tree, each in tuple(self._imports.items()):
            if not each.users and (now - each.used_at > IDLE_S or self._states_of(tree) is None):
                self._imports.pop(tree).close()

    def _begin(self, states: TaskStates, tree: Tree, node: Node, line: Kept, porter: Porter) -> asyncio.Task[str]:
        """Return the fetch of a state, which many calls may wait for."""
        running = self._fetches.get(line.node)
        if running is None:
            work = self._fetch(states, tree, node, line, porter)
            running = self._fetches[line.node] = self._tasks.spawn("fetch a state", work, awaited=True)
            running.add_done_callback(lambda _: self._fetches.pop(line.node, None))
        return running

    async def _fetch(self, states: TaskStates, tree: Tree, node: Node, line: Kept, porter: Porter) -> str:
        """Fetch a state and attach it to its node; return why that was not possible, or an empty text."""
        began = time.monotonic()
        try:
            manifest = await self._manifest(states, tree, node, line)
            if not self._engine.cache.accepts("files"):
                return "the snapshots of this machine exceed their budget"
            with self._import(states, tree, porter, manifest) as importing:
                before = importing.size_bytes
                frozen = await importing.fetch(manifest)
                cost_s = manifest.state.cost_s
                # In a thread, like every other write of a snapshot, were it not for the node: see `Capture.adopt`.
                if not self._engine.capture.adopt(frozen, tree, node, cost_s=cost_s):
                    return "the snapshot could not be written"
        except DamagedStateError as error:
            await self._give_up(states, line, error.name, str(error))
            return str(error)
        except NotPortableError as error:
            # This machine cannot use it, for example because it has not built the root state. Another one may.
            states.kept.pop(line.node, None)
            log.info("a kept state cannot be used here", node=line.node, reason=str(error))
            return str(error)
        except (ObjectStoreError, OSError) as error:
            self._engine.counts.failure("store")
            self._avoid_until = time.monotonic() + PAUSE_S
            log.warning("a kept state was not fetched", node=line.node, error=str(error))
            return str(error)
        states.here.add(line.node)
        self._note_speed(importing.size_bytes - before, time.monotonic() - began)
        self._engine.counts.states.fetched += 1
        return ""

    async def _manifest(self, states: TaskStates, tree: Tree, node: Node, line: Kept) -> StateManifest:
        manifest = await read_manifest(self._objects, states, line)
        state = manifest.state
        if state.driver != tree.spec.driver:
            raise DamagedStateError(line.name, "it belongs to another driver")
        if node.state is not None and (state.content, state.exact) != (
            node.state.content.hex(),
            node.state.exact.hex(),
        ):
            raise DamagedStateError(line.name, "its digest is not that of its node")
        return manifest

    @contextlib.contextmanager
    def _import(self, states: TaskStates, tree: Tree, porter: Porter, manifest: StateManifest) -> Iterator[StateImport]:
        known = self._imports.get(tree.id)
        if known is not None and known.fits(manifest) and known.size_bytes <= self._engine.cache.free_bytes:
            yield known
            return
        # The import that others use goes on beside a new one, which ends with this fetch.
        fresh = StateImport(states, porter, self._objects, self._folder)
        if known is None or not known.users:
            if known is not None:
                known.close()
            self._imports[tree.id] = fresh
        try:
            yield fresh
        finally:
            if self._imports.get(tree.id) is not fresh:
                fresh.close()

    async def _give_up(self, states: TaskStates, line: Kept, name: str, why: str) -> None:
        """Say in the log that a state is damaged, so that no member tries it again."""
        self._engine.counts.failure("damaged-state")
        log.warning("a kept state is damaged in the store, so it is replayed", node=line.node, reason=why)
        states.forget_objects([name])
        states.has_garbage = True
        states.names.pop(line.node, None)
        if states.kept.pop(line.node, None) is not None:
            states.owned.write([Unkept(line.node)])

    def _note_speed(self, size_bytes: int, seconds: float) -> None:
        self._engine.counts.states.bytes_fetched += size_bytes
        # Small states say nothing of the bytes a second.
        if size_bytes > 1 << 20:
            measured = size_bytes / max(seconds - REQUEST_S, 1e-3)
            self._bytes_per_s += 0.3 * (measured - self._bytes_per_s)


async def read_manifest(objects: ObjectStore, states: TaskStates, line: Kept) -> StateManifest:
    """Return the manifest of a kept state. Raises DamagedStateError: it is missing or damaged."""
    if not is_name(line.name):
        raise DamagedStateError(line.name, "the log names no object")
    try:
        data = await objects.get(states.path(line.name), most_bytes=MAX_MANIFEST_BYTES)
        manifest = decode(line.name, data, line.node)
    except (MissingObjectError, ObjectSizeError, ManifestError) as error:
        raise DamagedStateError(line.name, str(error)) from error
    if manifest.size_bytes != line.size_bytes:
        raise DamagedStateError(line.name, "it has another size than the log says")
    states.note_manifest(line, manifest)
    return manifest
