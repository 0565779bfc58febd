"""Connections that are more than a request and a whole response, between an ingress and the owner of their task.

An ingress passes events of its agent's connection to the owner over a channel, and the owner's events to its agent.
Events are ASGI messages; a connection without HTTP has events of two types of its own, `_DATA` and `_END`. If the
channel ends before the response does, the agent's connection is cut off: an agent never takes part of a response for a
whole one.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from proxy.cluster.link.channels import PeerChannel
from proxy.cluster.messages import pack_event, unpack_event
from proxy.cluster.owned import Owned
from proxy.compat.endpoints import RequestScope, Stream, StreamingEndpoint, StreamTransport
from proxy.http.asgi import AsgiMessage, Receive, Scope, Send
from sandboxes.task_owner import start

MAX_HELD_BYTES = 1 << 20
"""Bytes of a client without HTTP that wait for the owner, from which no more is read from the client."""
_DATA, _END = "stream.data", "stream.end"

# -- at the owner ----------------------------------------------------------------------------------------------------


class PeerSocket:
    """A WebSocket that a peer has passed on, as an ASGI application sees it."""

    def __init__(self, owned: Owned, channel: PeerChannel) -> None:
        self._owned, self._channel = owned, channel
        self._is_connected = False

    async def receive(self) -> AsgiMessage:
        """Return the next event of the agent."""
        if not self._is_connected:
            self._is_connected = True
            return {"type": "websocket.connect"}
        data = await self._channel.receive()
        return {"type": "websocket.disconnect", "code": 1006} if data is None else unpack_event(data)

    async def send(self, message: AsgiMessage) -> None:
        """Send an event to the agent. Raises ChannelEndedError: the agent has disconnected."""
        await self._owned.settled()
        await self._channel.send(pack_event(message))


async def serve_channel(
    receive: Receive, send: Send, channel: PeerChannel, converse: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Let a request of a peer be a channel, which ends when what converses over it has ended."""

    async def read() -> None:
        more = True
        while more:
            message = await receive()
            more = message["type"] == "http.request" and bool(message.get("more_body"))
            await channel.got(message.get("body", b""))
        channel.lose()

    async def run() -> None:
        try:
            # The agent may have disconnected.
            with suppress(ConnectionError):
                await converse()
        finally:
            channel.close()

    reading, running = start(read()), start(run())
    try:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for data in channel.outgoing():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        await running
    finally:
        for task in (reading, running):
            task.cancel()
        await asyncio.gather(reading, running, return_exceptions=True)


async def serve_hijacked(
    channel: PeerChannel, open_stream: Callable[[StreamTransport], tuple[Stream, Coroutine[Any, Any, None] | None]]
) -> None:
    """Serve a connection without HTTP that a peer has passed on."""
    reads, closed = asyncio.Event(), asyncio.Event()
    reads.set()

    def write(data: bytes) -> None:
        channel.write(pack_event({"type": _DATA, "body": data}))

    def hold(on: bool) -> None:
        (reads.clear if on else reads.set)()

    def close() -> None:
        # Only with this event is the stream whole.
        channel.write(pack_event({"type": _END}))
        channel.close()
        closed.set()

    stream, answering = open_stream(StreamTransport(write, channel.drain, hold, close, channel.abort))

    async def feed() -> None:
        while (data := await channel.receive()) is not None:
            event = unpack_event(data)
            if event["type"] == _END:
                stream.end_input()
            else:
                stream.feed(event["body"])
            await reads.wait()
        stream.lose()

    feeding = start(feed())
    try:
        # A stream that is answered already may still wait for a timer.
        await (closed.wait() if answering is None else answering)
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


# -- at the ingress --------------------------------------------------------------------------------------------------


async def relay_socket(channel: PeerChannel, receive: Receive, send: Send) -> None:
    """Pass the events of a WebSocket on, until either side closes it. The agent's first event was read."""

    async def feed() -> None:
        while (event := await receive())["type"] != "websocket.disconnect":
            await channel.send(pack_event(event))
        channel.abort()

    feeding, is_over = start(feed()), False
    try:
        while (data := await channel.receive()) is not None:
            event = unpack_event(data)
            is_over = event["type"] in ("websocket.close", "websocket.http.response.body")
            await send(event)
        if not is_over:
            # 1012: the service restarts (RFC 6455, IANA's registry). The agent may connect again.
            await send({"type": "websocket.close", "code": 1012, "reason": "the owner of the task has gone"})
    except OSError:
        # The agent has disconnected.
        pass
    finally:
        channel.abort()
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


class HijackedConnection:
    """An agent's connection without HTTP, from the moment it is taken until its owner is found and beyond."""

    def __init__(self, transport: StreamTransport, rest: bytes) -> None:
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
        self._changed.set()

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

    async def relay(self, channel: PeerChannel) -> None:
        """Pass bytes on in both directions, until either side ends."""
        feeding, is_whole = start(self._feed(channel)), False
        try:
            while (data := await channel.receive()) is not None:
                event = unpack_event(data)
                if event["type"] == _END:
                    is_whole = True
                    break
                self.transport.write(event["body"])
                await self.transport.drain()
        finally:
            # A client must not take what it has for the whole output.
            (self.transport.close if is_whole else self.transport.abort)()
            channel.abort()
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _feed(self, channel: PeerChannel) -> None:
        while not self.lost.is_set():
            self._changed.clear()
            while self._held:
                data = self._held.popleft()
                self._size -= len(data)
                await channel.send(pack_event({"type": _DATA, "body": data}))
            self.transport.hold(False)
            if self._has_ended:
                await channel.send(pack_event({"type": _END}))
                await self.lost.wait()
            await self._changed.wait()
        channel.abort()


class HijackingEndpoint:
    """The endpoint that takes connections over, on any member: the owner of the task may be another one."""

    def __init__(
        self,
        endpoint: StreamingEndpoint,
        serve: Callable[[Scope, bytes, HijackedConnection, bool], Coroutine[Any, Any, None]],
    ) -> None:
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
