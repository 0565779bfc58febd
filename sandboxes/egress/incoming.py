"""Requests of programs in a sandbox, over their connections to the egress proxy. The second door to h11.

h11 parses each request and frames each response, so that no byte of one side reaches the other side unparsed.
"""

import asyncio
import contextlib
import socket
from dataclasses import dataclass

import h11

from sandboxes.egress.targets import RefusedError
from sandboxes.listener import Headers

_MAX_HEAD_BYTES = 16 << 10
"""Largest request head. Browsers and package managers send a few hundred bytes; cookies and queries some thousand."""
_HEAD_S = 30.0
"""Longest time until the head of a request is complete. Programs send it at once; the value is an estimate."""
SILENCE_S = 60.0
"""Longest time in which a program does not read, while a response waits. The value is an estimate."""
_FINISH_S = 1.0
"""Longest wait for a program to close its end after its response. Programs do so within milliseconds."""


@dataclass(frozen=True, slots=True)
class ProgramRequest:
    """The head of a request, with its target as it was written."""

    method: str
    target: str
    headers: Headers


class ProgramConnection:
    """One connection of a program in a sandbox."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._is_head = False

    async def request(self) -> ProgramRequest:
        """Read the request; one that is not HTTP, is too large, or has a body, is a `RefusedError`."""
        try:
            async with asyncio.timeout(_HEAD_S):
                head = await self._next()
                if not isinstance(head, h11.Request):
                    raise ConnectionResetError("the connection ended before a request")
                # Its end comes with its head. Any framing of a body lets h11 wait for more, or return data.
                if not isinstance(self._parser.next_event(), h11.EndOfMessage):
                    raise RefusedError(400, "a request must not have a body")
        except h11.RemoteProtocolError as error:
            raise RefusedError(error.error_status_hint, f"the request is not HTTP: {error}") from None
        self._is_head = head.method == b"HEAD"
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers)
        if any(name in ("content-length", "transfer-encoding") for name, _ in headers):
            raise RefusedError(400, "a request must not have a body")
        return ProgramRequest(head.method.decode("ascii"), head.target.decode("latin-1"), headers)

    async def _next(self) -> object:
        loop = asyncio.get_running_loop()
        while (event := self._parser.next_event()) is h11.NEED_DATA:
            self._parser.receive_data(await loop.sock_recv(self.connection, _MAX_HEAD_BYTES))
        return event

    async def respond(self, status: int, headers: Headers, length: int | None) -> None:
        """Send the head of a response; `length` is that of the body, None for a response without one."""
        framing = () if length is None else (("content-length", str(length)),)
        lines = [*headers, *framing, ("connection", "close")]
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines]
        await self._send(self._parser.send(h11.Response(status_code=status, headers=encoded)))

    async def accept_tunnel(self) -> bytes:
        """Tell the program that its tunnel is open; return what it has sent through it already."""
        await self._send(self._parser.send(h11.Response(status_code=200, headers=[])))
        return self._parser.trailing_data[0]

    async def data(self, chunk: bytes) -> None:
        """Send the next piece of the body."""
        await self._send(self._parser.send(h11.Data(data=chunk)))

    async def refuse(self, status: int, reason: str) -> None:
        """Send a response that gives a reason as text."""
        body = f"egress: {reason}\n".encode("latin-1", "replace")
        await self.respond(status, (("content-type", "text/plain; charset=iso-8859-1"),), len(body))
        # The response to a HEAD request has no body (RFC 9112, 6.3).
        if not self._is_head:
            await self.data(body)

    async def finish(self) -> None:
        """Say that nothing follows, and wait shortly: a close with unread bytes would reset the connection."""
        loop = asyncio.get_running_loop()
        self.connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINISH_S):
                while await loop.sock_recv(self.connection, _MAX_HEAD_BYTES):
                    pass

    async def _send(self, data: bytes | None) -> None:
        async with asyncio.timeout(SILENCE_S):
            await asyncio.get_running_loop().sock_sendall(self.connection, data or b"")
