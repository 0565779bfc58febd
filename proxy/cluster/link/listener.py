"""Accepts the connections of peers, which then are HTTP connections to this member's application."""

import asyncio
import hmac
import secrets
import socket
from typing import TYPE_CHECKING, cast

import structlog
from typing_extensions import override

from proxy.cluster.link.greeting import HELLO_BYTES, NONCE_BYTES, PROOF_BYTES, GreetingError, Hello, proof
from proxy.cluster.postgres.joining import Membership

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
        self.secret, self.membership = secret, membership
        self.make_http: Callable[[Hello], asyncio.Protocol] | None = None
        self._server: asyncio.Server | None = None
        # In the order in which they came.
        self._unproven: dict[_Greeting, None] = {}
        self._given: set[asyncio.Transport] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Accept peers on a socket that listens already."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Greeting(self), sock=listener)

    def close(self) -> None:
        """Close all connections. Requests on them are made again elsewhere."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._unproven):
            connection.abort()
        for transport in self._given:
            transport.abort()

    def admit(self, connection: "_Greeting") -> None:
        """Note a connection that has proven nothing yet, and make room for it."""
        if len(self._unproven) >= MAX_UNPROVEN:
            oldest = next(iter(self._unproven))
            self.discard(oldest)
            oldest.abort()
        self._unproven[connection] = None

    def discard(self, connection: "_Greeting") -> None:
        """Forget a connection that is closed, or has proven the secret."""
        self._unproven.pop(connection, None)

    def give(self, hello: Hello, transport: asyncio.Transport, rest: bytes) -> None:
        """Give the application a connection of a peer, with what has come on it."""
        if self.make_http is None:
            transport.abort()
            return
        protocol = self.make_http(hello)
        self._given = {each for each in self._given if not each.is_closing()} | {transport}
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if rest:
            protocol.data_received(rest)


class _Greeting(asyncio.Protocol):
    """A connection until its peer has proven the secret."""

    def __init__(self, listener: PeerListener) -> None:
        self._listener, self._held = listener, bytearray()
        self._hello: Hello | None = None
        self._own = Hello(0, 0, b"")

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_S, self.abort)
        self._listener.admit(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._listener.discard(self)

    @override
    def data_received(self, data: bytes) -> None:
        self._held += data
        try:
            self._greet()
        except GreetingError as error:
            log.warning("a connection of a peer was closed", reason=str(error))
            self.abort()

    def abort(self) -> None:
        self._transport.abort()

    def _greet(self) -> None:
        secret, member = self._listener.secret, self._listener.membership
        # 1. The opener's greeting. The answer proves the secret, so the opener sends its proof only to a member.
        if self._hello is None:
            if len(self._held) < HELLO_BYTES:
                return
            self._hello = Hello.unpack(bytes(self._held[:HELLO_BYTES]))
            self._own = Hello(member.number, member.boot, secrets.token_bytes(NONCE_BYTES))
            own_proof = proof(secret, member.cluster, self._hello, self._own, of_opener=False)
            self._transport.write(self._own.pack() + own_proof)
        # 2. The opener's proof. Nothing of a peer is handled before it.
        size = HELLO_BYTES + PROOF_BYTES
        if len(self._held) < size:
            return
        expected = proof(secret, member.cluster, self._hello, self._own, of_opener=True)
        if not hmac.compare_digest(bytes(self._held[HELLO_BYTES:size]), expected):
            raise GreetingError("a peer does not have the cluster's secret")
        self._timer.cancel()
        self._listener.discard(self)
        self._listener.give(self._hello, self._transport, bytes(self._held[size:]))
