"""Connections that become streams: which bytes belong to the request, and what the stream may do to its connection."""

import asyncio
import socket
import struct
from functools import partial

from proxy.compat.endpoints import Stream, StreamTransport
from proxy.dataplane.app import DataPlane
from proxy.dataplane.request_reader import RequestReader
from proxy.http.asgi import Scope
from sandboxes.task_owner import TaskOwner

MAX_STREAM_REQUEST_BYTES = 32 << 10
"""Limits a request that may take its connection over; the JSON of an exec start has less than 200 bytes."""
_RESET = struct.pack("ii", 1, 0)
"""On, and 0 seconds: unsent bytes are dropped."""


def split_request(reader: RequestReader, held: bytes, body_at: int | None) -> tuple[bytes, bytes] | None:
    """Return the body of a connection's only request, which begins at `body_at` for an upgrade, and the rest."""
    if body_at is None:
        return (reader.body, b"") if reader.ended == reader.begun else None
    # For the parser a request with an upgrade ends with its head; its body is what follows.
    length = min(reader.content_length, MAX_STREAM_REQUEST_BYTES)
    body, rest = held[body_at:][:length], held[body_at + length :]
    return (body, rest) if len(body) == length else None


class TakenConnection:
    """What a stream may do to its connection."""

    def __init__(self, transport: asyncio.Transport, writable: asyncio.Event) -> None:
        """Take a connection over. `writable` is set while the client reads what is written."""
        self._transport, self._writable = transport, writable
        self._is_held = False
        self.transport = StreamTransport(
            transport.write, self._drain, self._hold, transport.close, partial(reset, transport)
        )

    async def _drain(self) -> None:
        await self._writable.wait()

    def _hold(self, on: bool) -> None:
        """Stop reading from a client that sends faster than its process reads, or go on."""
        if on != self._is_held and not self._transport.is_closing():
            self._is_held = on
            (self._transport.pause_reading if on else self._transport.resume_reading)()


def reset(transport: asyncio.WriteTransport) -> None:
    """Close a connection at once, so that the client gets an error and does not see the end of a stream."""
    if not transport.is_closing():
        # With this option the kernel sends a reset when the socket is closed (socket(7), SO_LINGER).
        own: socket.socket = transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


class Streams:
    """The streams of a server: which requests become one, and the tasks that answer them."""

    def __init__(self, data_plane: DataPlane) -> None:
        self._data_plane = data_plane
        self._tasks = TaskOwner()

    def may_open(self, scope: Scope, reader: RequestReader) -> bool:
        """Return whether a request may become a stream, once its body is there. Called for each hit."""
        streaming = self._data_plane.streaming
        # The cheapest test first: most URLs lack the part of the path.
        return (
            streaming is not None and streaming.path_part in reader.url
            and not reader.expects_continue and self._data_plane.may_stream(scope)
        )  # fmt: skip

    def takes_connection(self, scope: Scope, body: bytes) -> bool:
        """Return whether a whole request becomes a stream."""
        return self._data_plane.takes_connection(scope, body)

    def open(
        self,
        scope: Scope,
        body: bytes,
        rest: bytes,
        taken: TakenConnection,
        server_tasks: set[asyncio.Task[None]],
        *,
        upgrade: bool,
    ) -> Stream:
        """Turn a connection into a stream; `rest` came behind the body. A late shutdown cancels the `server_tasks`."""
        stream, answering = self._data_plane.open_stream(scope, body, taken.transport, upgrade=upgrade, rest=rest)
        if answering is not None:
            task = self._tasks.spawn("stream", answering)
            # A shutdown that takes too long cancels the tasks of the server.
            server_tasks.add(task)
            task.add_done_callback(server_tasks.discard)
        return stream
