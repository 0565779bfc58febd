"""The end that accepts, over real sockets."""

import asyncio

import pytest

from proxy.cluster.link import listener
from proxy.cluster.link.greeting import HELLO_BYTES, PROOF_BYTES, Hello, proof
from proxy.cluster.link.passing import Passing
from proxy.cluster.postgres.database import Peer
from proxy.cluster.postgres.joining import Membership
from tests.proxy.cluster.link.ends import ANSWERER, ASKER, SECRET, accepting


class Recorded(asyncio.Protocol):
    """The protocol of a peer's connection, which says whose it is and what has come."""

    def __init__(self, hello: Hello) -> None:
        self._hello = hello

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(b"%d:%b" % (self._hello.member, data))


async def greet(peer: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = peer.url.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def test_what_comes_behind_the_proof_is_the_application_s() -> None:
    """The greeting may come in pieces, and the first request in the same packet."""

    async def run() -> None:
        async with accepting(Recorded) as peer:
            reader, writer = await greet(peer)
            hello = Hello(ASKER.number, ASKER.boot, b"n" * 32)
            for byte in hello.pack():
                writer.write(bytes([byte]))
                await asyncio.sleep(0)
            answer = await reader.readexactly(HELLO_BYTES + PROOF_BYTES)
            own = Hello.unpack(answer[:HELLO_BYTES])
            assert (own.member, own.boot) == (ANSWERER.number, ANSWERER.boot)
            writer.write(proof(SECRET, "cluster", hello, own, of_opener=True) + b"request")
            assert await reader.readexactly(9) == b"1:request"
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("secret", [b"another secret", SECRET])
def test_without_the_proof_nothing_is_taken(secret: bytes) -> None:
    """Not even with the proof that the other side has just sent."""

    async def run() -> None:
        async with accepting(Recorded) as peer:
            reader, writer = await greet(peer)
            hello = Hello(ASKER.number, ASKER.boot, b"n" * 32)
            writer.write(hello.pack())
            own = Hello.unpack((await reader.readexactly(HELLO_BYTES + PROOF_BYTES))[:HELLO_BYTES])
            # With the right secret, it is the proof of the wrong side.
            writer.write(proof(secret, "cluster", hello, own, of_opener=secret != SECRET) + b"request")
            (rest,) = await asyncio.gather(reader.read(), return_exceptions=True)
            assert rest == b"" or isinstance(rest, ConnectionError)
            writer.close()

    asyncio.run(run())


def test_unproven_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody without the secret can take the room of members."""
    monkeypatch.setattr(listener, "MAX_UNPROVEN", 2)
    monkeypatch.setattr(listener, "HANDSHAKE_S", 60.0)

    async def run() -> None:
        async with accepting(Recorded) as peer:
            held = [await greet(peer) for _ in range(2)]
            for _, writer in held:
                writer.write(Hello(9, 9, b"n" * 32).pack())
            for reader, _ in held:
                assert len(await reader.readexactly(HELLO_BYTES)) == HELLO_BYTES
            # A member gets in, and the oldest of them is closed, with or without a word.
            late = await Passing(SECRET, Membership("cluster", 3, 7)).open(peer)
            await late.send(b"z")
            assert await late.receive() == b"3:z"
            rest = await asyncio.gather(held[0][0].read(), return_exceptions=True)
            assert isinstance(rest[0], bytes | ConnectionError)
            late.abort()
            for _, writer in held:
                writer.close()

    asyncio.run(run())
