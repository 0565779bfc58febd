"""What both ends of a link do, over real sockets."""

import asyncio

import pytest

from proxy.cluster.link import connection
from proxy.cluster.link.links import Links
from proxy.cluster.link.opener import LinkLostError
from tests.proxy.cluster.link.ends import ASKER, SECRET, attempt, echo, serving


def test_a_silent_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine may be gone, and then no packet says so."""
    monkeypatch.setattr(connection, "SILENT_S", 0.5)
    monkeypatch.setattr(connection, "PING_S", 0.05)

    async def run() -> None:
        async with serving(echo) as (_, peer):
            # A relay that stops to pass anything on.
            target, quiet = peer.url.rpartition(":"), asyncio.Event()

            async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    if not quiet.is_set():
                        sink.write(data)

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                their_reader, their_writer = await asyncio.open_connection(target[0], int(target[2]))
                try:
                    await asyncio.gather(copy(reader, their_writer), copy(their_reader, writer))
                except OSError:
                    pass
                finally:
                    writer.close()
                    their_writer.close()

            between = await asyncio.start_server(relay, "127.0.0.1", 0)
            port = between.sockets[0].getsockname()[1]
            asker = Links(SECRET, ASKER)
            far = peer._replace(url=f"127.0.0.1:{port}")
            # On a busy machine the first links may seem silent too.
            while await attempt(asker.ask(far, b"x")) != b"1.7:x":
                pass
            quiet.set()
            with pytest.raises(LinkLostError):
                await asker.ask(far, b"y")
            between.close()

    asyncio.run(run())
