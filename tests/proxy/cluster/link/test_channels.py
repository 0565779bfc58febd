"""Channels: messages of any size in both directions, a sender that waits for its reader, and a clear end."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from proxy.cluster.link.channels import MAX_MESSAGE_BYTES, WINDOW_BYTES, ChannelEndedError, PeerChannel


async def carry(one: PeerChannel, other: PeerChannel, piece: int) -> None:
    """Carry what one end sends to the other one, in pieces of some size."""
    async for data in one.outgoing():
        for at in range(0, len(data), piece):
            await other.got(data[at : at + piece])
    other.lose()


def running(test: Callable[[PeerChannel, PeerChannel], Awaitable[None]], piece: int = 1 << 16) -> None:
    async def run() -> None:
        a, b = PeerChannel(), PeerChannel()
        carrying = [asyncio.ensure_future(carry(*ends, piece)) for ends in ((a, b), (b, a))]
        async with asyncio.timeout(30):
            await test(a, b)
        for each in carrying:
            each.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_messages_arrive_as_they_were(piece: int) -> None:
    """Small, empty, and in whatever pieces; the end comes behind them."""

    async def test(a: PeerChannel, b: PeerChannel) -> None:
        messages = [b"x", b"", bytes(range(256)) * 4, b"last"]
        for message in messages:
            a.write(message)
        a.close()
        assert [await b.receive() for _ in range(5)] == [*messages, None]
        # What is written to an end that is closed is dropped.
        a.write(b"late")
        assert await b.receive() is None

    running(test, piece)


def test_reader_that_does_not_read_stops_the_sender() -> None:
    """About a window waits at either end; a message that was read makes room."""

    async def test(a: PeerChannel, b: PeerChannel) -> None:
        message, count = bytes(WINDOW_BYTES // 4), 40

        async def send() -> None:
            for _ in range(count):
                await a.send(message)

        sending = asyncio.create_task(send())
        await asyncio.sleep(0.05)
        assert not sending.done()
        assert len(b._in) <= 5
        for _ in range(count):
            assert await b.receive() == message
        await sending

    running(test)


def test_empty_messages_use_up_the_window_too() -> None:
    """A peer could fill the memory of this member with them."""

    async def run() -> None:
        channel = PeerChannel()
        getting = asyncio.create_task(channel.got(bytes(4) * (WINDOW_BYTES // 50)))
        await asyncio.sleep(0.01)
        assert not getting.done()
        while not getting.done():
            assert await channel.receive() == b""
            await asyncio.sleep(0)

    asyncio.run(run())


@pytest.mark.parametrize("ends", ["abort", "lose"])
def test_end_wakes_both_sides(ends: str) -> None:
    """A sender that waits for room and a reader learn that the peer or the connection has gone."""

    async def test(a: PeerChannel, b: PeerChannel) -> None:
        sending = asyncio.ensure_future(a.send(bytes(9 * WINDOW_BYTES)))
        reading = asyncio.ensure_future(a.receive())
        await asyncio.sleep(0.01)
        (b.abort if ends == "abort" else a.lose)()
        with pytest.raises(ChannelEndedError):
            await sending
        assert await reading is None

    running(test)


def test_an_end_that_is_given_up_cuts_its_connection() -> None:
    """Without what is queued."""
    cut: list[int] = []

    async def run() -> None:
        channel = PeerChannel(lambda: cut.append(1))
        channel.write(b"x")
        channel.abort()
        assert [data async for data in channel.outgoing()] == []
        assert await channel.receive() is None

    asyncio.run(run())
    assert cut == [1]


def test_a_huge_message_is_not_waited_for() -> None:
    """Its length alone ends the channel."""

    async def run() -> None:
        with pytest.raises(ChannelEndedError):
            await PeerChannel().got((MAX_MESSAGE_BYTES + 1).to_bytes(4))

    asyncio.run(run())
