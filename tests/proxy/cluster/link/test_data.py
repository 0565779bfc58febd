"""Data connections over real sockets: they are taken by their tokens, and carry bytes in both directions."""

import asyncio
import socket

import pytest

from proxy.cluster.link.data import ExpectedData, open_data
from proxy.cluster.link.frames import LinkError
from tests.proxy.cluster.link.ends import attempt, echo, serving

TOKEN = b"t" * 32


def exchanged(here: socket.socket, there: socket.socket) -> None:
    for one, other in ((here, there), (there, here)):
        one.sendall(b"x" * 100_000)
        one.shutdown(socket.SHUT_WR)
        with other.makefile("rb") as file:
            assert len(file.read()) == 100_000


def test_bytes_go_in_both_directions() -> None:
    async def run() -> None:
        async with asyncio.timeout(30), serving(echo) as (server, peer):
            with server.data.expected(TOKEN) as take:
                # Twice: a sandbox has one token, and a connection for each large unit.
                for _ in range(2):
                    here, there = await asyncio.gather(open_data(peer, TOKEN), take())
                    with here, there:
                        await asyncio.to_thread(exchanged, here, there)

    asyncio.run(run())


def test_connections_that_nobody_expects_are_closed() -> None:
    """Neither a token that was guessed nor one whose sandbox has ended opens anything."""

    async def run() -> None:
        async with asyncio.timeout(30), serving(echo) as (server, peer):
            with server.data.expected(TOKEN), pytest.raises(ConnectionError):
                await open_data(peer, b"g" * 32)
            with pytest.raises(ConnectionError):
                await open_data(peer, TOKEN)
            host, _, port = peer.url.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"FKPD" + b"g" * 40)
            assert await attempt(reader.read()) in (b"", None)
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("tokens", [[b"short"], [TOKEN, TOKEN]])
def test_tokens_are_whole_and_used_once(tokens: list[bytes]) -> None:
    data = ExpectedData()
    with pytest.raises(LinkError), data.expected(tokens[0]), data.expected(tokens[-1]):
        raise AssertionError


def test_connection_that_is_not_taken_is_closed() -> None:
    """The sandbox ended between the greeting and the transfer."""
    data, (here, there) = ExpectedData(), socket.socketpair()
    with here:

        async def run() -> None:
            with data.expected(TOKEN):
                data.take(TOKEN, there)

        asyncio.run(run())
        assert here.recv(1) == b""
