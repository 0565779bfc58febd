"""Connections that are more than a request and a whole response, between an ingress and the owner of their task.

The request that is passed on has a body without a length, and so has its response:

1. The body of a WebSocket has a frame for each ASGI event, in both directions.
2. The body of a connection without HTTP (Docker) is a frame with the request's body, and then the client's bytes. The
   response is the bytes for the client.

Both are HTTP bodies, so a reader that is slow holds up the writer, and a body that was cut off has no end. Then the
agent's connection is cut off too: an agent never takes part of a response for a whole one.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from typing_extensions import override

from proxy.cluster.forwarding import Relay
from proxy.cluster.messages import pack_event, unpack_event
from proxy.compat.endpoints import RequestScope, Stream, StreamingEndpoint, StreamTransport
from proxy.http.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send
from sandboxes.task_owner import start

MAX_HELD_BYTES = 1 << 20
"""Bytes of a client without HTTP that wait for the owner, from which no more is read from the client."""
_SIZE_BYTES = 4
_BEGIN: AsgiMessage = {"type": "http.response.start", "status": 200, "headers": []}
_END: AsgiMessage = {"type": "http.response.body", "body": b""}


class PeerFrames:
    """Cuts bytes into frames, each of which has its size before it."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._held += data

    def next(self) -> bytes | None:
        """Return the next frame; None if it is not complete."""
        end = _SIZE_BYTES + int.from_bytes(self._held[:_SIZE_BYTES])
        if len(self._held) < max(end, _SIZE_BYTES):
            return None
        frame = bytes(self._held[_SIZE_BYTES:end])
        del self._held[:end]
        return frame

    def rest(self) -> bytes:
        """Return the bytes behind the frames."""
        return bytes(self._held)


def frame_of(data: bytes) -> bytes:
    """Return bytes as a frame."""
    return len(data).to_bytes(_SIZE_BYTES) + data


# -- at the owner ----------------------------------------------------------------------------------------------------


async def serve_socket(
    application: AsgiApp, scope: Scope, receive: Receive, send: Send, settled: Callable[[], Awaitable[None]]
) -> None:
    """Serve a WebSocket that a peer has passed on. `settled` is awaited before each event for the agent."""
    frames, is_connected = PeerFrames(), False

    async def next_event() -> AsgiMessage:
        nonlocal is_connected
        if not is_connected:
            is_connected = True
            return {"type": "websocket.connect"}
        frame = await _next_frame(frames, receive)
        return {"type": "websocket.disconnect", "code": 1006} if frame is None else unpack_event(frame)

    async def send_event(event: AsgiMessage) -> None:
        await settled()
        await send({"type": "http.response.body", "body": frame_of(pack_event(event)), "more_body": True})

    offered = (value.decode("latin-1") for name, value in scope["headers"] if name == b"sec-websocket-protocol")
    subprotocols = [name.strip() for each in offered for name in each.split(",")]
    await send(_BEGIN)
    await application({**scope, "type": "websocket", "subprotocols": subprotocols}, next_event, send_event)
    await send(_END)


async def serve_hijacked(
    receive: Receive,
    send: Send,
    open_stream: Callable[[bytes, StreamTransport], tuple[Stream, Coroutine[Any, Any, None] | None]],
) -> None:
    """Serve a connection without HTTP that a peer has passed on."""
    await send(_BEGIN)
    frames = PeerFrames()
    body = await _next_frame(frames, receive)
    if body is None:
        return
    outgoing, reads = _Outgoing(send), asyncio.Event()
    reads.set()

    def hold(on: bool) -> None:
        (reads.clear if on else reads.set)()

    transport = StreamTransport(outgoing.write, outgoing.drain, hold, outgoing.close, outgoing.abort)
    stream, answering = open_stream(body, transport)

    async def feed() -> None:
        await _feed(stream, frames.rest(), receive, reads)
        outgoing.abort()

    feeding, sending = start(feed()), start(outgoing.run())
    try:
        if answering is not None:
            await answering
            if not outgoing.is_closed:
                outgoing.abort()
        # A stream that is answered already may still wait for a timer.
        await sending
    finally:
        for each in (feeding, sending):
            each.cancel()
        await asyncio.gather(feeding, sending, return_exceptions=True)
        stream.lose()


