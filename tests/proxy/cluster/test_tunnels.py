"""The bytes of a stream go both ways, and an agent never takes a part of a stream for all of it."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.cluster.forwarding import Forwarder
from proxy.cluster.ingress import Ingress
from proxy.cluster.link.greeting import Hello
from proxy.cluster.link.passing import TUNNEL, PeerConnection, Tunnelled
from proxy.cluster.named_task import NamedTask
from proxy.cluster.plane import _peer_of
from proxy.cluster.postgres.database import Ownership, Peer
from proxy.cluster.tunnels import Tunnels
from proxy.refusals import RefusalError

UPGRADE = b"GET /t/t/r/1/x HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\n\r\n"
ELSEWHERE = b"HTTP/1.1 421 Misdirected Request\r\n\r\n"
OWNER = Ownership(3, Peer(2, 6, "b", "127.0.0.1:1", alive=True))


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two ends of a TCP connection: those of a socket pair know no reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


class World:
    """A member whose agent asks for a stream, and the owner of its task.

    Attributes:
        owner: The owner's end of the tunnel, which the test plays.
        asked: How often the owner was looked up.
    """

    def __init__(self, *, lives: bool = True) -> None:
        self.asked, self.lives = 0, lives
        self.owners: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        passing = SimpleNamespace(connection=self.connection, lives=self.is_alive)
        member: Any = SimpleNamespace(ingress=Ingress(), passing=passing, locate=self.locate)
        self.tunnels = Tunnels(member, Forwarder(member), lambda _scope: NamedTask("t", "1", creates=False))

    async def locate(self, _task: str, *, creates: bool) -> Ownership:
        assert not creates
        self.asked += 1
        return OWNER

    async def is_alive(self, _peer: Peer) -> bool:
        return self.lives

    @asynccontextmanager
    async def connection(self, _peer: Peer) -> AsyncIterator[PeerConnection]:
        own, far = pair()
        self.owners.put_nowait(await asyncio.open_connection(sock=far))
        end = PeerConnection(*await asyncio.open_connection(sock=own))
        try:
            yield end
        finally:
            end.abort()

    async def begin(self, held: bytes = UPGRADE) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Let an agent ask for a stream; return its end."""
        agent, given = pair()
        self.tunnels.give(0, given, held)
        return await asyncio.open_connection(sock=agent)


async def asked(reader: asyncio.StreamReader) -> bytes:
    """Return the request that an owner has got, which names the task and the view first."""
    request = await reader.readuntil(b"\r\n\r\n")
    assert request.startswith(b"GET /t/t/r/1/x HTTP/1.1\r\nx-forkpoint-passed: 3 1 1 0 http t /\r\n")
    return request


@pytest.mark.parametrize("lives", [True, False])
def test_an_end_counts_only_of_an_owner_that_lives(*, lives: bool) -> None:
    """A killed process leaves the same end as one that has closed its stream."""

    async def go() -> None:
        world = World(lives=lives)
        reader, writer = await world.begin(UPGRADE + b"first")
        owner_reads, owner_writes = await world.owners.get()
        await asked(owner_reads)
        owner_writes.write(SWITCHED[:5])
        await owner_writes.drain()
        owner_writes.write(SWITCHED[5:])
        assert await reader.readexactly(len(SWITCHED)) == SWITCHED
        writer.write(b" second")
        writer.write_eof()
        assert await owner_reads.read() == b"first second"
        owner_writes.write(b"out")
        assert await reader.readexactly(3) == b"out"
        owner_writes.close()
        if lives:
            assert await reader.read() == b""
        else:
            with pytest.raises(ConnectionResetError):
                await reader.read()
        writer.close()
        await world.tunnels.aclose()

    asyncio.run(go())


def test_the_next_owner_gets_the_same_request() -> None:
    """An owner without the task, and one that dies before it answers, have taken nothing."""

    async def go() -> None:
        world = World()
        reader, writer = await world.begin()
        for answer in (ELSEWHERE, b"", SWITCHED):
            owner_reads, owner_writes = await world.owners.get()
            await asked(owner_reads)
            owner_writes.write(answer)
            if answer != SWITCHED:
                owner_writes.close()
        assert await reader.readexactly(len(SWITCHED)) == SWITCHED
        assert world.asked == 3
        # The agent leaves, and so does the tunnel.
        writer.transport.abort()
        assert await owner_reads.read() == b""
        owner_writes.close()
        await world.tunnels.aclose()

    asyncio.run(go())


def test_a_tunnel_that_closes_is_no_end() -> None:
    async def go() -> None:
        world = World()
        reader, writer = await world.begin()
        _, owner_writes = await world.owners.get()
        owner_writes.write(SWITCHED)
        assert await reader.readexactly(len(SWITCHED)) == SWITCHED
        await world.tunnels.aclose()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        owner_writes.close()

    asyncio.run(go())


def test_only_the_first_request_of_a_tunnel_is_a_peers() -> None:
    """What follows it was written by the agent, who may forge what peers say of requests."""
    hello = Hello(2, 6, b"n", is_tunnel=True)
    scope: dict[str, object] = {"state": {TUNNEL: Tunnelled(hello)}}
    assert [_peer_of(scope), _peer_of(scope)] == [hello, None]


def test_a_request_without_owner_is_refused_here() -> None:
    """This member's server knows how clients of its endpoint read a refusal, and takes it for the agent's own."""

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast("asyncio.Transport", transport)

        def data_received(self, data: bytes) -> None:
            assert data == UPGRADE
            self.transport.write(b"HTTP/1.1 401 Unauthorized\r\n\r\n")
            self.transport.close()

    def make_peer(**state: object) -> asyncio.Protocol:
        assert not state
        return Server()

    def refuse(_scope: Any) -> NamedTask:
        raise RefusalError(401, "token", "no token")

    async def go() -> None:
        world = World()
        world.tunnels.make_peer, world.tunnels._find = make_peer, refuse
        reader, writer = await world.begin()
        assert await reader.read() == b"HTTP/1.1 401 Unauthorized\r\n\r\n"
        writer.close()
        await world.tunnels.aclose()

    asyncio.run(go())
