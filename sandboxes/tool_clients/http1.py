"""HTTP/1.1 with a tool server, over an open connection: one request, one response. The door to h11.

Theory of operation. The head of the request was built by `sandboxes.http_message` and is sent as bytes, often by the
guest before the connection reaches the proxy. h11 never writes here. It parses the response, and it needs the method
for that: a response to HEAD has no body (RFC 9112, 6.3). So `_Response` gives its h11 connection a stand-in request
with the same method and discards the bytes.

Three things end a response: its framing, the close of the connection where nothing frames it, or an error. Bytes after
the end are not read, because each request has a connection of its own. Interim responses (1xx) and trailers are
dropped.

h11 takes 0.1 ms for a small response and 0.9 ms for 1 MB (measured with uvloop, over a socket pair). The C parser of
httptools takes 0.03 ms and 0.6 ms, but leaves the framing and the end of the body to its caller. A forwarded miss takes
about 2 ms.
"""

import asyncio
import socket

import h11

from sandboxes.listener import Listener
from sandboxes.task_owner import start

MAX_HEADER_BYTES = 256 << 10
"""Largest response head. Servers send a few hundred bytes; an agent that changed its server must not fill our memory.
"""
_MAX_INTERIM_RESPONSES = 256
"""Most interim responses before a final one; a server that sends more never answers."""
_CHUNK_BYTES = 1 << 16
"""Largest piece that is read at once, and largest body that is sent before the response is read."""


class MalformedResponseError(Exception):
    """The response of a tool server breaks its protocol, or ends too early."""


async def exchange(
    connection: socket.socket, head: bytes, body: bytes, listener: Listener, *, silence_s: float, sent: bool = False
) -> None:
    """Send a request and pass its response to the listener. The connection is closed in every case.

    `sent` says that head and body were sent already. Raises MalformedResponseError if the response is not HTTP or is
    incomplete, OSError if the connection broke, and TimeoutError if no byte arrived for `silence_s`.
    """
    loop = asyncio.get_running_loop()
    # `sock_sendall` and `sock_recv` require a non-blocking socket.
    connection.setblocking(False)
    # The method is the first word of the head; h11 needs nothing else of the request.
    response = _Response(head.partition(b" ")[0], listener)
    sending: asyncio.Task[None] | None = None
    try:
        if not sent and len(body) <= _CHUNK_BYTES:
            # A small body fits into the socket's buffer, so this returns before the server has to read.
            await loop.sock_sendall(connection, head + body)
        elif not sent:
            # A server may refuse a large body and hang up before it has read it: the response says why.
            sending = start(_send(connection, head, body))
        # A large body is still being sent meanwhile: a server that answers while it reads would otherwise wait for
        # us, and we for it.
        while not response.complete:
            # The limit restarts with each piece: it bounds the server's silence and not the length of its
            # response.
            async with asyncio.timeout(silence_s):
                # An empty result is the end of the connection, which frames a response without a length (RFC 9112,
                # 6.3).
                data = await loop.sock_recv(connection, _CHUNK_BYTES)
            await response.feed(data)
    finally:
        # The sending may still be under way after an early response; it must not write to a descriptor that is
        # closed below.
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        connection.close()


async def _send(connection: socket.socket, head: bytes, body: bytes) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, head)
    await loop.sock_sendall(connection, body)


class _Response:
    """A response while it arrives."""

    def __init__(self, method: bytes, listener: Listener) -> None:
        self.complete = False  # The response has ended.
        self._listener = listener
        self._interim_responses = 0
        self._parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)
        # The stand-in request: h11 learns the method from it, and that the connection is not used again.
        self._parser.send(h11.Request(method=method, target="/", headers=[("Host", "-"), ("Connection", "close")]))
        self._parser.send(h11.EndOfMessage())

    async def feed(self, data: bytes) -> None:
        """Parse the next bytes and pass on what they complete. Empty data is the end of the connection.

        Raises MalformedResponseError if the bytes are not HTTP, or the connection ended within the response.
        """
        # Noted before the bytes are fed, because h11 then changes its state to an error.
        within_body = self._parser.their_state is h11.SEND_BODY
        try:
            self._parser.receive_data(data)
            # One piece may complete several events: the head, a part of the body, and its end.
            while not self.complete and (event := self._parser.next_event()) is not h11.NEED_DATA:
                await self._handle(event)
        except h11.RemoteProtocolError as error:
            # With data, the bytes are wrong; without, h11 complains that the connection ended too early.
            if data:
                raise MalformedResponseError(f"its response is not HTTP: {error}") from None
            where = "in the middle of its response" if within_body else "without a response"
            raise MalformedResponseError(f"it closed the connection {where}") from None

    async def _handle(self, event: object) -> None:
        match event:
            case h11.InformationalResponse():
                # A server could keep a call alive for ever by interim responses, each of which restarts the
                # silence.
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
                await self._listener.head(status, tuple(texts))
            case h11.Data(data=data):
                # Copied: h11 gives a bytearray of its own, and listeners keep what they get.
                await self._listener.data(bytes(data))
            case h11.EndOfMessage():
                self.complete = True
