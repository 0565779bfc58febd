"""Channels: streams of messages over a link, in both directions, each direction with a window of its own.

A message is cut into pieces, so that a large one delays no other frame of the link for long. A sender may have
`WINDOW_BYTES` under way that its peer has not read; then it waits. So a client that does not read holds up its own
stream alone, and costs either member no more than a window. The end of a channel says nothing about whether what it
carried was complete: the messages must say so.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

from proxy.cluster.link.frames import MAX_FRAME_BYTES, Frame, FrameKind, LinkError

WINDOW_BYTES = 256 << 10
"""Bytes of one direction that are under way or not read yet. Halved, a stream needs more round trips: at 1 ms each, it
carries 250 MB/s. Doubled, 4,096 channels may hold 2 GiB of this member's memory."""
PIECE_BYTES = 32 << 10
"""Most bytes of one frame of a channel. Larger pieces delay the hits on the same link."""
MAX_CHANNELS = 4096
"""Most channels of one link at once."""
_OVERHEAD_BYTES = 64
"""What a piece counts beside its bytes, so that empty messages use up the window too."""
_CREDIT = struct.Struct("!I")
CHANNEL_KINDS = frozenset({FrameKind.DATA, FrameKind.PIECE, FrameKind.CREDIT, FrameKind.CLOSE})
"""The frames that may belong to a channel."""
Send = Callable[[FrameKind, int, bytes], None]
"""Sends a frame: its kind, its number and its content."""


class ChannelEndedError(ConnectionError):
    """The peer, or the end of the link, has ended the channel."""


