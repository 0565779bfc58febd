"""The proxy's end of a socket to another process of ours."""

import asyncio
import os
import socket
from pathlib import Path

import pytest
import uvloop

from sandboxes.ipc.channel import Channel, ChannelClosedError
from sandboxes.ipc.codec import pack_message
from sandboxes.ipc.frames import HEADER
from sandboxes.ipc.launch_messages import WritePages
from sandboxes.ipc.messages import Done


def test_a_close_ends_the_wait_of_a_sender() -> None:
    """The event loop forgets the descriptor at once: its number may be another connection's a moment later."""

    async def go() -> None:
        ours, theirs = socket.socketpair()
        channel, number = Channel(ours), ours.fileno()
        # The peer reads nothing.
        sending = asyncio.ensure_future(channel.post(Done(), body=bytes(8 << 20)))
        with theirs:
            await asyncio.sleep(0)
            channel.close()
            assert not asyncio.get_running_loop().remove_writer(number)
            await asyncio.wait({sending}, timeout=30)
            assert sending.done()

    asyncio.run(go())


def test_the_end_behind_the_last_answer_is_noticed() -> None:
    """A peer is killed after one answer and before it reads the next request.

    The answer and the end arrive as one event, after which uvloop watches the socket no more.
    """

    async def go() -> None:
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        first, second = (asyncio.ensure_future(channel.ask(WritePages([]))) for _ in range(2))
        await asyncio.sleep(0)
        assert theirs.recv(1)
        theirs.send(pack_message(Done()))
        # What it has not read makes the kernel reset the connection.
        theirs.close()
        async with asyncio.timeout(10):
            assert (await first).message == Done()
            with pytest.raises(ChannelClosedError):
                await second
            with pytest.raises(ChannelClosedError):
                await channel.ask(WritePages([]))

    uvloop.run(go())


def test_other_sockets_have_their_turn_between_the_messages_of_channels() -> None:
    """What a message leads to may take a millisecond. A request that comes meanwhile waits for one of them only."""
    order: list[str] = []

    async def handle(channel: Channel, request: socket.socket) -> None:
        await channel.receive()
        order.append("message")
        request.send(b"x")

    async def go() -> None:
        ends = [socket.socketpair() for _ in range(3)]
        client, server = socket.socketpair()
        channels = [Channel(ours) for ours, _ in ends]
        handled = [asyncio.ensure_future(handle(channel, client)) for channel in channels]
        await asyncio.sleep(0)
        server.setblocking(False)
        asyncio.get_running_loop().add_reader(server, lambda: order.append("request") if server.recv(1) else None)
        for _, theirs in ends:
            theirs.send(pack_message(Done()))
        async with asyncio.timeout(10):
            await asyncio.gather(*handled)
        asyncio.get_running_loop().remove_reader(server)
        for end in (client, server, *(theirs for _, theirs in ends)):
            end.close()
        for channel in channels:
            channel.close()

    uvloop.run(go())
    assert order[:5] == ["message", "request", "message", "request", "message"]


# -- a peer that was taken over --------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def send_fds(end: socket.socket, data: bytes) -> None:
    with Path(os.devnull).open() as file:
        socket.send_fds(end, [data], [file.fileno()] * 10)


@pytest.mark.parametrize(
    "sent",
    [
        [b"\0"] * 8,
        [pack_message(Done())] * 2,
        [HEADER.pack(1 << 20, 0, 10)],
        [pack_message(Done(), fds=10)],
    ],
    ids=["more than any frame has", "of no frame", "of half a frame", "of a frame that nobody receives"],
)
def test_descriptors_of_a_hostile_peer_do_not_stay(sent: list[bytes]) -> None:
    async def go() -> None:
        ours, theirs = socket.socketpair()
        before = descriptors()
        channel = Channel(ours)
        with theirs:
            for data in sent:
                send_fds(theirs, data)
        async with asyncio.timeout(30):
            while channel.lost is None:  # noqa: ASYNC110 - nothing else reports the end
                await asyncio.sleep(0)
        channel.close()
        assert descriptors() == before - 2

    asyncio.run(go())


def test_messages_that_nobody_receives_stay_with_their_sender() -> None:
    """The kernel's buffer fills, and the peer waits. Nothing is lost, and requests are answered all the same."""

    async def go() -> None:
        ours, theirs = socket.socketpair()
        channel, frame, sent = Channel(ours), pack_message(Done(), bytes(1000)), 0
        theirs.setblocking(False)
        with theirs:
            for _ in range(200):
                try:
                    while True:
                        assert theirs.send(frame) == len(frame)
                        sent += 1
                except BlockingIOError:
                    await asyncio.sleep(0)
            assert sent < 3000
            async with asyncio.timeout(30):
                assert await channel.ask(WritePages([]))
                for _ in range(sent - 1):
                    assert len((await channel.receive()).body) == 1000
        channel.close()

    asyncio.run(go())
