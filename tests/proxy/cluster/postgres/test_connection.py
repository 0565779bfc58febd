"""Connections to a database that ends them, or that does not answer: every caller gets an answer or an error.

The event loop is the proxy's, uvloop: it treats sockets with errors otherwise than asyncio's.
"""

import asyncio
from typing import Any

import psycopg
import pytest
import uvloop

from proxy.cluster.postgres import connection as connection_module
from proxy.cluster.postgres.connection import Connection, DatabaseError, SteadyConnection, row_of
from proxy.cluster.postgres.database import ClusterDatabase
from sandboxes.task_owner import start
from tests.proxy.cluster.relay import Relay
from tests.sandboxes.postgres_cluster import Cluster

SECRET = b"the members' secret"


HELLO = b"R\0\0\0\x08\0\0\0\0" + b"Z\0\0\0\x05I"
"""A server's first words, without a password: the client is known, and the server is ready for a statement."""
LAST_WORDS = b"SFATAL\0C57P01\0Mterminating connection due to unexpected postmaster exit\0\0"


def test_last_words_of_a_server_are_an_error() -> None:
    """A server is killed: it has sent why it ends, and resets the connection when the next statement comes."""

    async def run() -> None:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1024)
            writer.write(HELLO)
            await writer.drain()
            greeted.set()
            await dies.wait()
            writer.write(b"E" + (len(LAST_WORDS) + 4).to_bytes(4, "big") + LAST_WORDS)
            writer.close()
            await writer.wait_closed()
            dead.set()

        greeted, dies, dead = asyncio.Event(), asyncio.Event(), asyncio.Event()
        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        dsn = f"host=127.0.0.1 port={port} user=nobody sslmode=disable gssencmode=disable"
        connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        await greeted.wait()
        dies.set()
        await dead.wait()
        async with asyncio.timeout(10):
            with pytest.raises(psycopg.OperationalError):
                await row_of(connection, "SELECT 1", ())
        await connection.close()
        server.close()

    uvloop.run(run())


async def ask(connection: Connection) -> tuple[Any, ...] | None:
    return await row_of(connection, "SELECT 1", ())


def test_callers_wait_for_a_silent_server_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server accepts connections and says nothing. A hundred callers wait as long as one, not one after another."""
    monkeypatch.setattr(connection_module, "PATIENCE_S", 0.2)

    async def run() -> None:
        accepted = list[asyncio.StreamWriter]()
        server = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        database = SteadyConnection(f"host=127.0.0.1 port={port} user=nobody sslmode=disable")
        errors = await asyncio.gather(*(database.run(ask) for _ in range(100)), return_exceptions=True)
        assert {type(error) for error in errors} == {DatabaseError}
        assert len(accepted) == 1
        # A later caller tries again.
        with pytest.raises(DatabaseError):
            await database.run(ask)
        assert len(accepted) == 2
        for writer in accepted:
            writer.close()
        server.close()

    uvloop.run(run())


def test_a_long_queue_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller does not wait for ever behind others, however long each of them takes."""
    monkeypatch.setattr(connection_module, "PATIENCE_S", 0.1)

    async def run() -> None:
        database, begun = SteadyConnection("host=127.0.0.1 port=1"), asyncio.Event()

        async def take_long(*_: object) -> None:
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(database, "_run", take_long)
        before = start(database.run(ask))
        await begun.wait()
        with pytest.raises(DatabaseError, match="did not answer in time"):
            await database.run(ask)
        before.cancel()
        await asyncio.wait([before])

    uvloop.run(run())


@pytest.mark.parametrize("closes", [True, False])
def test_a_connection_cut_anywhere_is_an_error(
    server: Cluster, dsn: str, monkeypatch: pytest.MonkeyPatch, *, closes: bool
) -> None:
    """The connection ends, or is silent, after any number of bytes: while it is made, prepared, or writes to the log.

    Each caller gets an answer or an error. Rows that were acknowledged are there, and all later statements work.
    """

    async def run() -> None:
        async with Relay(server.port).running() as relay:
            database = ClusterDatabase(relay.dsn(dsn), SECRET)
            await database.join("a", "a:1", None)
            assert await database.append("task", 1, None)
            row, acknowledged = 1, [1]
            for cut in range(0, 1200, 60 if closes else 200):
                await database.disconnect()
                monkeypatch.setattr(connection_module, "PATIENCE_S", 30.0 if closes else 0.3)
                relay.left_bytes, relay.closes = cut, closes
                calls = [database.append("task", row + 1, b"line"), database.owner("task"), database.beat()]
                async with asyncio.timeout(60):
                    outcomes = await asyncio.gather(*calls, return_exceptions=True)
                assert all(not isinstance(each, Exception) or type(each) is DatabaseError for each in outcomes)
                relay.left_bytes = None
                monkeypatch.setattr(connection_module, "PATIENCE_S", 30.0)
                if outcomes[0] is True:
                    acknowledged.append(row + 1)
                await database.disconnect()
                rows = [each.row async for page in database.read("task") for each in page]
                assert set(acknowledged) <= set(rows)
                row = rows[-1]
            assert await database.append("task", row + 1, b"line")
            assert await database.beat()
            await database.aclose()

    uvloop.run(run())


def test_a_defect_leaves_no_row_without_an_answer(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What writes the log fails in an unexpected way: the rows on their way get an error, and the next one is written.

    Otherwise all calls of this member would wait for ever.
    """

    async def run() -> None:
        database = ClusterDatabase(dsn, SECRET)
        await database.join("a", "a:1", None)
        assert await database.append("task", 1, None)

        async def fail(*_: object) -> None:
            raise RuntimeError("a defect")

        with monkeypatch.context() as broken:
            broken.setattr("proxy.cluster.postgres.database.rows_of", fail)
            async with asyncio.timeout(30):
                errors = await asyncio.gather(
                    database.append("task", 2, b"line"), database.append("other", 2, b"line"), return_exceptions=True
                )
        assert [type(error) for error in errors] == [DatabaseError, DatabaseError]
        async with asyncio.timeout(30):
            assert await database.append("task", 2, b"line")
        await database.aclose()

    uvloop.run(run())
