"""Data connections: the raw bytes of large units, beside the link of two members.

A link is served by the event loop, in frames with a tag each. A gigabyte on it would take seconds of both event loops,
while hits wait. So a thread at each end carries it over a TCP connection of its own, as FTP does.

The member that opens links opens data connections too, to the same address. It begins with a token, which both ends
know from a message on the link. When the other end has taken the connection, it sends one byte. Then bytes go in either
direction, until the end of the connection. They have no tags: their receiver compares a digest that the link brings.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager

from proxy.cluster.link.frames import LinkError
from proxy.cluster.postgres.database import Peer

MAGIC = b"FKPD"
TOKEN_BYTES = 32
"""Size of a token in bytes: too many to be guessed."""
OPEN_S = 30.0
"""How long the other end may take to take a connection, in seconds. A machine under load needs some; a lost connection
costs a sandbox elsewhere."""
_TAKEN = b"\1"

OpenData = Callable[[], Awaitable[socket.socket]]
"""Returns a data connection for the next large unit, in blocking mode; the caller closes it.

Raises `OSError` or `TimeoutError` if there is none.
"""


class ExpectedData:
    """The data connections that this member takes, by their tokens."""

    def __init__(self) -> None:
        self._expected: dict[bytes, asyncio.Queue[socket.socket]] = {}

    @contextmanager
    def expected(self, token: bytes) -> Iterator[OpenData]:
        """Take connections that begin with a token, until the end of the context.

        Raises:
            LinkError: The token is malformed, or in use.
        """
        if len(token) != TOKEN_BYTES or token in self._expected:
            raise LinkError("a data connection has no token of its own")
        arrived = self._expected[token] = asyncio.Queue()

        async def take() -> socket.socket:
            async with asyncio.timeout(OPEN_S):
                connection = await arrived.get()
            connection.setblocking(True)
            connection.sendall(_TAKEN)
            return connection

        try:
            yield take
        finally:
            del self._expected[token]
            while not arrived.empty():
                arrived.get_nowait().close()

    def take(self, token: bytes, connection: socket.socket) -> None:
        """Take a connection that has begun with a token.

        Raises:
            LinkError: No context expects it. It is closed.
        """
        if (arrived := self._expected.get(token)) is None:
            connection.close()
            raise LinkError("a data connection was opened that is not expected")
        arrived.put_nowait(connection)


async def open_data(peer: Peer, token: bytes) -> socket.socket:
    """Open a data connection to a peer; see `OpenData`."""
    loop = asyncio.get_running_loop()
    host, _, port = peer.url.rpartition(":")
    async with asyncio.timeout(OPEN_S):
        (family, kind, protocol, _, address), *_ = await loop.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
        with ExitStack() as until_taken:
            connection = until_taken.enter_context(socket.socket(family, kind, protocol))
            connection.setblocking(False)
            await loop.sock_connect(connection, address)
            await loop.sock_sendall(connection, MAGIC + token)
            if await loop.sock_recv(connection, 1) != _TAKEN:
                raise ConnectionResetError(f"member {peer.name!r} takes no data connection")
            connection.setblocking(True)
            until_taken.pop_all()
    return connection


def detached(transport: asyncio.Transport) -> socket.socket:
    """Return the connection of a transport, which is closed without it."""
    transport.pause_reading()
    connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    transport.abort()
    return connection
