"""A connection to the cluster's database that is opened again after it broke, and what reads rows from it."""

import asyncio
import contextlib
import math
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psycopg
from psycopg.rows import tuple_row

T = TypeVar("T")
Connection = psycopg.AsyncConnection[tuple[Any, ...]]

PATIENCE_S = 2.0
"""How long a statement may take before its connection is given up, in seconds. Shorter than a lease."""
GRACE_S = 1.0
"""How long after that the statement may take to notice, in seconds: some milliseconds, or longer on a busy machine."""
QUEUED = 4
"""How long a statement waits for those before it, as a multiple of `PATIENCE_S`."""
_DURABLE = """
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
"""
"""A server may be set up to lose its last transactions in a crash. No answer that was sent may be among them."""

_SILENT = "the cluster's database failed: it did not answer in time"


class DatabaseError(RuntimeError):
    """The database did not answer. Whether the statement ran is not known."""


class SteadyConnection:
    """One connection, opened again after it broke. Its statements run one after the other.

    However silent the server is, a caller waits for `QUEUED + 1` times `PATIENCE_S` at most. When a statement was not
    answered in time, the callers that wait behind it get the same error. One after the other, a hundred of them would
    wait for minutes.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn, self._lock = dsn, asyncio.Lock()
        self._connection: Connection | None = None
        # When a statement was last given up, as a time of the event loop.
        self._silent_at = -math.inf

    async def run(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run statements; after an error the connection is given up. Raises DatabaseError."""
        loop = asyncio.get_running_loop()
        came_at = loop.time()
        try:
            async with asyncio.timeout_at(came_at + QUEUED * PATIENCE_S):
                await self._lock.acquire()
        except TimeoutError:
            raise DatabaseError(_SILENT) from None
        try:
            if self._silent_at > came_at:
                raise DatabaseError(_SILENT)
            until = loop.time() + PATIENCE_S
            try:
                return await self._run(work, until)
            except (psycopg.Error, OSError, TimeoutError) as error:
                # A timer of uvloop may come a millisecond early.
                if loop.time() >= until - 0.01:
                    self._silent_at = loop.time()
                raise DatabaseError(f"the cluster's database failed: {_sentence(error)}") from error
        finally:
            self._lock.release()

    async def _run(self, work: Callable[[Connection], Awaitable[T]], until: float) -> T:
        """Run statements until a time of the event loop; after any error the connection is given up."""
        try:
            is_new = self._connection is None
            if self._connection is None:
                async with asyncio.timeout_at(until):
                    self._connection = await self._connect()
            # A task that is cancelled in a statement makes psycopg ask the server to cancel it, and wait for that.
            # Behind a partition this takes ten seconds. So the socket is ended first, and that ends the statement; a
            # cancellation follows only for what this did not end.
            impatience = asyncio.get_running_loop().call_at(until, _shut_down, self._connection)
            try:
                async with asyncio.timeout_at(until + GRACE_S):
                    if is_new:
                        await self._connection.execute(_DURABLE)
                    return await work(self._connection)
            finally:
                impatience.cancel()
        except BaseException:
            # A statement that was cut off leaves the connection in an unknown state.
            await self._give_up()
            raise

    async def aclose(self) -> None:
        """Close the connection."""
        await self._give_up()

    async def _connect(self) -> Connection:
        try:
            return await psycopg.AsyncConnection.connect(
                self._dsn, autocommit=True, row_factory=tuple_row, application_name="forkpoint", client_encoding="UTF8"
            )
        except psycopg.ProgrammingError:
            # The error shows parts of the DSN, which may be its password.
            raise DatabaseError("the URL is not like postgresql://USER:PASSWORD@HOST/DATABASE") from None

    async def _give_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def _sentence(error: BaseException) -> str:
    """Return what an error of psycopg says, in one line and without libpq's question whether the server is running."""
    text = " ".join(str(error).split()) or "it did not answer in time"
    return text.removeprefix("connection failed: ").partition(" Is the server running")[0].rstrip(".")


async def run_all(connection: Connection, statements: str, values: dict[str, Any]) -> None:
    """Run several statements as one message."""
    async with psycopg.AsyncClientCursor(connection) as cursor:
        await cursor.execute(statements, values)


async def second_row(connection: Connection, statements: str, values: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the first row of the second statement. One message: a client that dies holds no lock."""
    async with psycopg.AsyncClientCursor(connection) as cursor:
        await cursor.execute(statements, values)
        cursor.nextset()
        return await cursor.fetchone()


async def rows_of(
    connection: Connection, statement: str, values: tuple[Any, ...], *, prepare: bool | None = None
) -> list[tuple[Any, ...]]:
    """Return all rows of a statement. They come in the binary form, which is half as long for bytes."""
    cursor = await connection.execute(statement, values, binary=True, prepare=prepare)
    return await cursor.fetchall()


async def row_of(connection: Connection, statement: str, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the first row of a statement; None if it has none."""
    rows = await rows_of(connection, statement, values)
    return rows[0] if rows else None


def _shut_down(connection: Connection) -> None:
    """End a connection's socket, so that the statement which waits for it fails."""
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.shutdown(socket.SHUT_RDWR)
