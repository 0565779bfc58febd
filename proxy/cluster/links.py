"""Links between members: one TCP connection to each peer carries all questions to it, answered in any order.

An answer may be a stream, which goes on in both directions (`channels`).

A question has no time limit: tools may run for hours. A link that is silent for `SILENT_S` is dead, and so is one that
breaks. Its questions then fail with `LinkLostError`, and nobody knows whether they were taken: the asker sends them
again, under the same numbers, to whoever answers them now.

A peer's newer link ends its older one. What the older one still brings was sent before, and is not taken.
"""

import asyncio
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Protocol, cast

import structlog
from typing_extensions import override

from proxy.cluster.channels import Channel, ChannelEndedError, Channels
from proxy.cluster.database import Membership, Peer
from proxy.cluster.frames import (
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Frame,
    FrameKind,
    FrameReader,
    FrameWriter,
    Hello,
    LinkError,
    LinkKeys,
)
from sandboxes.task_owner import TaskOwner

log = structlog.get_logger()

PING_S = 0.5
"""Interval of the pings on a link, in seconds."""
SILENT_S = 2.0
"""Seconds without a byte after which a link is dead. Below a lease, so that a new owner is asked in time.

Halved, a busy machine loses its links. Doubled, calls wait longer for a machine that has gone.
"""
HANDSHAKE_S = 5.0
"""Seconds that a connection may take to prove the secret. Until then it can make this member hold 100 bytes."""
MAX_UNPROVEN = 256
"""Most connections at once that have not proven the secret yet. Further ones are closed."""

Handler = Callable[[Hello, bytes, Callable[[], Channel]], Awaitable[bytes]]
"""Answers a question of a peer, which has proven that it is the member it says it is.

The third argument begins a channel, whose first message is the answer then; what the handler returns is not read.
"""


Taker = Callable[[Hello, bytes, Callable[[], Channel]], bytes | Coroutine[Any, Any, bytes]]
"""Takes a call that this member may know the answer to. It returns that answer, or answers later as a handler does."""


class AskedAtOnce(Protocol):
    """A call that the peer may know the answer to. It gets one of these calls."""

    def known(self, content: bytes) -> None:
        """Take the answer that the peer knew."""
        ...

    def later(self, answer: asyncio.Future[bytes | Channel]) -> None:
        """Wait for the answer, as for one of `Link.ask`."""
        ...

    def lost(self) -> None:
        """Note that the link broke. Whether the peer has taken the call is not known."""
        ...


class LinkLostError(RuntimeError):
    """The link broke. Whether the peer has taken the question is not known."""


class PeerFailedError(RuntimeError):
    """The peer could not answer the question because of a defect. Its log has the reason."""


class _Connection(asyncio.Protocol, ABC):
    """What both ends of a link have in common: greeting first, then frames."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._greeting = bytearray()
        self._reader: FrameReader | None = None
        self._writer: FrameWriter | None = None
        self._out: list[bytes] = []
        self._heard_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._channels = Channels(self.send, self.drain)

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._timer = self._loop.call_later(HANDSHAKE_S, self.abort)

    @override
    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            if self._reader is None:
                self._greeting += data
                data = self._greet()
            for frame in self._frames(data):
                if not self._channels.got(frame):
                    self._got(frame)
        except LinkError as error:
            log.warning("a link was closed", reason=str(error))
            self.abort()

    @override
    def pause_writing(self) -> None:
        self._writable.clear()

    @override
    def resume_writing(self) -> None:
        self._writable.set()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        self._channels.lose()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_open(self) -> bool:
        """Whether the secret was proven and the connection is up."""
        return self._reader is not None and not self._transport.is_closing()

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def send(self, frame: Frame) -> None:
        """Send a frame. Frames of one turn of the event loop go out in one write; those of a closed link are lost."""
        assert self._writer is not None
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(self._writer.write(frame))

    async def drain(self) -> None:
        """Wait until the peer has read most of what was sent."""
        await self._writable.wait()

    def _frames(self, data: bytes) -> Iterator[Frame]:
        return iter(()) if self._reader is None else self._reader.feed(data)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if not self._transport.is_closing():
            self._transport.writelines(out)

    def _established(self, writer: bytes, reader: bytes) -> None:
        self._writer, self._reader = FrameWriter(writer), FrameReader(reader)
        assert self._timer is not None
        self._timer.cancel()
        self._watch()

    def _watch(self) -> None:
        """Close a link that is silent: its opener sends pings."""
        if self._loop.time() - self._heard_at > SILENT_S:
            self.abort()
            return
        self._timer = self._loop.call_later(PING_S, self._watch)

    @abstractmethod
    def _greet(self) -> bytes:
        """Read what has come of the peer's greeting; return what follows it."""

    @abstractmethod
    def _got(self, frame: Frame) -> None:
        """Take a frame of the peer."""


