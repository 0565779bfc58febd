"""HTTP/1.1 with a tool server, in a sandbox or elsewhere: a connection, one request, one response. The door to h11.

Theory of operation. The head of the request was built by `sandboxes.http_message` and is sent as bytes, so h11 never
writes. It parses the response, for which it needs the method: a response to HEAD has no body (RFC 9112, 6.3). So
`_Response` gives its h11 connection a stand-in request with the same method and discards the bytes.

Three things end a response: its framing, the close of the connection where nothing frames it, or an error. Bytes after
the end are not read, because each request has its own connection. Interim responses (1xx) and trailers are dropped; all
heads together are bounded in number, bytes and time: a server that goes on sending heads never answers.
"""

import asyncio
import itertools
import math
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import h11

from sandboxes.listener import Headers, Listener
from sandboxes.task_owner import start

MAX_HEADER_BYTES = 256 << 10
"""Largest response head, with the interim responses before it. Servers send a few hundred bytes; an agent that changed
its server must not fill our memory."""
_MAX_INTERIM_RESPONSES = 256
"""Most interim responses before a final one; a server that sends more never answers."""
_CHUNK_BYTES = 1 << 16
"""Largest piece that is read at once, and largest body that is sent before the response is read."""
EVENTS_AT_ONCE = 64
"""How many events of the parser are handled until others have their turn. A piece may hold ten thousand chunks, for
which the parser takes half a second."""


class MalformedResponseError(Exception):
    """The response of a tool server breaks its protocol, or ends too early."""


class Connection(Protocol):
    """A connection to a tool server."""

    async def send(self, data: bytes) -> None:
        """Send all data. Raises OSError if the connection broke."""
        ...

    async def receive(self) -> bytes:
        """Return the next bytes; none at the end of the connection. Raises OSError if it broke."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class _SocketConnection:
    def __init__(self, connection: socket.socket) -> None:
        # `sock_sendall` and `sock_recv` require a non-blocking socket.
        connection.setblocking(False)
        self._socket, self._loop = connection, asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)

    async def receive(self) -> bytes:
        return await self._loop.sock_recv(self._socket, _CHUNK_BYTES)

    def close(self) -> None:
        self._socket.close()


class ReaderConnection:
    """A connection of asyncio's streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Send all data. Raises OSError if the connection broke."""
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> bytes:
        """Return the next bytes; none at the end of the connection. Raises OSError if it broke."""
        return await self._reader.read(_CHUNK_BYTES)

    def end(self) -> None:
        """Send nothing more; what comes is still received."""
        if not self._writer.is_closing():
            self._writer.write_eof()

    def close(self) -> None:
        """Close the connection at once."""
        self._writer.transport.abort()


class WholeResponse(Listener):
    """Keeps a response while it arrives."""

    def __init__(self, most_bytes: float = math.inf) -> None:
        # `status`: its status; 0 before its head has come.
        self.status, self.body, self._most_bytes = 0, bytearray(), most_bytes
        self.headers: Headers = ()

    async def head(self, status: int, headers: Headers) -> None:
        """Keep the status and the headers."""
        self.status, self.headers = status, headers

    async def data(self, chunk: bytes) -> None:
        """Keep a piece of the body. Raises MalformedResponseError if it is too long."""
        self.body += chunk
        if len(self.body) > self._most_bytes:
            raise MalformedResponseError("the response does not end")


async def connect(host: str, port: int, context: ssl.SSLContext | None, *, within_s: float) -> Connection:
    """Connect to a server elsewhere, with TLS if a context is given. Raises OSError; TimeoutError after `within_s`."""
    async with asyncio.timeout(within_s):
        return ReaderConnection(*await asyncio.open_connection(host, port, ssl=context))


async def exchange(
    connection: socket.socket, head: bytes, body: bytes, listener: Listener, *, silence_s: float, sent: bool = False
) -> None:
    """Send a request over a socket; see `converse`. `sent` says that head and body were sent already."""
    await converse(_SocketConnection(connection), head, b"" if sent else body, listener, silence_s=silence_s, sent=sent)


