"""Sends kept states to the store, in the background.

Theory of operation:

1. A state that was kept waits for `DELAY_S` in a queue. Nothing waits for the queue: if it is full, the state that has
   waited longest goes without being sent.
2. A state whose replay would be short is not sent (`worth.replay_s`). But a state in which a rollout is goes in any
   case, unless a replay surely reaches it: without it, the rollout would be lost with this machine.
3. The driver packs the state's units. Their chunks are written, unless the store has them from an earlier state. Then
   the manifest is written, and at last a line of the log that names it. A crash before leaves objects that nothing
   names, which `sweeping` deletes later.
4. If the store fails, no member tries again for a while, which doubles each time. Calls do not notice.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import structlog

from proxy.cluster.gate import ClusterGate
from proxy.cluster.lines import Kept
from proxy.cluster.owned import DroppedError
from proxy.cluster.states.manifests import CHUNK_BYTES, ChunkRef, StateManifest, encode, name_of
from proxy.cluster.states.objects import ObjectStore, ObjectStoreError
from proxy.cluster.states.task_states import StatesOf, StoredUnit, TaskStates
from proxy.cluster.states.worth import WORTH_S, replay_s
from proxy.engine import Engine
from proxy.transfer.state_records import UnitRef, state_line
from proxy.tree.tree import Node, Tree
from sandboxes.errors import NotFreezableError
from sandboxes.portability import Porter, porter_of
from sandboxes.task_owner import TaskOwner

log = structlog.get_logger()

DELAY_S = 1.0
"""How long a state waits before it is sent, in seconds: what an agent passes quickly needs no sending."""
MAX_WAITING = 1000
"""Most states that wait. At `DELAY_S`, a member keeps fewer; only a store that fails fills the queue."""
SENDERS = 2
"""How many states are sent at once, each of another task. Each of them takes a thread of the machine's cores."""
PUTS = 4
"""How many chunks of a state are written at once: `SENDERS * PUTS` chunks of 4 MB are in memory at most."""
ATTEMPTS = 3
"""How often a state is sent before it is given up."""
LONGEST_PAUSE_S = 60.0
"""How long sending pauses at most after the store has failed, in seconds."""


class _Key(NamedTuple):
    tree: int
    node: int


@dataclass(slots=True)
class _Waiting:
    tree: Tree
    node: Node
    due: float
    attempts: int = 0


@dataclass(slots=True)
class Pace:
    """Spreads bytes over time."""

    bytes_per_s: int  # Most bytes a second.
    _free_at: float = 0.0

    async def take(self, size_bytes: int) -> None:
        """Wait until so many bytes may be sent."""
        now = asyncio.get_running_loop().time()
        start = max(now, self._free_at)
        self._free_at = start + size_bytes / self.bytes_per_s
        if start > now:
            await asyncio.sleep(start - now)


@dataclass(slots=True)
class _Chunks:
    """Cuts what a driver packs into chunks. Blocking: each call runs in a thread."""

    pieces: Iterator[bytes]
    size_bytes: int = 0  # Bytes so far.
    _digest: Any = field(default_factory=sha256)
    _pending: bytearray = field(default_factory=bytearray)

    def take(self, view: int) -> tuple[str, bytes] | None:
        while len(self._pending) < CHUNK_BYTES and (piece := next(self.pieces, None)) is not None:
            self._digest.update(piece)
            self._pending += piece
            self.size_bytes += len(piece)
        data = bytes(self._pending[:CHUNK_BYTES])
        del self._pending[:CHUNK_BYTES]
        return (name_of(view, data), data) if data else None

    @property
    def hexdigest(self) -> str:
        return str(self._digest.hexdigest())