class Link(_Connection):
    """The opener's end: it asks."""

    def __init__(self, secret: bytes, cluster: str, hello: Hello, peer: Peer) -> None:
        super().__init__()
        self._secret, self._cluster, self._hello, self._peer = secret, cluster, hello, peer
        self._asked: dict[int, asyncio.Future[bytes | Channel]] = {}
        self._asked_at_once: dict[int, AskedAtOnce] = {}
        self._last = 0
        self.opened: asyncio.Future[None] = self._loop.create_future()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport.write(self._hello.pack())

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        lost = LinkLostError(f"the link to member {self._peer.name!r} broke")
        if not self.opened.done():
            self.opened.set_exception(lost)
        # Nobody may wait for the opening any more.
        self.opened.exception()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(lost)
        calls, self._asked_at_once = tuple(self._asked_at_once.values()), {}
        for call in calls:
            call.lost()

    @property
    def takes_more(self) -> bool:
        """Whether the link is open, and its peer reads what is sent."""
        return self.is_open and self._writable.is_set()

    def ask_at_once(self, content: bytes, call: AskedAtOnce) -> None:
        """Send a call that the peer may know the answer to. The link must be open."""
        stream = self._next()
        self._asked_at_once[stream] = call
        self.send(Frame(FrameKind.CALL, stream, content))

    def _next(self) -> int:
        # Four bytes; a link that lives for four billion questions begins again.
        self._last = self._last % 0xFFFFFFFF + 1
        return self._last

    async def ask(self, question: bytes) -> bytes | Channel:
        """Return the peer's answer, or the channel that it has begun; the caller closes it.

        Raises:
            LinkLostError: The link broke, and nobody knows whether the peer has taken the question.
            PeerFailedError: The peer met a defect.
        """
        if not self.is_open:
            raise LinkLostError(f"the link to member {self._peer.name!r} is closed")
        stream = self._next()
        answer = self._expect(stream)
        self.send(Frame(FrameKind.ASK, stream, question))
        try:
            await self.drain()
        except asyncio.CancelledError:
            answer.cancel()
            raise
        return await answered(answer)

    def _expect(self, stream: int) -> asyncio.Future[bytes | Channel]:
        answer: asyncio.Future[bytes | Channel] = self._loop.create_future()
        self._asked[stream] = answer
        answer.add_done_callback(lambda _: self._asked.pop(stream, None))
        return answer

    @override
    def _greet(self) -> bytes:
        size = HELLO_BYTES + PROOF_BYTES
        if len(self._greeting) < size:
            return b""
        acceptor = Hello.unpack(bytes(self._greeting[:HELLO_BYTES]))
        keys = LinkKeys.derive(self._secret, self._cluster, self._hello, acceptor)
        if not secrets.compare_digest(bytes(self._greeting[HELLO_BYTES:size]), keys.acceptor_proof):
            raise LinkError(f"{self._peer.url} does not have the cluster's secret")
        if (acceptor.member, acceptor.boot) != (self._peer.number, self._peer.boot):
            raise LinkError(f"another member than {self._peer.name!r} answers at {self._peer.url}")
        self._transport.write(keys.opener_proof)
        self._established(keys.to_acceptor, keys.to_opener)
        self.opened.set_result(None)
        return bytes(self._greeting[size:])

    @override
    def _got(self, frame: Frame) -> None:
        call = self._asked_at_once.pop(frame.stream, None)
        if call is not None:
            if frame.kind is FrameKind.KNOWN:
                call.known(frame.content)
                return
            call.later(self._expect(frame.stream))
        answer = self._asked.get(frame.stream)
        # Nobody waits for the answer to a question that was cancelled.
        if answer is None or answer.done():
            if frame.kind in (FrameKind.DATA, FrameKind.PIECE):
                self.send(Frame(FrameKind.CLOSE, frame.stream, b""))
            return
        if frame.kind in (FrameKind.DATA, FrameKind.PIECE):
            try:
                channel = self._channels.open(frame.stream)
            except ChannelEndedError as error:
                self.send(Frame(FrameKind.CLOSE, frame.stream, b""))
                answer.set_exception(PeerFailedError(str(error)))
                return
            channel.got(frame)
            answer.set_result(channel)
        elif frame.kind is FrameKind.ANSWER:
            answer.set_result(frame.content)
        elif frame.kind is FrameKind.FAILED:
            answer.set_exception(PeerFailedError(f"member {self._peer.name!r} failed. Its log has the reason."))

    @override
    def _watch(self) -> None:
        self.send(Frame(FrameKind.PING, 0, b""))
        super()._watch()


