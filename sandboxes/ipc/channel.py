"""The proxy's end of a socket to another process of ours: requests are answered in order, with descriptors.

What a message leads to takes the event loop up to a millisecond, so one channel is read in each turn of the loop: hits
that have come meanwhile are answered before the next message.
"""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import ClassVar, cast

from sandboxes.ipc.codec import AnswerT, Envelope, IpcMessage, IpcRequest, answers_of, decode, pack_message
from sandboxes.ipc.frames import Inbox, IpcFrame, MalformedFrameError, receive
from sandboxes.ipc.messages import Failed

_MOST_EARLY, _MOST_EARLY_BYTES = 256, 64 << 20
"""Messages, and bytes in them, that wait for a caller to receive them. With more, nothing is read until one does."""
_PIECES = 16
"""Most reads of one socket before others have their turn."""


class ChannelClosedError(ConnectionError):
    """The other end is gone, or is not talked to any more."""


class PeerFailedError(Exception):
    """The other end reports that it failed; the text is its own."""


class Channel:
    """One socket for any number of callers at once; each gets the answer to its own request."""

    _turn_taken: ClassVar[asyncio.AbstractEventLoop | None] = None
    """The event loop in whose present turn a channel was read; None if none was."""

    def __init__(self, end: socket.socket) -> None:
        # The event loop's descriptors must not block: one silent peer would stop every other sandbox.
        end.setblocking(False)
        self._socket = end
        self._inbox = Inbox()
        # In the order of the requests: the peer answers one after the other, so no answer needs a number.
        self._waiting: deque[asyncio.Future[IpcFrame]] = deque()
        # Messages that came unasked before a caller waited for them.
        self._early: deque[IpcFrame] = deque()
        self._early_bytes = 0
        self._paused = self._queued = False
        # Frames of two callers must not mix, and the queue of waiting callers must have the order on the wire.
        self._sending = asyncio.Lock()
        # Set when the socket takes more of the frame that is being sent, or is closed.
        self._room: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.lost: str | None = None  # Why the channel is closed; None while it is open.
        # Read all the time and not only when a caller waits, so the end of the peer is noticed at once.
        self._loop.add_reader(end.fileno(), self._readable)

    async def request(self, message: IpcMessage, body: bytes = b"", fds: Sequence[int] = ()) -> IpcFrame:
        """Send a request and return its answer as it comes; the caller closes the answer's descriptors."""
        async with self._sending:
            # Looked at behind the lock: the channel may have been lost while this caller waited for its turn.
            if self.lost is not None:
                raise ChannelClosedError(self.lost)
            # Before the send, because the answer may come while the rest of a long frame is still being written.
            answer = self._expect()
            await self._send(pack_message(message, body, len(fds)), fds)
        # Outside the lock: the next caller may send while this one waits.
        return await answer

    async def ask(self, request: IpcRequest[AnswerT], body: bytes = b"", fds: Sequence[int] = ()) -> Envelope[AnswerT]:
        """Send a request and return its answer; the caller closes the answer's descriptors."""
        # `answers_of` checks at run time what the type argument promises to mypy.
        frame = await self.request(request, body, fds)
        return cast("Envelope[AnswerT]", self._expect_one_of(frame, answers_of(type(request))))

    async def post(self, message: IpcMessage, fds: Sequence[int] = (), *, body: bytes = b"") -> None:
        """Send a message that is not answered here. Nothing happens if the other end is gone."""
        async with self._sending:
            # No error for a lost peer: the next request reports it, and a post has no caller that could act.
            if self.lost is None:
                await self._send(pack_message(message, body, len(fds)), fds)

    async def next(self, *expected: type[AnswerT]) -> Envelope[AnswerT]:
        """Return the next message that answers no request."""
        return cast("Envelope[AnswerT]", self._expect_one_of(await self.receive(), expected))

    def _expect_one_of(self, frame: IpcFrame, expected: tuple[type[IpcMessage], ...]) -> Envelope[IpcMessage]:
        try:
            envelope = decode(frame, *expected, Failed)
        except MalformedFrameError as error:
            # After a frame that cannot be decoded, nothing that follows can be trusted to begin where it should.
            self.close(str(error))
            raise ChannelClosedError(str(error)) from error
        # The channel stays open: a launcher goes on after one failed request.
        if isinstance(envelope.message, Failed):
            raise PeerFailedError(envelope.message.error)
        return envelope

    async def receive(self) -> IpcFrame:
        """Return the next message that answers no request."""
        if self._early:
            message = self._early.popleft()
            self._early_bytes -= len(message.body)
            self._resume()
            return message
        if self.lost is not None:
            raise ChannelClosedError(self.lost)
        return await self._expect()

    def close(self, reason: str = "closed") -> None:
        """Close the socket; all waiting callers get a `ChannelClosedError`. Idempotent."""
        self._lose(reason)
        while self._early:
            for fd in self._early.popleft().fds:
                os.close(fd)

    def _lose(self, reason: str) -> None:
        """Close the socket; what came before can still be received."""
        if self.lost is not None:
            return
        # Set first: the callers that are woken below look at it.
        self.lost = reason
        # Before the close: a closed number may be another file's at once, and the loop would watch that one.
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._inbox.close()
        self._wake_sender()
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(ChannelClosedError(reason))
                # Read here, because its caller may be gone: asyncio would log an exception that was not read.
                future.exception()

    def _expect(self) -> asyncio.Future[IpcFrame]:
        future: asyncio.Future[IpcFrame] = self._loop.create_future()
        # A cancelled caller stays in the queue: its answer still comes and must not go to the next caller.
        self._waiting.append(future)
        self._resume()
        return future

    def _resume(self) -> None:
        if self._paused and self.lost is None:
            self._paused = False
            self._loop.add_reader(self._socket.fileno(), self._readable)

    async def _send(self, frame: bytes, fds: Sequence[int]) -> None:
        view = memoryview(frame)
        # Copied, because it is emptied below.
        carried = list(fds)
        while view:
            try:
                # The kernel attaches descriptors to the first byte of this call (`SCM_RIGHTS`), so they go with the
                # first piece.
                sent = socket.send_fds(self._socket, [view], carried) if carried else self._socket.send(view)
            except (BlockingIOError, InterruptedError):
                # A full buffer means that the peer is busy; the frame goes on where it stopped.
                await self._writable()
                continue
            except OSError as error:
                # A broken pipe while sending is the same loss as an end while reading: all callers must know.
                self._lose(f"{error.strerror}")
                return
            # Sent with the first piece. A second time would give the peer a second set of them.
            carried = []
            view = view[sent:]

    async def _writable(self) -> None:
        # `close` ran during the wait before; the next send reports it.
        if self.lost is not None:
            return
        self._room = self._loop.create_future()
        self._loop.add_writer(self._socket.fileno(), self._wake_sender)
        try:
            await self._room
        finally:
            # After a close the number may be another file's, and `close` has removed this writer.
            if self.lost is None:
                self._loop.remove_writer(self._socket.fileno())

    def _wake_sender(self) -> None:
        # The sender may have been cancelled while this call was scheduled.
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _readable(self) -> None:
        if self._queued:
            # The loop reports the socket in each turn until it is read.
            return
        if Channel._turn_taken is self._loop:
            # Not left to the next report: uvloop reports an error once.
            self._queued = True
            self._loop.call_soon(self._read_in_turn)
            return
        Channel._turn_taken = self._loop
        try:
            self._read_some()
        finally:
            self._loop.call_soon(self._end_turn)

    @staticmethod
    def _end_turn() -> None:
        """Let another channel be read. What the last message has woken runs before this."""
        Channel._turn_taken = None

    def _read_in_turn(self) -> None:
        self._queued = False
        self._readable()

    def _read_some(self) -> None:
        # Up to the last piece: uvloop stops to watch a socket after the first event with an error, as when the peer
        # died before it read a request. Its end, behind what it had sent, would never be noticed.
        for _ in range(_PIECES):
            if self.lost is not None or self._paused or not self._read():
                return
        self._loop.call_soon(self._readable)

    def _read(self) -> bool:
        try:
            data, fds = receive(self._socket)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._lose(f"{error.strerror}")
            return False
        # An empty read is the end: the peer has closed its socket, or it died and the kernel closed the socket.
        if not data:
            self._lose("it ended")
            return False
        self._inbox.feed(data, fds)
        try:
            # One read may hold several frames, and several reads one frame.
            while (message := self._inbox.take()) is not None:
                self._deliver(message)
        # The boundaries between frames are lost, so is the channel.
        except MalformedFrameError as error:
            self._lose(str(error))
        return True

    def _deliver(self, message: IpcFrame) -> None:
        if self._waiting:
            # Strictly first in, first out, as the peer answers.
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(message)
                return
        else:
            # No request is pending: the next `receive` gets it. A peer that sends without end must not fill our memory.
            self._early.append(message)
            self._early_bytes += len(message.body)
            if len(self._early) >= _MOST_EARLY or self._early_bytes >= _MOST_EARLY_BYTES:
                self._paused = True
                self._loop.remove_reader(self._socket.fileno())
            return
        # The caller was cancelled, so nothing else would close its descriptors.
        for fd in message.fds:
            os.close(fd)
