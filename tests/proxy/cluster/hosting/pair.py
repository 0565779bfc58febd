"""An owner and a host in one process, with a driver and a pool each, and channels without a network between them."""

import asyncio
import itertools
import socket
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from proxy.cluster.hosting.host import Host
from proxy.cluster.hosting.placement import Placement
from proxy.cluster.hosting.units import Units
from proxy.cluster.link.channels import Channels, LinkChannel
from proxy.cluster.link.data import ExpectedData
from proxy.cluster.link.frames import Frame, FrameKind, Hello
from proxy.cluster.messages import HostQuestion, Message, RoomQuestion, unpack
from proxy.cluster.postgres.database import Peer
from proxy.telemetry.counters import HostingCounters
from sandboxes.driver import Driver, FrozenState, Sandbox
from sandboxes.pool.pool import Pool
from sandboxes.pool.room import Room
from sandboxes.portability import porter_of
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import TaskOwner


class Pair:
    """An owner and a host.

    Attributes:
        owner, host: Their drivers.
        placement: What the owner uses.
        pool: The pool of the host.
        owned, hosted: The storage units of both.
        sent_bytes: Bytes of the messages between them.
        damage, damage_to_host: May change the frames to the owner, and those to the host.
    """

    def __init__(self, owner: Driver, host: Driver, folder: Path, *, room: int = 8, keep_bytes: int = 1 << 30) -> None:
        self.owner, self.host = owner, host
        self.pool = Pool(Room(room + 1), patience_s=1.0)
        self.owned = self._units(owner, folder / "owner", keep_bytes)
        self.hosted = self._units(host, folder / "host", keep_bytes)
        self.has_memory, self.counts, self._data = True, HostingCounters(), ExpectedData()
        self.data_connections: list[socket.socket] = []
        # The specs of the drivers' contract name none, and mean `local`.
        names = {owner.name, "local"}
        self.hosting = Host(
            dict.fromkeys(names, host),
            self.pool,
            dict.fromkeys(names, self.hosted),
            self.counts,
            lambda: self.has_memory,
            self._data,
        )
        self.peers = [Peer(2, 1, "host", "", alive=True)]
        self.placement = Placement(
            dict.fromkeys(names, owner),
            dict.fromkeys(names, self.owned),
            self.counts,
            self._peers,
            self._ask,
            self._call,
            self._open_data,
        )
        self.sent_bytes = 0
        self.is_cut = False
        self.damage: Callable[[Frame], Frame] = lambda frame: frame
        self.damage_to_host = self.damage
        self._tasks, self._streams = TaskOwner(), itertools.count(1)
        self._to_host: Channels = Channels(self._from_owner, _drained)
        self._to_owner: Channels = Channels(self._from_host, _drained)

    @staticmethod
    def _units(driver: Driver, folder: Path, keep_bytes: int) -> Units:
        folder.mkdir(parents=True)
        porter = porter_of(driver)
        assert porter is not None
        return Units(porter, folder, HostingCounters(), budget_bytes=keep_bytes)

    async def open(self) -> None:
        await self.owner.open()
        await self.host.open()

    async def aclose(self) -> None:
        self._tasks.cancel()
        await self._tasks.wait()
        self.owned.close()
        self.hosted.close()
        await self.owner.aclose()
        await self.host.aclose()

    def cut(self) -> None:
        """End the link, as both ends see it."""
        self.is_cut = True
        self._to_host.lose()
        self._to_owner.lose()

    async def quiet(self) -> None:
        """Wait until the host has closed all sandboxes."""
        async with asyncio.timeout(30):
            while len(self.pool.roster):  # noqa: ASYNC110 - of tasks of the host
                await asyncio.sleep(0.01)

    def forget_rooms(self) -> None:
        """Let the owner ask for room again now."""
        for known in self.placement._known.values():
            known.asked_at = -1e9

    # -- the network -------------------------------------------------------------------------------------------------

    async def _peers(self) -> list[Peer]:
        return self.peers

    async def _ask(self, _number: int, question: Message) -> Message | None:
        assert isinstance(question, RoomQuestion)
        return None if self.is_cut else self.hosting.room

    async def _call(self, _peer: Peer, question: bytes) -> bytes | LinkChannel:
        asked = unpack(question)
        assert isinstance(asked, HostQuestion)
        stream = next(self._streams)
        begun: asyncio.Future[bytes | LinkChannel] = asyncio.get_running_loop().create_future()

        def begin() -> LinkChannel:
            channel = self._to_host.open(stream)
            begun.set_result(channel)
            return self._to_owner.open(stream)

        async def serve() -> None:
            answer = await self.hosting.serve(Hello(1, 1, 1, b""), asked.order, begin)
            if not begun.done():
                begun.set_result(answer)

        self._tasks.spawn("serve", serve())
        return await begun

    async def _open_data(self, _peer: Peer, token: bytes) -> socket.socket:
        mine, theirs = socket.socketpair()
        self.data_connections.append(mine)
        self._data.take(token, theirs)
        assert await asyncio.to_thread(mine.recv, 1) == b"\1"
        return mine

    def _from_owner(self, kind: FrameKind, stream: int, content: bytes) -> None:
        self._deliver(self._to_owner, self.damage_to_host(Frame(kind, stream, content)))

    def _from_host(self, kind: FrameKind, stream: int, content: bytes) -> None:
        self._deliver(self._to_host, self.damage(Frame(kind, stream, content)))

    def _deliver(self, to: Channels, frame: Frame) -> None:
        if frame.kind in (FrameKind.DATA, FrameKind.PIECE):
            self.sent_bytes += len(frame.content)
        if not self.is_cut:
            # As over a network: what one end sends is never handled within its own turn.
            asyncio.get_running_loop().call_soon(to.got, frame)


class RemoteDriver:
    """A driver whose sandboxes all run on the host of a pair, as those of an owner without room do."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.name, self._until = pair, pair.owner.name, ExitStack()

    async def open(self) -> None:
        await self.pair.open()

    async def identity(self, spec: EnvironmentSpec) -> str:
        return await self.pair.owner.identity(spec)

    async def start(self, spec: EnvironmentSpec) -> Sandbox:
        first = await self.pair.owner.start(spec)
        try:
            frozen = await first.freeze()
        finally:
            await first.close()
        return await self.restore(spec, frozen)

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> Sandbox:
        return await self.pair.placement.restore(spec, frozen)

    async def collect(self, keep: Iterable[str]) -> int:
        # The host has snapshots of its own only: none.
        await self.pair.host.collect(())
        return await self.pair.owner.collect(keep)

    async def aclose(self) -> None:
        await self.pair.aclose()


def pair_of(kind: Any, folder: Path, **options: Any) -> Pair:
    """Return a pair of drivers of a kind, each with a directory of its own."""
    arrive = Path(tempfile.mkdtemp(prefix="arrive-", dir=folder))
    return Pair(kind(folder / "a"), kind(folder / "b"), arrive, **options)


async def _drained() -> None: ...