async def answered(answer: asyncio.Future[bytes | Channel]) -> bytes | Channel:
    """Return the answer to a question, or the channel that it began; the caller closes it.

    Raises:
        LinkLostError, PeerFailedError: See `Link.ask`.
    """
    try:
        return await answer
    except asyncio.CancelledError:
        # Both may happen in one turn of the event loop, and then nobody else would close the channel.
        if answer.done() and not answer.cancelled() and isinstance(begun := answer.result(), Channel):
            begun.close()
        raise


class Links:
    """The links that this member has opened, one to each peer."""

    def __init__(self, secret: bytes, membership: Membership) -> None:
        self._secret, self._membership = secret, membership
        self._links: dict[int, Link] = {}
        self._opening: dict[int, asyncio.Lock] = {}
        self._opened = 0

    async def ask(self, peer: Peer, question: bytes) -> bytes:
        """Ask a peer; the link is opened if there is none.

        Raises:
            LinkLostError: The peer cannot be reached, or the link broke.
            PeerFailedError: The peer met a defect.
        """
        answer = await self.call(peer, question)
        if isinstance(answer, Channel):
            answer.close()
            raise PeerFailedError(f"member {peer.name!r} has answered with a stream")
        return answer

    async def call(self, peer: Peer, question: bytes) -> bytes | Channel:
        """Ask a peer as `ask` does; it may begin a channel, which the caller closes.

        Raises:
            LinkLostError, PeerFailedError: See `ask`.
        """
        return await (await self._to(peer)).ask(question)

    def ready(self, peer: Peer) -> Link | None:
        """Return the link to a peer if a frame can be sent on it now."""
        link = self._links.get(peer.number)
        return link if link is not None and link.takes_more else None

    async def _to(self, peer: Peer) -> Link:
        link = self._links.get(peer.number)
        if link is not None and link.is_open:
            return link
        async with self._opening.setdefault(peer.number, asyncio.Lock()):
            link = self._links.get(peer.number)
            if link is None or not link.is_open:
                link = self._links[peer.number] = await self._open(peer)
            return link

    async def _open(self, peer: Peer) -> Link:
        self._opened += 1
        member = self._membership
        hello = Hello(member.number, member.boot, self._opened, secrets.token_bytes(NONCE_BYTES))
        host, _, port = peer.url.rpartition(":")
        link = Link(self._secret, member.cluster, hello, peer)
        try:
            async with asyncio.timeout(SILENT_S):
                await asyncio.get_running_loop().create_connection(lambda: link, host.strip("[]"), int(port))
                await link.opened
        except (OSError, TimeoutError, LinkLostError) as error:
            if hasattr(link, "_transport"):
                link.abort()
            raise LinkLostError(f"member {peer.name!r} cannot be reached at {peer.url}") from error
        return link

    def close(self) -> None:
        """Close all links. What was asked fails with `LinkLostError`."""
        for link in self._links.values():
            link.abort()


