"""The end that answers, over real sockets."""

import asyncio

import pytest

from proxy.cluster.link import connection, server
from proxy.cluster.link.frames import HELLO_BYTES, Hello
from proxy.cluster.link.links import Links
from proxy.cluster.link.opener import LinkLostError
from proxy.cluster.postgres.joining import Membership
from tests.proxy.cluster.link.ends import ASKER, SECRET, attempt, echo, serving


def test_unproven_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody without the secret can take the room of members."""
    monkeypatch.setattr(server, "MAX_UNPROVEN", 2)
    monkeypatch.setattr(connection, "HANDSHAKE_S", 60.0)

    async def run() -> None:
        async with serving(echo) as (_, peer):
            host, _, port = peer.url.rpartition(":")
            asker = Links(SECRET, ASKER)
            assert await asker.ask(peer, b"x") == b"1.7:x"
            held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
            for _, writer in held:
                writer.write(Hello(9, 9, 9, b"n" * 32).pack())
            for reader, _ in held:
                assert len(await reader.readexactly(HELLO_BYTES)) == HELLO_BYTES
            # A member gets in, and the oldest of them is closed, with or without a word.
            late = Links(SECRET, Membership("cluster", 3, 7))
            assert await late.ask(peer, b"z") == b"3.7:z"
            rest = await attempt(held[0][0].read())
            assert rest is None or isinstance(rest, bytes)
            assert await asker.ask(peer, b"y") == b"1.7:y"
            for _, writer in held:
                writer.close()
            asker.close()
            late.close()

    asyncio.run(run())


def test_a_newer_link_ends_the_older() -> None:
    """What the older one still brings was sent before."""

    async def run() -> None:
        async with serving(echo) as (_, peer):
            older, newer = Links(SECRET, ASKER), Links(SECRET, ASKER._replace(boot=8))
            assert await older.ask(peer, b"x") == b"1.7:x"
            assert await newer.ask(peer, b"x") == b"1.8:x"
            # The first attempt may find its link still open; a new one is refused.
            outcomes = [await attempt(older.ask(peer, b"y")) for _ in range(2)]
            assert isinstance(outcomes[-1], LinkLostError)
            assert await newer.ask(peer, b"z") == b"1.8:z"
            older.close()
            newer.close()

    asyncio.run(run())
