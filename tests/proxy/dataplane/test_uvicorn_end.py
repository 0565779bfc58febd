"""The transport that uvicorn writes to: heads leave with their bodies, and idle connections stay open."""

import asyncio
from typing import cast

from proxy.dataplane.uvicorn_end import UvicornTransport


class Connection:
    is_idle = False

    def hand_over(self) -> None: ...


class Recorded:
    """A transport that records what is written."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def transports() -> tuple[Recorded, UvicornTransport, Connection]:
    real, connection = Recorded(), Connection()
    loop = asyncio.get_running_loop()
    return real, UvicornTransport(connection, cast("asyncio.Transport", real), loop), connection


def test_head_and_body_leave_in_one_write() -> None:
    async def go() -> None:
        real, transport, _ = transports()
        transport.write(b"head ")
        transport.write(b"body")
        assert real.writes == [b"head body"]
        transport.write(b"more")
        await asyncio.sleep(0)
        assert real.writes == [b"head body", b"more"]

    asyncio.run(go())


def test_head_without_body_leaves_once() -> None:
    async def go() -> None:
        real, transport, _ = transports()
        transport.write(b"head")
        assert real.writes == []
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert real.writes == [b"head"]
        transport.write(b"body")
        assert real.writes == [b"head", b"body"]

    asyncio.run(go())


def test_each_response_joins_its_own_head() -> None:
    """The end of a response writes a head that is still held, so that a hit cannot overtake it."""

    async def go() -> None:
        real, transport, _ = transports()
        transport.write(b"head 1")
        transport.begin_response()
        assert real.writes == [b"head 1"]
        transport.write(b"head 2 ")
        transport.write(b"body 2")
        assert real.writes == [b"head 1", b"head 2 body 2"]

    asyncio.run(go())


def test_held_head_leaves_before_the_close() -> None:
    async def go() -> None:
        real, transport, _ = transports()
        transport.write(b"head")
        transport.close()
        assert (real.writes, real.closed, transport.is_closing()) == ([b"head"], True, True)
        await asyncio.sleep(0)
        assert real.writes == [b"head"]

    asyncio.run(go())


def test_nothing_is_written_to_a_connection_that_its_client_has_closed() -> None:
    """uvloop raises there, and the log would call the end of a client an error of the proxy."""

    async def go() -> None:
        real, transport, _ = transports()
        transport.write(b"head")
        real.close()
        transport.write(b"body")
        transport.write(b"more")
        await asyncio.sleep(0)
        assert real.writes == []

    asyncio.run(go())


def test_uvicorn_cannot_close_an_idle_connection() -> None:
    async def go() -> None:
        real, transport, connection = transports()
        connection.is_idle = True
        transport.close()
        assert not real.closed

    asyncio.run(go())
