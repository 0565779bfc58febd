"""Sends kept states to the store, in the background.

Theory of operation:

1. A state that was kept waits for `DELAY_S`, in a task of its own, and then for the states of its task before it. If
   too many wait, the one that has waited longest goes without being sent.
2. A state whose replay would be short is not sent (`worth.replay_s`). But a state in which a rollout is goes in any
   case, unless a replay surely reaches it: without it, the rollout would be lost with this machine.
3. The driver packs the state's units. Their chunks are written, unless the store has them from an earlier state. Then
   the manifest is written, and at last a line of the log that names it. A crash before leaves objects that nothing
   names, which `sweeping` deletes later.
4. If the store fails, this member sends nothing for a while, which doubles each time, and then goes on. Calls do not
   notice.
"""

import asyncio
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import structlog

from proxy.cluster.edits import tree_lines
from proxy.cluster.lines import Kept
from proxy.cluster.owned import DroppedError, Owned
from proxy.cluster.states.manifests import CHUNK_BYTES, ChunkRef, StateManifest, name_of
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
LONGEST_PAUSE_S = 60.0
"""How long sending pauses at most after the store has failed, in seconds."""


@dataclass(slots=True, eq=False)
class _Waiting:
    tree: Tree
    node: Node
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # Set when it may wait no longer.
    is_sent: bool = False  # Whether the store gets it just now.
    job: asyncio.Task[None] | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.tree.id, self.node.id

    async def until(self, time: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(time):
                await self.hurry.wait()


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

    def __init__(self, objects: ObjectStore, engine: Engine, states_of: StatesOf, tasks: TaskOwner) -> None:
        self._objects, self._engine, self._states_of = objects, engine, states_of
        self._pace, self._slots = Pace(engine.settings.store_bytes_per_s), asyncio.Semaphore(SENDERS)
        # By tree and node; the one that has waited longest is the first.
        self._waiting: dict[tuple[int, int], _Waiting] = {}
        self._resume_at, self._pause_s, self._tasks = 0.0, 1.0, tasks

    def add(self, tree: Tree, node: Node) -> None:
        """Note that a node has a snapshot, or that a rollout has come to it."""
        # One that waits keeps its place, or a group that comes to it one by one would hold it up.
        if (tree.id, node.id) in self._waiting:
            return
        waiting = self._waiting[tree.id, node.id] = _Waiting(tree, node)
        waiting.job = self._tasks.spawn("send a state", self._send(waiting))
        if len(self._waiting) > MAX_WAITING:
            oldest = next(each for each in self._waiting.values() if not each.is_sent)
            self._forget(oldest)
            assert oldest.job is not None
            oldest.job.cancel()

    def _forget(self, waiting: _Waiting) -> None:
        if self._waiting.get(waiting.key) is waiting:
            del self._waiting[waiting.key]

    async def flush(self, owned: Owned, within_s: float) -> bool:
        """Send what waits of a task that is about to be handed over; return whether its rollouts would lose no state.

        After `within_s` the next owner has to replay the rest, which not every replay reaches.
        """
        try:
            async with asyncio.timeout(within_s):
                while jobs := [each.job for each in self._waiting.values() if self._hurries(each, owned)]:
                    await asyncio.wait([job for job in jobs if job is not None])
        except TimeoutError:
            log.warning("not all kept states were sent in time: the next owner replays", task=owned.task)
            return not any(self._hurries(each, owned) and self._is_only_way(each) for each in self._waiting.values())
        return True

    def _is_only_way(self, waiting: _Waiting) -> bool:
        tree, node = waiting.tree, waiting.node
        states = self._states_of(tree.id)
        return states is not None and self._is_needed(tree, node) and math.isinf(self._replay_s(tree, node, states))

    def _hurries(self, waiting: _Waiting, owned: Owned) -> bool:
        """Let a state of a task wait no longer; return False for one of another task."""
        states = self._states_of(waiting.tree.id)
        if states is None or states.owned is not owned:
            return False
        waiting.hurry.set()
        return True

    async def _send(self, waiting: _Waiting) -> None:
        clock = asyncio.get_running_loop().time
        due = clock() + DELAY_S
        try:
            while True:
                await waiting.until(max(due, self._resume_at))
                states = self._states_of(waiting.tree.id)
                if states is None:
                    return
                async with states.changing, self._slots:
                    # The store may have failed since.
                    if self._resume_at > clock() and not waiting.hurry.is_set():
                        continue
                    waiting.is_sent = True
                    if await self._attempt(waiting.tree, waiting.node, states):
                        return
                    waiting.is_sent = False
                    waiting.hurry.clear()
        finally:
            # Without an await since it was looked at: a rollout that comes to it now is noted.
            self._forget(waiting)

    async def _attempt(self, tree: Tree, node: Node, states: TaskStates) -> bool:
        """Send a state, if a takeover would need it; return False if the store has failed."""
        porter = porter_of(self._engine.drivers.get(tree.spec.driver))
        if porter is None or not self._is_worth(tree, node, porter, states):
            return True
        try:
            await self._write(states, tree, node, porter)
        except ObjectStoreError as error:
            states.has_garbage = True
            self._pause(error)
            return False
        except (OSError, ValueError, NotFreezableError) as error:
            # It was evicted meanwhile, or cannot travel.
            log.debug("a kept state was not sent", node=node.id, error=str(error))
        except DroppedError:
            pass
        else:
            self._pause_s = 1.0
        return True

    def _is_worth(self, tree: Tree, node: Node, porter: Porter, states: TaskStates) -> bool:
        """Return whether a state can be sent, and a takeover would need it. O(calls of `WORTH_S`)."""
        snapshot = self._engine.cache.of(node)
        if snapshot is None or node.detached or not porter.carries(snapshot.kind):
            return False
        states.here.add(node.id)
        if node.id in states.kept:
            return False
        return self._replay_s(tree, node, states) > WORTH_S

    def _is_needed(self, tree: Tree, node: Node) -> bool:
        return any(rollout.node is node for rollout in self._engine.walkers.of(tree.id))

    def _replay_s(self, tree: Tree, node: Node, states: TaskStates) -> float:
        costs, proven = self._engine.cache.costs[tree.spec.driver], self._is_needed(tree, node)
        return replay_s(node, states.kept, costs, proven=proven)

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
        data = manifest.packed()
        line = Kept(node.id, name_of(view, data), manifest.size_bytes)
        await self._put_object(states, line.name, data)
        # Behind the digest of the tree's root state.
        await states.owned.write([*tree_lines(self._engine.store.copies, states.owned, tree), line])
        states.kept[line.node] = line
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