async def _feed(stream: Stream, rest: bytes, receive: Receive, reads: asyncio.Event) -> None:
    """Let a stream have the client's bytes, until the client has left."""
    if rest:
        stream.feed(rest)
    has_ended = False
    while (message := await receive())["type"] == "http.request":
        if data := message.get("body"):
            stream.feed(data)
        if not has_ended and not message.get("more_body"):
            has_ended = True
            stream.end_input()
        await reads.wait()
    stream.lose()


class _Outgoing:
    """The bytes of a stream for its client, as the body of a response."""

    def __init__(self, send: Send) -> None:
        self._send, self._held = send, bytearray()
        self._changed, self._idle = asyncio.Event(), asyncio.Event()
        self.is_closed = self._is_whole = False

    def write(self, data: bytes) -> None:
        self._held += data
        self._idle.clear()
        self._changed.set()

    async def drain(self) -> None:
        """Wait until all that was written is on its way, or the client has left."""
        if self._held and not self.is_closed:
            await self._idle.wait()

    def close(self) -> None:
        """End the response behind what was written."""
        self._is_whole = self._is_whole or not self.is_closed
        self.is_closed = True
        self._changed.set()

    def abort(self) -> None:
        """Leave the response without an end."""
        self.is_closed, self._is_whole = True, False
        self._held.clear()
        self._idle.set()
        self._changed.set()

    async def run(self) -> None:
        """Send what is written, until the response ends."""
        while not self.is_closed or (self._is_whole and self._held):
            await self._changed.wait()
            self._changed.clear()
            if data := bytes(self._held):
                self._held.clear()
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            if not self._held:
                self._idle.set()
        if self._is_whole:
            await self._send(_END)


async def _next_frame(frames: PeerFrames, receive: Receive) -> bytes | None:
    """Return the next frame of a request's body; None at its end."""
    while (frame := frames.next()) is None:
        message = await receive()
        frames.feed(message.get("body", b""))
        if not message.get("more_body"):
            return frames.next()
    return frame


# -- at the ingress --------------------------------------------------------------------------------------------------


class SocketRelay(Relay):
    """The owner's events of a WebSocket, on their way to the agent."""

    is_stream = True

    def __init__(self, send: Send) -> None:
        super().__init__(send)
        self._frames, self._is_over = PeerFrames(), False

    @override
    async def data(self, chunk: bytes) -> None:
        self._frames.feed(chunk)
        while (frame := self._frames.next()) is not None:
            event = unpack_event(frame)
            self._is_over = event["type"] in ("websocket.close", "websocket.http.response.body")
            await self._send(event)

    @override
    async def end(self) -> None:
        await self.cut()

    @override
    async def cut(self) -> None:
        if not self._is_over:
            # 1012: the service restarts (RFC 6455, IANA's registry). The agent may connect again, or has left.
            with suppress(OSError):
                await self._send({"type": "websocket.close", "code": 1012, "reason": "the owner of the task has gone"})

    async def events(self, receive: Receive) -> AsyncIterator[bytes]:
        """Yield the agent's events for the owner, as soon as that has taken the connection."""
        await self.begun.wait()
        # The agent has connected.
        await receive()
        while (event := await receive())["type"] != "websocket.disconnect":
            yield frame_of(pack_event(event))
        raise ConnectionAbortedError("the agent has disconnected")


class HijackedRelay(Relay):
    """The owner's bytes of a connection without HTTP, on their way to the client."""

    is_stream = True

    def __init__(self, transport: StreamTransport) -> None:
        super().__init__(never_sent)
        self._transport = transport

    @override
    async def data(self, chunk: bytes) -> None:
        self._transport.write(chunk)
        await self._transport.drain()

    @override
    async def end(self) -> None:
        self._transport.close()

    @override
    async def cut(self) -> None:
        # A client must not take what it has for the whole output.
        self._transport.abort()


