"""HTTP/1.1 with a tool server, over an open connection: one request, one response. The door to httptools."""

import asyncio
import socket

import httptools

from sandboxes.listener import Listener

_CHUNK = 1 << 16
MAX_HEADER_BYTES = 256 << 10
"""Of one answer."""


class MalformedResponseError(Exception):
    """The server's answer is not HTTP, or ends before its end."""


async def exchange(
    connection: socket.socket, head: bytes, body: bytes, listener: Listener, *, silence_s: float, sent: bool = False
) -> None:
    """Send a request, unless it was sent, and hear its answer to the end. The connection is closed, whatever happens.

    Raises:
        Garbage: what came is no answer, or half of one.
        OSError: the connection broke before an answer began.
        TimeoutError: nothing came for silence_s.
    """
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    answer = _Answer(bodiless=head.startswith(b"HEAD "))
    sending: asyncio.Task[None] | None = None
    try:
        if not sent and len(body) <= _CHUNK:
            await loop.sock_sendall(connection, head + body)
        elif not sent:
            # A server may answer, and hang up, before it has read a large body: its answer tells why.
            sending = loop.create_task(_send(loop, connection, head, body))
        while not answer.complete:
            async with asyncio.timeout(silence_s):
                data = await loop.sock_recv(connection, _CHUNK)
            if not data:
                answer.ended()
                break
            answer.feed(data)
            await answer.tell(listener)
        await answer.tell(listener)
    finally:
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        connection.close()


async def _send(loop: asyncio.AbstractEventLoop, connection: socket.socket, head: bytes, body: bytes) -> None:
    await loop.sock_sendall(connection, head)
    await loop.sock_sendall(connection, body)


class _Answer:
    """What has come of an answer so far; interim answers (1xx) and trailers are dropped."""

    def __init__(self, *, bodiless: bool) -> None:
        self.complete = False
        self._bodiless = bodiless
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[str, str]] = []
        self._status = self._header_bytes = 0
        self._in_body = self._told = False
        self._chunks: list[bytes] = []
        self._framed = False

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise MalformedResponseError("it switches protocols, which nobody asked for") from None
        except httptools.HttpParserError as error:
            if not self.complete:
                raise MalformedResponseError(f"its answer is not HTTP: {error}") from None

    def ended(self) -> None:
        """Take the end of the connection, which is the end of an answer that says no length."""
        if not self._in_body:
            raise MalformedResponseError("it hung up without an answer")
        if self._framed:
            raise MalformedResponseError("it hung up in the middle of its answer")
        self.complete = True

    async def tell(self, listener: Listener) -> None:
        """Pass on what has come since."""
        if self._in_body and not self._told:
            self._told = True
            await listener.head(self._status, tuple(self._headers))
        for chunk in self._chunks:
            await listener.data(chunk)
        self._chunks.clear()

    # What the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers and interim answers count too: a server that an agent has changed must not fill our memory.
        self._header_bytes += len(name) + len(value) + 32
        if self._header_bytes > MAX_HEADER_BYTES:
            raise MalformedResponseError("its headers do not end")
        if not self._in_body:
            self._headers.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._header_bytes += 1024
            self._headers.clear()
            return
        if status > 599:
            raise MalformedResponseError(f"its answer has the status {status}")
        self._in_body, self._status = True, status
        names = {name.lower() for name, _ in self._headers}
        self._framed = bool({"content-length", "transfer-encoding"} & names)
        if self._bodiless or status in (204, 304):
            self.complete = True

    def on_body(self, body: bytes) -> None:
        if not self.complete:
            self._chunks.append(body)

    def on_message_complete(self) -> None:
        if self._in_body:
            self.complete = True
