"""Channels: messages of any size in both directions, never more under way than the window, and a clear end."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from proxy.cluster.link.channels import (
    MAX_CHANNELS,
    PIECE_BYTES,
    WINDOW_BYTES,
    ChannelEndedError,
    Channels,
    LinkChannel,
)
from proxy.cluster.link.frames import Frame, FrameKind, LinkError


class Pipe:
    """Two ends of a link without a network. Frames to `b` wait until `deliver`; those to `a` arrive at once."""

    def __init__(self) -> None:
        self.waiting: list[Frame] = []
        self.sent = 0
        self.a: Channels = Channels(self._to_b, self._drained)
        self.b: Channels = Channels(self.a_got, self._drained)

    def _to_b(self, kind: FrameKind, stream: int, content: bytes) -> None:
        self.sent += len(content)
        self.waiting.append(Frame(kind, stream, content))

    def a_got(self, kind: FrameKind, stream: int, content: bytes) -> None:
        self.a.got(Frame(kind, stream, content))

    def deliver(self) -> None:
        waiting, self.waiting = self.waiting, []
        for frame in waiting:
            self.b.got(frame)

    async def _drained(self) -> None: ...


def running(test: Callable[[Pipe, LinkChannel, LinkChannel], Awaitable[None]]) -> None:
    async def run() -> None:
        pipe = Pipe()
        async with asyncio.timeout(30):
            await test(pipe, pipe.a.open(1), pipe.b.open(1))

    asyncio.run(run())


def test_messages_arrive_as_they_were() -> None:
    """Small, empty, and larger than the window; the end comes behind them."""

    async def test(pipe: Pipe, a: LinkChannel, b: LinkChannel) -> None:
        messages = [b"x", b"", bytes(range(256)) * (WINDOW_BYTES // 100), b"last"]
        for message in messages:
            a.write(message)
        a.close()
        received: list[bytes | None] = []
        reading = asyncio.ensure_future(b.receive())
        while None not in received:
            pipe.deliver()
            await asyncio.sleep(0)
            if reading.done():
                received.append(reading.result())
                reading = asyncio.ensure_future(b.receive())
        assert received == [*messages, None]

    running(test)


def test_reader_that_does_not_read_stops_the_sender() -> None:
    """No more than a window is under way; a message that was read makes room."""

    async def test(pipe: Pipe, a: LinkChannel, b: LinkChannel) -> None:
        messages = [bytes(PIECE_BYTES) for _ in range(100)]
        sending = asyncio.gather(*(a.send(message) for message in messages))
        await asyncio.sleep(0)
        pipe.deliver()
        assert pipe.sent <= WINDOW_BYTES + PIECE_BYTES
        assert not sending.done()
        for message in messages:
            while pipe.waiting:
                pipe.deliver()
            assert await b.receive() == message
        await sending

    running(test)


def test_peer_that_sends_too_much_is_refused() -> None:
    """The window holds whatever the peer does, also with empty pieces."""

    async def test(_pipe: Pipe, _a: LinkChannel, b: LinkChannel) -> None:
        def flood() -> None:
            for _ in range(WINDOW_BYTES):
                b.got(Frame(FrameKind.DATA, 1, b""))

        with pytest.raises(LinkError, match="more of a stream than is read"):
            flood()

    running(test)


@pytest.mark.parametrize("ends", ["close", "link"])
def test_end_wakes_both_sides(ends: str) -> None:
    """A sender that waits for room and a reader learn that the peer or the link has gone."""

    async def test(pipe: Pipe, a: LinkChannel, b: LinkChannel) -> None:
        sending = asyncio.ensure_future(a.send(bytes(2 * WINDOW_BYTES)))
        reading = asyncio.ensure_future(a.receive())
        await asyncio.sleep(0)
        (b.abort if ends == "close" else pipe.a.lose)()
        with pytest.raises(ChannelEndedError):
            await sending
        assert await reading is None

    running(test)


def test_channels_of_a_link_are_limited() -> None:
    """A closed one makes room for the next."""

    async def test(pipe: Pipe, a: LinkChannel, _b: LinkChannel) -> None:
        for stream in range(2, MAX_CHANNELS + 1):
            pipe.a.open(stream)
        with pytest.raises(ChannelEndedError):
            pipe.a.open(0)
        a.close()
        pipe.a.open(0)

    running(test)