class LinkServer:
    """Accepts the links of peers and answers their questions."""

    def __init__(self, secret: bytes, membership: Membership, handler: Handler, taker: Taker) -> None:
        self.secret, self.membership, self.handler, self.taker = secret, membership, handler, taker
        self.tasks = TaskOwner()
        self._server: asyncio.Server | None = None
        self._connections: set[_Accepted] = set()
        self._latest: dict[int, _Accepted] = {}

    async def listen(self, host: str, port: int) -> int:
        """Accept links; return the port, which is chosen if it is 0.

        Raises:
            OSError: The address cannot be listened on.
        """
        self._server = await asyncio.get_running_loop().create_server(lambda: _Accepted(self), host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def serve(self, listener: socket.socket) -> None:
        """Accept links on a socket that listens already."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Accepted(self), sock=listener)

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
        self.tasks.cancel()
        await self.tasks.wait()

    def admit(self, connection: "_Accepted") -> bool:
        """Note a connection that has proven nothing yet; return whether there is room for it."""
        self._connections.add(connection)
        return sum(not each.is_open for each in self._connections) <= MAX_UNPROVEN

    def discard(self, connection: "_Accepted") -> None:
        """Forget a connection that is closed."""
        self._connections.discard(connection)

    def replace(self, hello: Hello, connection: "_Accepted") -> None:
        """Let a peer's newest link take the place of the one before.

        Raises:
            LinkError: The link is older than the one that is there.
        """
        before = self._latest.get(hello.member)
        if before is not None and before.hello is not None and before.hello[:3] >= hello[:3]:
            raise LinkError(f"member {hello.member} has opened a newer link")
        self._latest[hello.member] = connection
        if before is not None:
            before.abort()


class _Accepted(_Connection):
    """The other end: it answers."""

    def __init__(self, server: LinkServer) -> None:
        super().__init__()
        self._server, self._keys = server, cast("LinkKeys | None", None)
        self.hello: Hello | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._server.admit(self):
            self.abort()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.discard(self)

    @override
    def _greet(self) -> bytes:
        if self._keys is None:
            if len(self._greeting) < HELLO_BYTES:
                return b""
            self.hello = Hello.unpack(bytes(self._greeting[:HELLO_BYTES]))
            member = self._server.membership
            own = Hello(member.number, member.boot, 0, secrets.token_bytes(NONCE_BYTES))
            self._keys = LinkKeys.derive(self._server.secret, member.cluster, self.hello, own)
            self._transport.write(own.pack() + self._keys.acceptor_proof)
        size = HELLO_BYTES + PROOF_BYTES
        if len(self._greeting) < size:
            return b""
        if not secrets.compare_digest(bytes(self._greeting[HELLO_BYTES:size]), self._keys.opener_proof):
            raise LinkError("a peer does not have the cluster's secret")
        assert self.hello is not None
        self._server.replace(self.hello, self)
        self._established(self._keys.to_opener, self._keys.to_acceptor)
        return bytes(self._greeting[size:])

    @override
    def _got(self, frame: Frame) -> None:
        if frame.kind is FrameKind.PING:
            self.send(Frame(FrameKind.PONG, 0, b""))
        elif frame.kind is FrameKind.CALL and not self._transport.is_closing():
            self._take(frame)
        elif frame.kind is FrameKind.ASK and not self._transport.is_closing():
            assert self.hello is not None
            answering = self._server.handler(self.hello, frame.content, partial(self._channels.open, frame.stream))
            self._server.tasks.spawn("cluster call", self._answer(frame.stream, answering))

    def _take(self, frame: Frame) -> None:
        """Answer a call at once, or say that its answer comes later."""
        assert self.hello is not None
        try:
            taken = self._server.taker(self.hello, frame.content, partial(self._channels.open, frame.stream))
        # See `_answer`.
        except Exception:
            log.exception("a call of a peer failed")
            self.send(Frame(FrameKind.FAILED, frame.stream, b""))
            return
        if isinstance(taken, bytes):
            self.send(Frame(FrameKind.KNOWN, frame.stream, taken))
        else:
            self.send(Frame(FrameKind.LATER, frame.stream, b""))
            self._server.tasks.spawn("cluster call", self._answer(frame.stream, taken))

    async def _answer(self, stream: int, answering: Awaitable[bytes]) -> None:
        try:
            content = await answering
            if self.is_open:
                self.send(Frame(FrameKind.ANSWER, stream, content))
        # The link carries all calls, and must not end for the defect of one.
        except Exception:
            log.exception("a call of a peer failed")
            if self.is_open:
                self.send(Frame(FrameKind.FAILED, stream, b""))
        await self.drain()
