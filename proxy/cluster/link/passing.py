"""Requests that this member passes on to others, as HTTP.

Theory of operation:

1. A connection to a peer begins with a greeting (`link.greeting`), by which both ends prove the secret. Then it is an
   HTTP connection to the peer's application, and each request on it comes from this member. A connection whose response
   has ended is used again.
2. The request goes as it came, with one header more (`Passed`). Bodies are passed on in both directions as they come,
   so a slow reader holds up the writer. A connection that is closed is a client that has left.
3. A peer that does not have the task answers 421 with the header `ELSEWHERE`. It passes nothing on.
4. A connection that becomes a stream (WebSocket, Docker) has a connection to the peer of its own (`connection`).
   The agent's bytes come on it, so the peer trusts its first request only (`Tunnelled`).
5. What members ask each other is a request too, to the path `ASK`.
6. Nobody knows how long a call takes. So a peer with unanswered requests is asked every `PING_S` whether it lives. One
   that is silent for `SILENT_S` loses its connections, and the requests are made again elsewhere under their numbers.
"""

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Self
from urllib.parse import quote, unquote

import structlog
from typing_extensions import override

from proxy.cluster.link.greeting import (
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    GreetingError,
    Hello,
    proof,
    require_proof,
)
from proxy.cluster.postgres.database import Peer
from proxy.cluster.postgres.joining import Membership
from proxy.http.asgi import Scope
from proxy.http.passed_head import PASSED
from proxy.refusals import RefusalError
from sandboxes.listener import Listener
from sandboxes.task_owner import TaskOwner
from sandboxes.tool_clients.http1 import MalformedResponseError, ReaderConnection, WholeResponse, converse

log = structlog.get_logger()

ELSEWHERE = "x-forkpoint-view"
"""The header of a peer that does not have the task. Earlier releases read its value, the view that the peer knows."""
PEER = "forkpoint.peer"
"""The key of a peer's greeting in the `state` of the requests on its connection."""
TUNNEL = "forkpoint.tunnel"
"""The key of a `Tunnelled` in the `state` of the requests on the connection of an agent's stream."""
ASK = "/peer"
PING_S = 0.5
SILENT_S = 2.0
"""Seconds without an answer to that after which a peer is dead. Below a lease, so that a new owner gets the requests in
time."""
IDLE_S = 30.0
"""How long a connection waits for its next request, in seconds. The peer closes it after two minutes."""
_CHUNK_BYTES = 1 << 16
_PING = b"GET /healthz HTTP/1.1\r\nhost: member\r\n\r\n"


class PeerLostError(RuntimeError):
    """A peer did not answer, or not to the end. Whether it has taken the request is not known."""


class Passed(NamedTuple):
    """What a member says of a request that it passes on."""

    view: int  # The owner's view, as the ingress knows it.
    number: int  # Number of the call among those of this start of the ingress.
    oldest: int  # Number of the oldest call of the task that the ingress may make again.
    is_again: bool
    scheme: str  # `http` or `https`, as the agent has used it.
    task: str
    client: str = "/"  # Address and port of the agent, with a slash between them, or that alone.

    def pack(self) -> bytes:
        """Return the value of the header."""
        numbers = f"{self.view} {self.number} {self.oldest} {self.is_again:d}"
        return f"{numbers} {self.scheme} {quote(self.task, safe='')} {self.client}".encode()

    @classmethod
    def of(cls, scope: Scope) -> Self | None:
        """Return what the header of a peer's request says; None for a request that is not passed on."""
        # The first one: a client may have sent another one.
        value = next((value for name, value in scope["headers"] if name == PASSED), None)
        if value is None:
            return None
        view, number, oldest, is_again, scheme, task, client = value.decode().split(" ")
        return cls(int(view), int(number), int(oldest), is_again == "1", scheme, unquote(task), client)

    @classmethod
    def taken_from(cls, scope: Scope) -> Self | None:
        """Take the header out of a request of a peer, which then comes from the agent; see `of`."""
        passed = cls.of(scope)
        scope["headers"] = [header for header in scope["headers"] if header[0] != PASSED]
        if passed is not None and scope["type"] == "http":
            host, _, port = passed.client.partition("/")
            scope["scheme"], scope["client"] = passed.scheme, (host, int(port)) if port else None
        return passed


async def in_chunks(body: AsyncIterator[bytes], failed: Callable[[], object]) -> AsyncIterator[bytes]:
    """Yield a body in HTTP's chunked form. `failed` is called if it has no end, which the peer would wait for."""
    try:
        async for piece in body:
            if piece:
                yield b"%x\r\n%b\r\n" % (len(piece), piece)
    except (OSError, RefusalError):
        failed()
        raise
    yield b"0\r\n\r\n"


@dataclass(slots=True)
class Tunnelled:
    """The connection of an agent's stream, at the owner. A peer has passed its first request on, and nothing else."""

    peer: Hello
    is_used: bool = False  # Whether the first request has come. What follows is the agent's own word.

    def take(self) -> Hello | None:
        """Return the peer that has passed the next request on; None if it was none."""
        peer = None if self.is_used else self.peer
        self.is_used = True
        return peer


