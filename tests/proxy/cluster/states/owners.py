"""Members in this process that own one task in turn, over a log in memory and a store that a test may break."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

from obstore.store import MemoryStore

from proxy.cluster.gate import ClusterGate
from proxy.cluster.lines import Line, decode
from proxy.cluster.member import Member
from proxy.cluster.owned import Owned
from proxy.cluster.postgres.database import ClusterDatabase, LogRow
from proxy.cluster.states.objects import ObjectStore, ObjectStoreError
from proxy.cluster.states.service import SharedStates
from proxy.cluster.states.task_states import TaskStates
from proxy.engine import Engine, build_engine
from proxy.settings import Settings
from proxy.tree.rollout import Outcome
from sandboxes.portability import NotPortableError
from snapshots.costs import Costs, Mean
from tests.proxy.rig import KEEPS_ALL, SPEC, ask
from tests.sandboxes.memory_driver import MemoryDriver, MemoryPorter

TASK = "task"


class BreakableStore(ObjectStore):
    """Objects in memory.

    Attributes:
        fails: Every request fails while it is set.
        hangs: No request is answered while it is set.
        trickles: Each request takes longer than a call while it is set.
        puts: Names of the objects that were written.
    """

    def __init__(self) -> None:
        super().__init__(MemoryStore(), "memory")
        self.fails = self.hangs = self.trickles = False
        self.puts: list[str] = []

    async def put(self, name: str, data: bytes) -> None:
        await self._break()
        self.puts.append(name)
        await super().put(name, data)

    async def get(self, name: str, *, most_bytes: int, size_bytes: int | None = None) -> bytes:
        await self._break()
        return await super().get(name, most_bytes=most_bytes, size_bytes=size_bytes)

    async def delete(self, names: Collection[str]) -> None:
        await self._break()
        await super().delete(names)

    async def all(self) -> dict[str, bytes]:
        """Return all objects."""
        found = [name async for page in self.names("states") for name in page]
        return {name: await super(BreakableStore, self).get(name, most_bytes=1 << 30) for name in found}

    async def _break(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.trickles:
            await asyncio.sleep(0.05)
        if self.fails:
            raise ObjectStoreError("broken by a test")


class BulkyPorter(MemoryPorter):
    """Gives each part some bytes, of which most are the same in all parts."""

    size_bytes = 5 << 20
    """More than one chunk."""

    def pack(self, part: str) -> Iterator[bytes]:
        yield from (bytes(1 << 20) for _ in range(self.size_bytes >> 20))
        yield part.encode()

    def part(self, name: str, data: BinaryIO, sha256: str) -> None:  # noqa: ARG002
        if hashlib.sha256(data.read()).hexdigest() != sha256:
            raise NotPortableError("its digest is another")


@dataclass
class Log:
    """The log of one task."""

    rows: list[bytes | None] = field(default_factory=list)

    def lines(self, *kinds: type[Any]) -> list[Line]:
        """Return the lines of some kinds."""
        return [line for body in self.rows for line in decode(body or b"") if isinstance(line, kinds)]


class LogDatabase:
    """What a takeover asks of the database."""

    def __init__(self, log: Log, number: int) -> None:
        self._log, self.membership = log, SimpleNamespace(number=number)

    async def read(self, _task: str) -> AsyncIterator[list[LogRow]]:
        yield [LogRow(number, 0, body) for number, body in enumerate(self._log.rows, 1)]

    async def member(self, _number: int) -> None:
        """Return that no member can be asked: ingresses of earlier owners are gone."""

    async def append(self, _task: str, row: int, body: bytes | None) -> bool:
        await asyncio.sleep(0)
        if row != len(self._log.rows) + 1:
            return False
        self._log.rows.append(body)
        return True


@dataclass
class Owner:
    """A member that owns the task."""

    engine: Engine
    member: Member
    owned: Owned
    shared: SharedStates
    driver: MemoryDriver

    @property
    def states(self) -> TaskStates:
        return self.shared._of(self.owned)

    async def walk(self, rollout: str, commands: list[str]) -> list[tuple[dict[str, Any], Outcome]]:
        """Let a new rollout make calls."""
        task = await self.engine.tasks.open(TASK)
        walker = self.engine.tasks.rollouts.begin(task, rollout, task.tree, task.tree.root)
        return [await ask(self.engine, walker, command) for command in commands]


@asynccontextmanager
async def owner(
    folder: Path,
    number: int,
    log: Log,
    objects: ObjectStore,
    *,
    replay_s: float = 1000.0,
    driver: MemoryDriver | None = None,
) -> AsyncIterator[Owner]:
    """Let a member take the task over. At the end it is gone, as after a kill: it writes nothing more.

    Args:
        folder: Where members have their data.
        number: Number of the member.
        log: The log of the task.
        objects: The store.
        driver: Its driver; None for a new one.
        replay_s: What the member believes that the replay of a call takes, and how long it waits for a fetch.
    """
    data, driver = folder / str(number), driver or MemoryDriver()
    driver.porter = BulkyPorter()
    data.mkdir(mode=0o700, exist_ok=True)
    shared = SharedStates(objects)
    gate = ClusterGate(number, shared)
    engine = build_engine(
        Settings(data=data, default_spec=SPEC, warm_sandboxes=0), {"memory": driver}, gate, block=number
    )
    gate.attach(engine.store.copies, engine.store.trees, cast("Any", None))
    engine.snapshot_value.reuse = KEEPS_ALL
    engine.cache.costs["memory"] = Costs(replay_overhead=Mean(replay_s))
    member = Member(cast("ClusterDatabase", LogDatabase(log, number)), gate, b"secret", engine)
    shared.attach(engine, gate)
    await engine.open()
    shared.open()
    try:
        owned = await member.claim(TASK)
        assert owned is not None
        yield Owner(engine, member, owned, shared, driver)
    finally:
        await shared.aclose()
        for each in tuple(gate.owned.values()):
            each.drop()
        member._tasks.cancel()
        await member._tasks.wait()
        await engine.aclose()
