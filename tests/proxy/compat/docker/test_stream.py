"""Docker: connections that become streams."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from proxy.compat.docker.stream import MAX_BUFFERED_BYTES, PADDED_HEAD_BYTES, StreamConnection
from proxy.refusals import RefusalError


class Transport:
    """Records what a stream does with its connection."""

    def __init__(self) -> None:
        self.written, self.holds, self.ended = b"", list[bool](), False

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        """Accept more bytes at once."""

    def end(self) -> None:
        self.ended = True

    def connection(self, *, upgrade: bool = True, padded: bool = False) -> StreamConnection:
        return StreamConnection(self.write, self.drain, self.holds.append, self.end, upgrade=upgrade, padded=padded)


def run(test: Callable[[Transport], Awaitable[None]]) -> None:
    async def go() -> None:
        await test(Transport())

    asyncio.run(go())


@pytest.mark.parametrize(("upgrade", "status"), [(True, b"HTTP/1.1 101 UPGRADED"), (False, b"HTTP/1.1 200 OK")])
def test_head_is_sent_once(*, upgrade: bool, status: bytes) -> None:
    """Several places may open a stream; the client gets one head."""

    async def go(transport: Transport) -> None:
        connection = transport.connection(upgrade=upgrade)
        connection.open(tty=True)
        connection.open(tty=True)
        assert transport.written.startswith(status)
        assert transport.written.count(b"HTTP/1.1") == 1

    run(go)


def test_padded_head_fills_the_clients_buffer() -> None:
    """Docker's Python SDK loses what its buffer contains after the head, so the head has the buffer's size."""

    async def go(transport: Transport) -> None:
        transport.connection(padded=True).open(tty=True)
        assert len(transport.written) == PADDED_HEAD_BYTES
        assert transport.written.endswith(b"\r\n\r\n")

    run(go)


def test_stdin_is_read_to_its_end() -> None:
    """Stdin is complete when the client closes its side; a full buffer pauses the connection until it is read."""

    async def go(transport: Transport) -> None:
        connection = transport.connection()
        connection.feed(b"x" * (MAX_BUFFERED_BYTES + 1))
        assert transport.holds == [True]
        connection.end_input()
        assert len(await connection.input(2 * MAX_BUFFERED_BYTES)) == MAX_BUFFERED_BYTES + 1
        assert transport.holds[-1] is False

    run(go)


def test_too_much_stdin_is_refused() -> None:
    """The limit counts before the end of stdin: an endless client is refused."""

    async def go(transport: Transport) -> None:
        connection = transport.connection()
        connection.feed(b"12345")
        with pytest.raises(RefusalError) as refused:
            await connection.input(4)
        assert refused.value.status == 413

    run(go)


def test_lost_connection_is_not_written_to() -> None:
    """After a disconnect nothing is sent, stdin ends, and `disconnected` returns."""

    async def go(transport: Transport) -> None:
        connection = transport.connection()
        connection.lose()
        await connection.disconnected()
        connection.open(tty=True)
        await connection.send(b"x")
        connection.close()
        assert (transport.written, transport.ended, await connection.input(1)) == (b"", False, b"")

    run(go)