class HijackedConnection:
    """An agent's connection without HTTP, from the moment it is taken until its owner is found and beyond."""

    def __init__(self, transport: StreamTransport, rest: bytes) -> None:
        """Take a connection, with what the client has sent behind its request already."""
        self.transport = transport
        self._held, self._size = deque([rest] if rest else []), len(rest)
        self._inner: Stream | None = None
        self._has_ended = False
        self._changed = asyncio.Event()
        self.lost = asyncio.Event()

    # -- called by the connection ------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Take bytes that the client sent."""
        if self._inner is not None:
            self._inner.feed(data)
            return
        self._held.append(data)
        self._size += len(data)
        if self._size > MAX_HELD_BYTES:
            self.transport.hold(True)
        self._changed.set()

    def end_input(self) -> None:
        """Note that the client sends nothing more."""
        self._has_ended = True
        if self._inner is not None:
            self._inner.end_input()
        self._changed.set()

    def lose(self) -> None:
        """Note that the connection is lost."""
        self.lost.set()
        if self._inner is not None:
            self._inner.lose()

    async def receive(self) -> AsgiMessage:
        """Return the disconnect of the client."""
        await self.lost.wait()
        return {"type": "http.disconnect"}

    # -- called by the ingress ---------------------------------------------------------------------------------------

    def give(self, stream: Stream) -> None:
        """Let a stream of this member have what the client sends."""
        while self._held:
            stream.feed(self._held.popleft())
        self._inner = stream
        if self._has_ended:
            stream.end_input()
        if self.lost.is_set():
            stream.lose()

    async def pieces(self, body: bytes, begun: asyncio.Event) -> AsyncIterator[bytes]:
        """Yield the request's body and the client's bytes for the owner, as soon as that has taken the connection."""
        await begun.wait()
        yield frame_of(body)
        while True:
            self._changed.clear()
            while self._held:
                data = self._held.popleft()
                self._size -= len(data)
                yield data
            self.transport.hold(False)
            if self._has_ended:
                return
            await self._changed.wait()


class HijackingEndpoint:
    """The endpoint that takes connections over, on any member: the owner of the task may be another one."""

    def __init__(
        self,
        endpoint: StreamingEndpoint,
        serve: Callable[[Scope, bytes, HijackedConnection, bool], Coroutine[Any, Any, None]],
    ) -> None:
        """Stand before an endpoint; `serve` gets a request, its body, and whether it wanted an upgrade."""
        self.path_part = endpoint.path_part
        self.owns, self.may_stream, self.takes_connection = (
            endpoint.owns,
            endpoint.may_stream,
            endpoint.takes_connection,
        )
        self.serve, self.refuse = endpoint.serve, endpoint.refuse
        self._serve = serve

    def known(self, scope: RequestScope, body: bytes | bytearray) -> bytes | None:  # noqa: ARG002 - see `StreamingEndpoint.known`
        """Return None: whether this member owns the task is not known without an await."""
        return None

    def open_stream(
        self, scope: RequestScope, body: bytes, transport: StreamTransport, *, upgrade: bool, rest: bytes
    ) -> tuple[HijackedConnection, Coroutine[Any, Any, None]]:
        """Take a connection over; see `StreamingEndpoint.open_stream`."""
        connection = HijackedConnection(transport, rest)
        return connection, self._serve(dict(scope), body, connection, upgrade)


# -- responses as bytes ----------------------------------------------------------------------------------------------


def head_of(message: AsgiMessage) -> bytes:
    """Return the head of an HTTP response."""
    lines = [b"HTTP/1.1 %d " % message["status"], *(name + b": " + value for name, value in message.get("headers", ()))]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def never() -> AsgiMessage:
    """Wait for the disconnect of a client that is not watched."""
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


async def never_sent(message: AsgiMessage) -> None:
    """Send nothing: the connection has no HTTP."""
