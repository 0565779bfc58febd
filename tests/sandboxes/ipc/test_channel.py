"""The proxy's end of a socket to another process of ours."""

import asyncio
import socket

from sandboxes.ipc.channel import Channel
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
