"""Channels: messages in both directions, as the bodies of one HTTP request and its response.

A sender waits when its peer does not read: each end holds about `WINDOW_BYTES`, and what is on the way is limited by
the connection. The end of a channel says nothing about whether what it carried was complete: the messages must say so.
"""

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable

WINDOW_BYTES = 256 << 10
"""Bytes of messages that wait for this member to take them, from which it reads no more."""
MAX_MESSAGE_BYTES = 80 << 20
"""Most bytes of a message: the largest body of a request (64 MiB by default) and its head."""
_OVERHEAD_BYTES = 64
"""What a message counts beside its bytes, so that empty ones use up the window too."""
_SIZE = struct.Struct("!I")


class ChannelEndedError(ConnectionError):
    """The peer, or the end of the connection, has ended the channel."""


class PeerChannel:
    """One end of a channel."""

    def __init__(self, cut: Callable[[], object] = lambda: None) -> None:
        """Begin a channel. `cut` is called when this end gives it up."""
        self._cut, self.ended = cut, asyncio.Event()
        self._out, self._in = deque[bytes](), deque[bytes]()
        self._held, self._unread = bytearray(), 0
        self._is_sending = self._is_closing = False
        self._changed = asyncio.Event()

    def write(self, message: bytes) -> None:
        """Queue a message; `drain` waits until the peer has room for it. Without a peer it is dropped."""
        if not self._is_closing and not self.ended.is_set():
            self._out.append(_SIZE.pack(len(message)) + message)
            self._note_change()

    async def drain(self) -> None:
        """Wait until all that was written is on its way, or the channel has ended."""
        while (self._out or self._is_sending) and not self.ended.is_set():
            await self._changed.wait()

    async def send(self, message: bytes) -> None:
        """Send a message, as soon as the peer has room for it. Raises ChannelEndedError: the peer reads no more."""
        self.write(message)
        await self.drain()
        if self.ended.is_set():
            raise ChannelEndedError("the stream has ended")

    async def receive(self) -> bytes | None:
        """Return the next message of the peer; None if none follows."""
        while not self._in:
            if self.ended.is_set() or self._is_closing:
                return None
            await self._changed.wait()
        message = self._in.popleft()
        self._unread -= len(message) + _OVERHEAD_BYTES
        self._note_change()
        return message

    def close(self) -> None:
        """Send what is queued, then end the channel. Idempotent."""
        self._is_closing = True
        self._note_change()

    def abort(self) -> None:
        """End the channel without what is queued. Idempotent."""
        self._out.clear()
        self.close()
        self._cut()

    # -- called by the connection ------------------------------------------------------------------------------------

    async def outgoing(self) -> AsyncIterator[bytes]:
        """Yield the bytes for the peer, until this end is closed or the peer has ended the channel."""
        while True:
            while not self._out:
                if self._is_closing or self.ended.is_set():
                    return
                await self._changed.wait()
            data = b"".join(self._out)
            self._out.clear()
            self._is_sending = True
            yield data
            self._is_sending = False
            self._note_change()

    async def got(self, data: bytes) -> None:
        """Take bytes of the peer; wait while too many of them were not taken by `receive`. Raises ChannelEndedError."""
        self._held += data
        while len(self._held) >= _SIZE.size:
            (size,) = _SIZE.unpack_from(self._held)
            if size > MAX_MESSAGE_BYTES:
                raise ChannelEndedError(f"a message of a stream has {size} bytes")
            end = _SIZE.size + size
            if len(self._held) < end:
                break
            self._in.append(bytes(self._held[_SIZE.size : end]))
            self._unread += size + _OVERHEAD_BYTES
            del self._held[:end]
        self._note_change()
        while self._unread > WINDOW_BYTES and not self._is_closing:
            await self._changed.wait()

    def lose(self) -> None:
        """Note that the peer sends and reads nothing more."""
        self.ended.set()
        self._out.clear()
        self._note_change()

    def _note_change(self) -> None:
        # A new event for the next change. Those that wait hold the old one, which stays set.
        self._changed.set()
        self._changed = asyncio.Event()
