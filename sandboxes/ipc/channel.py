"""The proxy's end of a socket to another process of ours: requests are answered in order, with descriptors."""

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from sandboxes.ipc.codec import AnswerT, Envelope, IpcMessage, IpcRequest, answers_of, decode, encode, pack_message
from sandboxes.ipc.frames import Inbox, MalformedFrameError, Message, pack, receive
from sandboxes.ipc.messages import Failed


class ChannelClosedError(ConnectionError):
    """The other end is gone, or is not talked to any more."""


class PeerFailedError(Exception):
    """The other end reports that it failed; the text is its own."""


class Channel:
    """One socket for any number of callers at once; each gets the answer to its own request.

    Attributes:
        lost: Why the channel is closed; None while it is open.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._inbox = Inbox()
        self._waiting: deque[asyncio.Future[Message]] = deque()
        self._early: deque[Message] = deque()
        self._sending = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self.lost: str | None = None
        self._loop.add_reader(end.fileno(), self._readable)

    async def request(self, fields: dict[str, Any], body: bytes = b"", fds: Sequence[int] = ()) -> Message:
        """Send a request and return its answer; the caller closes the answer's descriptors.

        Raises:
            ChannelClosedError: The other end is gone.
        """
        async with self._sending:
            if self.lost is not None:
                raise ChannelClosedError(self.lost)
            answer = self._expect()
            await self._send(pack(fields, body, len(fds)), fds)
        return await answer

    async def ask(self, request: IpcRequest[AnswerT], body: bytes = b"", fds: Sequence[int] = ()) -> Envelope[AnswerT]:
        """Send a typed request and return its answer; the caller closes the answer's descriptors.

        Raises:
            ChannelClosedError: The other end is gone, or has sent a frame that is no answer to this request.
            PeerFailedError: The other end reports that it failed.
        """
        frame = await self.request(encode(request), body, fds)
        return cast("Envelope[AnswerT]", self._expect_one_of(frame, answers_of(type(request))))

    async def post(self, message: IpcMessage) -> None:
        """Send a message that is not answered. Nothing happens if the other end is gone."""
        async with self._sending:
            if self.lost is None:
                await self._send(pack_message(message), ())

    async def next(self, *expected: type[AnswerT]) -> Envelope[AnswerT]:
        """Return the next message that answers no request.

        Raises:
            ChannelClosedError: The other end is gone, or has sent a frame that is not expected.
            PeerFailedError: The other end reports that it failed.
        """
        return cast("Envelope[AnswerT]", self._expect_one_of(await self.receive(), expected))

    def _expect_one_of(self, frame: Message, expected: tuple[type[IpcMessage], ...]) -> Envelope[IpcMessage]:
        """Decode a frame. After one that cannot be decoded, or is not expected, the channel is closed."""
        try:
            envelope = decode(frame)
        except MalformedFrameError as error:
            self.close(str(error))
            raise ChannelClosedError(str(error)) from error
        if isinstance(envelope.message, expected):
            return envelope
        for fd in envelope.fds:
            os.close(fd)
        if isinstance(envelope.message, Failed):
            raise PeerFailedError(envelope.message.error)
        self.close(f"{envelope.message.op!r} came where another message was expected")
        raise ChannelClosedError(self.lost)

    async def receive(self) -> Message:
        """Return the next message that answers no request."""
        if self._early:
            return self._early.popleft()
        if self.lost is not None:
            raise ChannelClosedError(self.lost)
        return await self._expect()

    def close(self, reason: str = "closed") -> None:
        """Close the socket; all waiting callers get a `ChannelClosedError`. Idempotent."""
        if self.lost is not None:
            return
        self.lost = reason
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(ChannelClosedError(reason))

    def _expect(self) -> asyncio.Future[Message]:
        future: asyncio.Future[Message] = self._loop.create_future()
        # The caller may have been cancelled before the channel is lost; asyncio would log its unread exception.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting.append(future)
        return future

    async def _send(self, frame: bytes, fds: Sequence[int]) -> None:
        view = memoryview(frame)
        carried = list(fds)
        while view:
            try:
                sent = socket.send_fds(self._socket, [view], carried) if carried else self._socket.send(view)
            except (BlockingIOError, InterruptedError):
                await self._writable()
                continue
            except OSError as error:
                self.close(f"{error.strerror}")
                return
            carried = []
            view = view[sent:]

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        fd = self._socket.fileno()
        if fd < 0:
            return
        self._loop.add_writer(fd, _wake, ready)
        try:
            # Bounded: after a `close` in the meantime no event would wake this coroutine.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ready, 1.0)
        finally:
            self._loop.remove_writer(fd)

    def _readable(self) -> None:
        try:
            data, fds = receive(self._socket)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(f"{error.strerror}")
            return
        if not data:
            self.close("it ended")
            return
        self._inbox.feed(data, fds)
        try:
            while (message := self._inbox.take()) is not None:
                self._deliver(message)
        except MalformedFrameError as error:
            self.close(str(error))

    def _deliver(self, message: Message) -> None:
        if self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(message)
                return
        else:
            # No request is pending: the next `receive` gets it.
            self._early.append(message)
            return
        for fd in message.fds:
            os.close(fd)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
