"""Accepts the connections of peers, which then are HTTP connections to this member's application."""

import asyncio
import secrets
import socket
from typing import TYPE_CHECKING, cast

import structlog

from proxy.cluster.link.greeting import (
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    GreetingError,
    Hello,
    proof,
    require_proof,
)
from proxy.cluster.postgres.joining import Membership
from sandboxes.task_owner import TaskOwner

if TYPE_CHECKING:
    from collections.abc import Callable

log = structlog.get_logger()

HANDSHAKE_S = 5.0
"""Seconds that a connection may take to prove the secret. Until then it can make this member hold 100 bytes."""
MAX_UNPROVEN = 256
"""Most connections at once that have not proven the secret yet. For each further one, the oldest is closed: a member
proves the secret within a round trip, so a flood has to open as many connections in that time to keep it out."""


class PeerListener:
    """Accepts peers."""

    def __init__(self, secret: bytes, membership: Membership) -> None:
        self._secret, self._membership = secret, membership
        self.make_http: Callable[[Hello], asyncio.Protocol] | None = None
        self._server: asyncio.Server | None = None
        self._unproven: dict[asyncio.StreamWriter, None] = {}  # In the order in which they came.
        # Writers of the application's connections: one that is not kept closes its connection.
        self._given: set[asyncio.StreamWriter] = set()
        self._tasks = TaskOwner()

    async def serve(self, listener: socket.socket) -> None:
        """Accept peers on a socket that listens already."""
        self._server = await asyncio.start_server(self._admit, sock=listener)

    def close(self) -> None:
        """Close all connections. Requests on them are made again elsewhere."""
        if self._server is not None:
            self._server.close()
        for writer in (*self._unproven, *self._given):
            writer.transport.abort()

    def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._unproven) >= MAX_UNPROVEN:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.transport.abort()
        self._unproven[writer] = None
        self._tasks.spawn("greet a peer", self._greet(reader, writer))

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cluster, number, boot = self._membership
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                # 1. The answer proves the secret, so the opener sends its proof only to a member.
                hello = Hello.unpack(await reader.readexactly(HELLO_BYTES))
                own = Hello(number, boot, secrets.token_bytes(NONCE_BYTES))
                writer.write(own.pack() + proof(self._secret, cluster, hello, own, of_opener=False))
                # 2. Nothing of a peer is handled before its proof.
                proven = await reader.readexactly(PROOF_BYTES)
                require_proof(proven, self._secret, cluster, hello, own, of_opener=True)
        except GreetingError as error:
            log.warning("a connection of a peer was closed", reason=str(error))
            writer.transport.abort()
        except (OSError, EOFError, TimeoutError):
            writer.transport.abort()
        else:
            await self._give(hello, reader, writer)
        finally:
            self._unproven.pop(writer, None)

    async def _give(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Give the application a connection of a peer, with what has come on it."""
        if self.make_http is None or writer.is_closing():
            writer.transport.abort()
            return
        protocol, transport = self.make_http(hello), cast("asyncio.Transport", writer.transport)
        self._given = {each for each in self._given if not each.is_closing()} | {writer}
        # From here on, the reader gets no more, and returns what it has without waiting.
        transport.set_protocol(protocol)
        reader.feed_eof()
        rest = await reader.read()
        protocol.connection_made(transport)
        if rest:
            protocol.data_received(rest)