class PeerConnection(ReaderConnection):
    """A connection to a peer that has proven the secret. Implements `http1.Connection`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self._idle_since = math.inf

    @override
    def close(self) -> None:
        """Do nothing: the connection may be used again."""

    def abort(self) -> None:
        """Close the connection at once."""
        super().close()

    def rest(self) -> None:
        """Note that no request is on the connection."""
        self._idle_since = asyncio.get_running_loop().time()

    @property
    def is_usable(self) -> bool:
        """Whether the connection may take another request."""
        is_open = not self._reader.at_eof() and not self._writer.is_closing()
        return is_open and asyncio.get_running_loop().time() - self._idle_since < IDLE_S


@dataclass(slots=True)
class _Connections:
    idle: list[PeerConnection] = field(default_factory=list)
    busy: set[PeerConnection] = field(default_factory=set)
    is_watched: bool = False


class Passing:
    """Passes requests on to peers."""

    def __init__(self, secret: bytes, membership: Membership) -> None:
        self._secret, self._membership = secret, membership
        self._to: dict[Peer, _Connections] = {}
        self._tasks = TaskOwner()

    async def request(self, peer: Peer, head: bytes, body: bytes | AsyncIterator[bytes], listener: Listener) -> None:
        """Pass a request on, and its response to the listener. Raises PeerLostError."""
        to = self._to.get(peer) or self._begin(peer)
        connection, is_whole = await self._connection(peer, to), False
        self._use(connection, peer, to)
        try:
            await converse(connection, head, body, listener, silence_s=1e9)
            # Of a body in pieces the peer may have left something unread.
            is_whole = isinstance(body, bytes) and len(body) <= _CHUNK_BYTES
        except (OSError, MalformedResponseError, TimeoutError) as error:
            raise PeerLostError(f"member {peer.name!r} did not answer: {error}") from error
        finally:
            to.busy.discard(connection)
            if is_whole:
                connection.rest()
                to.idle.append(connection)
            else:
                connection.abort()

    @asynccontextmanager
    async def connection(self, peer: Peer) -> AsyncIterator[PeerConnection]:
        """Yield a connection for an agent's stream, which ends if the peer is silent. Raises PeerLostError."""
        to, connection = self._to.get(peer) or self._begin(peer), await self.open(peer, is_tunnel=True)
        self._use(connection, peer, to)
        try:
            yield connection
        finally:
            to.busy.discard(connection)
            connection.abort()

    async def lives(self, peer: Peer) -> bool:
        """Return whether a peer answers in time."""
        try:
            async with asyncio.timeout(SILENT_S):
                await self.request(peer, _PING, b"", WholeResponse())
        except (PeerLostError, TimeoutError):
            return False
        return True

    async def ask(self, peer: Peer, question: bytes) -> bytes:
        """Ask a peer what only members ask. Raises PeerLostError: it does not answer."""
        head = b"POST %b HTTP/1.1\r\nhost: member\r\ncontent-length: %d\r\n\r\n" % (ASK.encode(), len(question))
        answer = WholeResponse()
        await self.request(peer, head, question, answer)
        if answer.status != 200:
            raise PeerLostError(f"member {peer.name!r} has answered with the status {answer.status}")
        return bytes(answer.body)

    def close(self) -> None:
        """Close all connections. Requests on them fail with `PeerLostError`."""
        self._tasks.cancel()
        for to in self._to.values():
            for connection in (*to.idle, *to.busy):
                connection.abort()

    def _use(self, connection: PeerConnection, peer: Peer, to: _Connections) -> None:
        to.busy.add(connection)
        if not to.is_watched:
            to.is_watched = True
            self._tasks.spawn("watch a peer", self._watch(peer, to))

    def _begin(self, peer: Peer) -> _Connections:
        """Begin to have connections to a start of a peer; those to earlier ones are closed."""
        for known, to in tuple(self._to.items()):
            for connection in [each for each in to.idle if not each.is_usable]:
                connection.abort()
                to.idle.remove(connection)
            if not to.idle and not to.busy and not to.is_watched:
                del self._to[known]
        return self._to.setdefault(peer, _Connections())

    async def _connection(self, peer: Peer, to: _Connections) -> PeerConnection:
        while to.idle:
            connection = to.idle.pop()
            if connection.is_usable:
                return connection
            connection.abort()
        return await self.open(peer)

    async def open(self, peer: Peer, *, is_tunnel: bool = False) -> PeerConnection:
        """Connect to a peer, and prove the secret to each other. Raises PeerLostError: it cannot be reached."""
        member, writer = self._membership, None
        hello = Hello(member.number, member.boot, secrets.token_bytes(NONCE_BYTES), is_tunnel)
        host, _, port = peer.url.rpartition(":")
        try:
            async with asyncio.timeout(SILENT_S):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.write(hello.pack())
                greeting = await reader.readexactly(HELLO_BYTES + PROOF_BYTES)
                answered = Hello.unpack(greeting[:HELLO_BYTES])
                require_proof(greeting[HELLO_BYTES:], self._secret, member.cluster, hello, answered, of_opener=False)
                answered.require(peer.number, peer.boot)
                writer.write(proof(self._secret, member.cluster, hello, answered, of_opener=True))
        except (OSError, EOFError, TimeoutError, GreetingError) as error:
            if writer is not None:
                writer.transport.abort()
            raise PeerLostError(f"member {peer.name!r} cannot be reached at {peer.url}: {error}") from error
        return PeerConnection(reader, writer)

    async def _watch(self, peer: Peer, to: _Connections) -> None:
        """Ask a peer whether it lives as long as requests are unanswered."""
        while True:
            await asyncio.sleep(PING_S)
            if not to.busy:
                break
            if not await self.lives(peer):
                log.warning("a peer is silent", member=peer.name)
                for connection in (*to.busy, *to.idle):
                    connection.abort()
                break
        to.is_watched = False