async def converse(
    connection: Connection,
    head: bytes,
    body: bytes | AsyncIterator[bytes],
    listener: Listener,
    *,
    silence_s: float,
    sent: bool = False,
) -> None:
    """Send a request and pass its response to the listener. The connection is closed in every case.

    Raises MalformedResponseError if the response is not HTTP or is incomplete, OSError if the connection broke, and
    TimeoutError if the head was not complete `silence_s` after the last piece of the request, or no byte of the body
    arrived for this long.
    """
    # The method is the first word of the head; h11 needs nothing else of the request.
    response = _Response(head.partition(b" ")[0], listener)
    limit = _TimeLimit(silence_s)
    sending: asyncio.Task[None] | None = None
    try:
        if not sent and isinstance(body, bytes) and len(body) <= _CHUNK_BYTES:
            # A small body fits into the socket's buffer, so this returns before the server has to read.
            async with limit.running():
                await connection.send(head + body)
        elif not sent:
            # A server may refuse a large body and hang up before it has read it: the response says why.
            sending = start(_send(connection, head, body, limit))
        # A large body is still being sent meanwhile: a server that answers while it reads would otherwise wait for
        # us, and we for it.
        while not response.complete:
            if response.has_head:
                # Each piece of the body restarts the limit: it bounds the server's silence and not the length of its
                # response. No piece of a head does.
                limit.restart()
            async with limit.running():
                # An empty result is the end of the connection, which frames a response without a length (RFC 9112,
                # 6.3).
                data = await connection.receive()
            await response.feed(data)
    finally:
        # The sending may still be under way after an early response; it must not write to a descriptor that is
        # closed below.
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        connection.close()


class _TimeLimit:
    """The time until something must have happened. What happens meanwhile restarts it."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._loop = seconds, asyncio.get_running_loop()
        self._until = self._loop.time() + seconds
        self._timeout: asyncio.Timeout | None = None

    def restart(self) -> None:
        self._until = self._loop.time() + self._seconds
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._until)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(self._until) as self._timeout:
                yield
        finally:
            self._timeout = None


async def _send(connection: Connection, head: bytes, body: bytes | AsyncIterator[bytes], limit: _TimeLimit) -> None:
    await connection.send(head)
    async for piece in _pieces(body):
        await connection.send(piece)
        limit.restart()


async def _pieces(body: bytes | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if not isinstance(body, bytes):
        async for piece in body:
            yield piece
        return
    for at in range(0, len(body), _CHUNK_BYTES):
        yield body[at : at + _CHUNK_BYTES]


class _Response:
    def __init__(self, method: bytes, listener: Listener) -> None:
        # The head has come, and the response has ended.
        self.has_head = self.complete = False
        self._listener = listener
        self._interim_responses = self._head_bytes = 0
        self._parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)
        # The stand-in request: h11 learns the method from it, and that the connection is not used again.
        self._parser.send(h11.Request(method=method, target="/", headers=[("Host", "-"), ("Connection", "close")]))
        self._parser.send(h11.EndOfMessage())

    async def feed(self, data: bytes) -> None:
        """Parse the next bytes and pass on what they complete. Empty data is the end of the connection."""
        # Noted before the bytes are fed, because h11 then changes its state to an error.
        within_body = self._parser.their_state is h11.SEND_BODY
        self._head_bytes += 0 if self.has_head else len(data)
        try:
            self._parser.receive_data(data)
            # One piece may complete several events: the head, a part of the body, and its end.
            for number in itertools.count(1):
                if self.complete or (event := self._parser.next_event()) is h11.NEED_DATA:
                    break
                await self._handle(event)
                if number % EVENTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        except h11.RemoteProtocolError as error:
            # With data, the bytes are wrong; without, h11 complains that the connection ended too early.
            if data:
                raise MalformedResponseError(f"its response is not HTTP: {error}") from None
            where = "in the middle of its response" if within_body else "without a response"
            raise MalformedResponseError(f"it closed the connection {where}") from None
        if not self.has_head and self._head_bytes > MAX_HEADER_BYTES:
            raise MalformedResponseError(f"the head of its response is larger than {MAX_HEADER_BYTES} bytes")

    async def _handle(self, event: object) -> None:
        match event:
            case h11.InformationalResponse():
                # A piece may hold thousands of them, and the parser takes its time for each.
                self._interim_responses += 1
                if self._interim_responses > _MAX_INTERIM_RESPONSES:
                    raise MalformedResponseError("it sends interim responses without end")
            case h11.Response(status_code=status, headers=headers):
                if status > 599:
                    raise MalformedResponseError(f"its response has the status {status}")
                names = [name for name, _ in headers]
                if b"content-length" in names and b"transfer-encoding" in names:
                    # h11 would ignore the length; the client that gets this header would not (RFC 9112, 6.3).
                    raise MalformedResponseError("its response has both Content-Length and Transfer-Encoding")
                # `raw_items` keeps the spelling of the names, which clients may show.
                texts = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers.raw_items())
                self.has_head = True
                await self._listener.head(status, tuple(texts))
            case h11.Data(data=data):
                # Copied: h11 gives a bytearray of its own, and listeners keep what they get.
                await self._listener.data(bytes(data))
            case h11.EndOfMessage():
                self.complete = True