class LinkChannel:
    """One end of a channel.

    Attributes:
        ended: Set when the peer sends nothing more: it has closed the channel, or the link broke.
    """

    def __init__(
        self,
        stream: int,
        send: Send,
        drain: Callable[[], Awaitable[None]],
        forget: Callable[[], None],
    ) -> None:
        """Begin a channel.

        Args:
            stream: Number of the question that it belongs to.
            send: Sends a frame.
            drain: Returns once the link takes more bytes.
            forget: Called when this end is closed.
        """
        self._stream, self._send, self._link_drain, self._forget = stream, send, drain, forget
        self._out: deque[tuple[FrameKind, bytes]] = deque()
        self._in: deque[tuple[FrameKind, bytes]] = deque()
        self._room, self._unread, self._credit = WINDOW_BYTES, 0, 0
        self._changed, self.ended = asyncio.Event(), asyncio.Event()
        self._is_closing = self._is_closed = False

    # -- called by this member ---------------------------------------------------------------------------------------

    def write(self, message: bytes) -> None:
        """Queue a message; `drain` waits until the peer has room for it. Without a peer it is dropped."""
        if self._is_closing or self.ended.is_set():
            return
        # An empty message is one empty piece: it must arrive, too.
        for at in range(0, len(message) or 1, PIECE_BYTES):
            piece = message[at : at + PIECE_BYTES]
            self._out.append((FrameKind.DATA if at + PIECE_BYTES >= len(message) else FrameKind.PIECE, piece))
        self._pump()

    async def drain(self) -> None:
        """Wait until all that was written is on its way, or the channel has ended."""
        # A loop, because every frame of the channel wakes this, not only a grant of room.
        while self._out and not self.ended.is_set():
            await self._change()
        await self._link_drain()

    async def send(self, message: bytes) -> None:
        """Send a message, as soon as the peer has room for it.

        Raises:
            ChannelEndedError: The peer reads no more.
        """
        self.write(message)
        await self.drain()
        if self.ended.is_set():
            raise ChannelEndedError("the stream has ended")

    async def receive(self) -> bytes | None:
        """Return the next message of the peer; None if none follows.

        Raises:
            LinkError: The message is too large.
        """
        pieces, size = list[bytes](), 0
        while True:
            while not self._in:
                if self.ended.is_set() or self._is_closed:
                    return None
                await self._change()
            kind, piece = self._in.popleft()
            # Granted when the piece is taken and not when it came: a reader that stops taking stops the sender.
            self._grant(len(piece) + _OVERHEAD_BYTES)
            pieces.append(piece)
            size += len(piece)
            # The window limits what waits in `_in`, but not what has been taken out of it for this message.
            if size > MAX_FRAME_BYTES:
                raise LinkError(f"a message of a stream has more than {MAX_FRAME_BYTES} bytes")
            if kind is FrameKind.DATA:
                return b"".join(pieces)

    def close(self) -> None:
        """Send what is queued, then end the channel. Idempotent."""
        self._is_closing = True
        self._pump()

    def abort(self) -> None:
        """End the channel without what is queued. Idempotent."""
        self._out.clear()
        self.close()

    # -- called by the link ------------------------------------------------------------------------------------------

    def got(self, frame: Frame) -> None:
        """Take a frame of the peer.

        Raises:
            LinkError: The peer has sent more than it may.
        """
        if frame.kind is FrameKind.CLOSE:
            self.lose()
        elif frame.kind is FrameKind.CREDIT:
            if len(frame.content) != _CREDIT.size:
                raise LinkError("a peer grants a malformed number of bytes")
            # Never more than the window, whatever the peer grants: this side would buffer it in the link.
            self._room = min(WINDOW_BYTES, self._room + _CREDIT.unpack(frame.content)[0])
            self._pump()
        elif not self._is_closed:
            self._unread += len(frame.content) + _OVERHEAD_BYTES
            # A sender may begin one more piece while any room is left (`_pump`).
            if self._unread > WINDOW_BYTES + PIECE_BYTES + _OVERHEAD_BYTES:
                raise LinkError("a peer sends more of a stream than is read")
            self._in.append((frame.kind, frame.content))
            self._note_change()

    def lose(self) -> None:
        """Note that the peer sends and reads nothing more."""
        # The queue goes, so that an end that waits in `drain` returns and `close` is not held up.
        self.ended.set()
        self._out.clear()
        self._pump()
        self._note_change()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        while self._out and self._room > 0 and not self._is_closed:
            kind, piece = self._out.popleft()
            self._room -= len(piece) + _OVERHEAD_BYTES
            self._send(kind, self._stream, piece)
        if self._is_closing and not self._out and not self._is_closed:
            self._is_closed = True
            self._send(FrameKind.CLOSE, self._stream, b"")
            self._forget()
        self._note_change()

    def _grant(self, size: int) -> None:
        self._unread -= size
        self._credit += size
        # Half a window at a time: a grant for each piece would cost as many frames as the data.
        if self._credit >= WINDOW_BYTES // 2 and not (self._is_closed or self.ended.is_set()):
            self._send(FrameKind.CREDIT, self._stream, _CREDIT.pack(self._credit))
            self._credit = 0

    async def _change(self) -> None:
        await self._changed.wait()

    def _note_change(self) -> None:
        # A new event for the next change. Those that wait hold the old one, which stays set.
        self._changed.set()
        self._changed = asyncio.Event()


class Channels:
    """The channels of one end of a link, by the numbers of their questions."""

    def __init__(self, send: Send, drain: Callable[[], Awaitable[None]]) -> None:
        self._send, self._drain = send, drain
        self._open: dict[int, LinkChannel] = {}

    def open(self, stream: int) -> LinkChannel:
        """Begin the channel of a question.

        Raises:
            ChannelEndedError: The link has too many.
        """
        if len(self._open) >= MAX_CHANNELS:
            raise ChannelEndedError(f"the link between two members has {MAX_CHANNELS} streams, which is the limit")
        channel = self._open[stream] = LinkChannel(stream, self._send, self._drain, partial(self._forget, stream))
        return channel

    def _forget(self, stream: int) -> None:
        self._open.pop(stream, None)

    def got(self, frame: Frame) -> bool:
        """Take a frame of `CHANNEL_KINDS`; return False if it is for no open channel.

        Raises:
            LinkError: The peer has sent more than it may.
        """
        channel = self._open.get(frame.stream)
        if channel is None:
            return False
        channel.got(frame)
        return True

    def lose(self) -> None:
        """Note that the link broke."""
        # Emptied first: each channel removes itself when it closes, which must not change what is iterated over.
        channels, self._open = tuple(self._open.values()), {}
        for channel in channels:
            channel.lose()
