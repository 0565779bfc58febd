"""The end of links that peers open: it accepts them, and answers their questions."""

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

import structlog
from typing_extensions import override

from proxy.cluster.link.channels import LinkChannel
from proxy.cluster.link.connection import LinkConnection
from proxy.cluster.link.frames import (
    HELLO_BYTES,
    HTTP,
    NONCE_BYTES,
    PROOF_BYTES,
    Frame,
    FrameKind,
    Hello,
    LinkError,
    LinkKeys,
)
from proxy.cluster.postgres.joining import Membership
from sandboxes.task_owner import TaskOwner

log = structlog.get_logger()

MAX_UNPROVEN = 256
"""Most connections at once that have not proven the secret yet. For each further one, the oldest is closed: a member
proves the secret within a round trip, so a flood has to open as many connections in that time to keep it out."""

Handler = Callable[[Hello, bytes, Callable[[], LinkChannel]], Awaitable[bytes]]
"""Answers a question of a peer, which has proven that it is the member it says it is.

The third argument begins a channel, whose first message is the answer then; what the handler returns is not read.
"""


class LinkServer:
    """Accepts the links of peers and answers their questions.

    Attributes:
        make_http: Makes the protocol of a peer's HTTP connection, once the application can answer.
    """

    def __init__(self, secret: bytes, membership: Membership, handler: Handler) -> None:
        self.secret, self.membership, self.handler = secret, membership, handler
        self.tasks = TaskOwner()
        self._server: asyncio.Server | None = None
        # In the order in which they came.
        self._connections: dict[AcceptedLink, None] = {}
        self._latest: dict[int, AcceptedLink] = {}
        self.make_http: Callable[[Hello], asyncio.Protocol] | None = None
        self._given: set[asyncio.Transport] = set()

    async def listen(self, host: str, port: int) -> int:
        """Accept links; return the port, which is chosen if it is 0.

        Raises:
            OSError: The address cannot be listened on.
        """
        self._server = await asyncio.get_running_loop().create_server(lambda: AcceptedLink(self), host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def serve(self, listener: socket.socket) -> None:
        """Accept links on a socket that listens already."""
        self._server = await asyncio.get_running_loop().create_server(lambda: AcceptedLink(self), sock=listener)

    def is_latest(self, hello: Hello) -> bool:
        """Return whether the link that began with this greeting is open, and its member has opened no newer one."""
        latest = self._latest.get(hello.member)
        return latest is not None and latest.hello == hello and latest.is_open

    async def aclose(self) -> None:
        """Close the links. Answers that are not sent yet are lost."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.abort()
        for transport in self._given:
            transport.abort()
        self.tasks.cancel()
        await self.tasks.wait()

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

    def admit(self, connection: "AcceptedLink") -> None:
        """Note a connection that has proven nothing yet, and make room for it."""
        # Links that are open do not count: they have proven the secret, and there is one for each member.
        unproven = [each for each in self._connections if not each.is_open]
        if len(unproven) >= MAX_UNPROVEN:
            self.discard(unproven[0])
            unproven[0].abort()
        self._connections[connection] = None

    def discard(self, connection: "AcceptedLink") -> None:
        """Forget a connection that is closed."""
        self._connections.pop(connection, None)

    def replace(self, hello: Hello, connection: "AcceptedLink") -> None:
        """Let a peer's newest link take the place of the one before.

        Raises:
            LinkError: The link is older than the one that is there.
        """
        before = self._latest.get(hello.member)
        # Member, start and number of the link, in this order: a delayed connection does not replace a newer one.
        if before is not None and before.hello is not None and before.hello[:3] >= hello[:3]:
            raise LinkError(f"member {hello.member} has opened a newer link")
        self._latest[hello.member] = connection
        if before is not None:
            before.abort()


class AcceptedLink(LinkConnection):
    """The accepted end: it answers."""

    def __init__(self, server: LinkServer) -> None:
        super().__init__()
        self._server, self._keys = server, cast("LinkKeys | None", None)
        self.hello: Hello | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.admit(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.discard(self)

    @override
    def _greet(self) -> bytes:
        # 1. The opener's greeting. The answer proves the secret, so the opener sends its proof only to a member.
        if self._keys is None:
            if len(self._greeting) < HELLO_BYTES:
                return b""
            self.hello = Hello.unpack(bytes(self._greeting[:HELLO_BYTES]))
            member = self._server.membership
            own = Hello(member.number, member.boot, 0, secrets.token_bytes(NONCE_BYTES))
            self._keys = LinkKeys.derive(self._server.secret, member.cluster, self.hello, own)
            self._transport.write(own.pack() + self._keys.acceptor_proof)
        # 2. The opener's proof. Nothing of a peer is handled before it.
        size = HELLO_BYTES + PROOF_BYTES
        if len(self._greeting) < size:
            return b""
        if not secrets.compare_digest(bytes(self._greeting[HELLO_BYTES:size]), self._keys.opener_proof):
            raise LinkError("a peer does not have the cluster's secret")
        assert self.hello is not None
        if self.hello.use == HTTP:
            self._become_http(self.hello, bytes(self._greeting[size:]))
            return b""
        self._server.replace(self.hello, self)
        self._established(self._keys.to_opener, self._keys.to_acceptor)
        return bytes(self._greeting[size:])

    def _become_http(self, hello: Hello, rest: bytes) -> None:
        """Let the application have the connection, whose requests come from a member."""
        if self._timer is not None:
            self._timer.cancel()
        self._server.discard(self)
        self._server.give(hello, self._transport, rest)

    @override
    def _got(self, frame: Frame) -> None:
        if frame.kind is FrameKind.PING:
            self.send(FrameKind.PONG, 0, b"")
        elif frame.kind is FrameKind.ASK and not self._transport.is_closing():
            assert self.hello is not None
            answering = self._server.handler(self.hello, frame.content, partial(self._channels.open, frame.stream))
            self._server.tasks.spawn("cluster call", self._answer(frame.stream, answering))

    async def _answer(self, stream: int, answering: Awaitable[bytes]) -> None:
        try:
            content = await answering
            if self.is_open:
                self.send(FrameKind.ANSWER, stream, content)
        # The link carries all calls, and must not end for the defect of one.
        except Exception:
            log.exception("a call of a peer failed")
            if self.is_open:
                self.send(FrameKind.FAILED, stream, b"")
        await self.drain()