class Sender:
    """Sends the states of the tasks that this member owns."""

    def __init__(
        self, objects: ObjectStore, engine: Engine, gate: ClusterGate, states_of: StatesOf, *, bytes_per_s: int
    ) -> None:
        self._objects, self._engine, self._gate, self._states_of = objects, engine, gate, states_of
        self._pace = Pace(bytes_per_s)
        self._waiting: dict[_Key, _Waiting] = {}
        self._busy: set[str] = set()
        self._hurried: set[str] = set()
        self._changed = asyncio.Event()
        self._resume_at, self._pause_s = 0.0, 1.0
        self._tasks = TaskOwner()

    def start(self) -> None:
        """Begin to send."""
        for number in range(SENDERS):
            self._tasks.spawn(f"send states {number}", self._work())

    async def aclose(self) -> None:
        """Send nothing more."""
        self._tasks.cancel()
        await self._tasks.wait()

    def add(self, tree: Tree, node: Node) -> None:
        """Note that a node has a snapshot, or that a rollout has come to it. 1 us."""
        # One that waits keeps its place, or a group that comes to it one by one would hold it up.
        if _Key(tree.id, node.id) not in self._waiting:
            self._put(_Waiting(tree, node, asyncio.get_running_loop().time() + DELAY_S))

    async def flush(self, task: str, *, within_s: float) -> None:
        """Send what waits of a task now, and return when that is done or the time is over."""
        self._hurried.add(task)
        try:
            async with asyncio.timeout(within_s):
                while any(self._task_of(each) == task for each in tuple(self._waiting.values())) or task in self._busy:
                    self._changed.set()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            log.warning("not all kept states were sent in time: the next owner replays", task=task)
        finally:
            self._hurried.discard(task)

    def _put(self, waiting: _Waiting) -> None:
        # Behind another state, it changes what comes next only if that one waits for its task.
        if not self._waiting or self._busy:
            self._changed.set()
        self._waiting[_Key(waiting.tree.id, waiting.node.id)] = waiting
        while len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def _task_of(self, waiting: _Waiting) -> str:
        states = self._states_of(waiting.tree.id)
        return "" if states is None else states.owned.task

    async def _work(self) -> None:
        while True:
            self._changed.clear()
            waiting, pause_s = self._next()
            if waiting is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._changed.wait()
                continue
            states = self._states_of(waiting.tree.id)
            if states is None or not self._is_worth(waiting, states):
                continue
            self._busy.add(states.owned.task)
            try:
                await self._send(waiting, states)
            finally:
                self._busy.discard(states.owned.task)
                # A state of the same task may wait.
                self._changed.set()

    def _next(self) -> tuple[_Waiting | None, float | None]:
        """Take the next state; otherwise return None, and after how many seconds to look again (None: on a change)."""
        now = asyncio.get_running_loop().time()
        if self._resume_at > now and not self._hurried:
            return None, self._resume_at - now
        for key, waiting in tuple(self._waiting.items()):
            task = self._task_of(waiting)
            if task in self._busy:
                continue
            if waiting.due > now and task not in self._hurried:
                # Those behind it came later.
                return None, waiting.due - now
            del self._waiting[key]
            return waiting, None
        return None, None

    def _is_worth(self, waiting: _Waiting, states: TaskStates) -> bool:
        """Return whether a state that has waited can be sent, and a takeover would need it. O(calls of `WORTH_S`)."""
        tree, node = waiting.tree, waiting.node
        porter, snapshot = porter_of(self._engine.drivers.get(tree.spec.driver)), self._engine.cache.of(node)
        if porter is None or snapshot is None or node.detached or not porter.carries(snapshot.kind):
            return False
        states.here.add(node.id)
        costs = self._engine.cache.costs[tree.spec.driver]
        if node.id in states.kept:
            return False
        is_needed = any(rollout.node is node for rollout in self._engine.walkers.of(tree.id))
        return replay_s(node, states.kept, costs, proven=is_needed) > WORTH_S

    async def _send(self, waiting: _Waiting, states: TaskStates) -> None:
        tree, node = waiting.tree, waiting.node
        porter = porter_of(self._engine.drivers.get(tree.spec.driver))
        assert porter is not None
        try:
            async with states.changing:
                await self._write(states, tree, node, porter)
        except ObjectStoreError as error:
            states.has_garbage = True
            self._pause(error)
            if waiting.attempts + 1 < ATTEMPTS:
                self._put(_Waiting(tree, node, waiting.due, waiting.attempts + 1))
        except (OSError, ValueError, NotFreezableError) as error:
            # It was evicted meanwhile, or cannot travel.
            log.debug("a kept state was not sent", node=node.id, error=str(error))
        except DroppedError:
            return
        else:
            self._pause_s = 1.0

    def _pause(self, error: ObjectStoreError) -> None:
        self._engine.counts.failure("store")
        log.warning("a kept state was not sent", error=str(error), pause_s=self._pause_s)
        self._resume_at = asyncio.get_running_loop().time() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    async def _write(self, states: TaskStates, tree: Tree, node: Node, porter: Porter) -> None:
        snapshot, view = self._engine.cache.of(node), states.owned.view
        if snapshot is None:
            return
        frozen = await asyncio.to_thread(self._engine.cache.load, snapshot)
        stored = [await self._unit(states, porter, part) for part in frozen.parts]
        units, chunks = [unit for unit, _ in stored], tuple(chunks for _, chunks in stored)
        state = state_line(frozen, units, node=node.id, cost_s=snapshot.cost_s)
        manifest = StateManifest(state=state, chunks=chunks)
        data = encode(manifest)
        line = Kept(node.id, name_of(view, data), manifest.size_bytes)
        await self._put_object(states, line.name, data)
        await self._gate.write_kept(states.owned, tree, line)
        states.note_manifest(line, manifest)
        self._engine.counts.states.sent += 1

    async def _unit(self, states: TaskStates, porter: Porter, part: str) -> StoredUnit:
        known = states.units.get(part)
        if known is not None:
            return known
        cut, view = _Chunks(porter.pack(part)), states.owned.view
        chunks: list[ChunkRef] = []
        is_last = False
        while not is_last:
            puts: list[tuple[ChunkRef, bytes]] = []
            while not is_last and len(puts) < PUTS:
                taken = await asyncio.to_thread(cut.take, view)
                is_last = taken is None
                if taken is not None:
                    name, data = taken
                    chunk = states.chunks.get(name.partition("/")[2])
                    if chunk is None:
                        chunk = ChunkRef(name=name, size_bytes=len(data))
                        puts.append((chunk, data))
                    chunks.append(chunk)
            await asyncio.gather(*(self._put_object(states, chunk.name, data) for chunk, data in puts))
            states.note_chunks(chunk for chunk, _ in puts)
        unit = UnitRef(name=part, sha256=cut.hexdigest, size_bytes=cut.size_bytes)
        states.units[part] = unit, tuple(chunks)
        return states.units[part]

    async def _put_object(self, states: TaskStates, name: str, data: bytes) -> None:
        states.owned.require()
        await self._pace.take(len(data))
        await self._objects.put(states.path(name), data)
        self._engine.counts.states.bytes_sent += len(data)
