"""The end of a link that opened it: it sends questions, and hands the answers to those that wait for them."""

import asyncio

from typing_extensions import override

from proxy.cluster.link.channels import ChannelEndedError, LinkChannel
from proxy.cluster.link.connection import LinkConnection
from proxy.cluster.link.frames import HELLO_BYTES, PROOF_BYTES, Frame, FrameKind, Hello, LinkKeys
from proxy.cluster.postgres.database import Peer


class LinkLostError(RuntimeError):
    """The link broke. Whether the peer has taken the question is not known."""


class MemberFailedError(RuntimeError):
    """The peer could not answer the question because of a defect. Its log has the reason."""


class Link(LinkConnection):
    """The opener's end: it sends questions."""

    def __init__(self, secret: bytes, cluster: str, hello: Hello, peer: Peer) -> None:
        super().__init__()
        self._secret, self._cluster, self._hello, self._peer = secret, cluster, hello, peer
        self._answers: dict[int, asyncio.Future[bytes | LinkChannel]] = {}
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
        # Read here, because no task may wait for the opening any more.
        self.opened.exception()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(lost)

    def _next(self) -> int:
        # Four bytes; a link that lives for four billion questions begins again.
        self._last = self._last % 0xFFFFFFFF + 1
        return self._last

    async def ask(self, question: bytes) -> bytes | LinkChannel:
        """Return the peer's answer, or the channel that it has begun; the caller closes it.

        Raises:
            LinkLostError: The link broke, and it is unknown whether the peer has taken the question.
            MemberFailedError: The peer met a defect.
        """
        if not self.is_open:
            raise LinkLostError(f"the link to member {self._peer.name!r} is closed")
        # Expected before it is sent, so that no answer can come too early.
        stream = self._next()
        answer = self._expect(stream)
        self.send(FrameKind.ASK, stream, question)
        try:
            # A peer that does not read holds up those that ask it, and not this member's memory.
            await self.drain()
        except asyncio.CancelledError:
            answer.cancel()
            raise
        return await answered(answer)

    def _expect(self, stream: int) -> asyncio.Future[bytes | LinkChannel]:
        answer: asyncio.Future[bytes | LinkChannel] = self._loop.create_future()
        self._answers[stream] = answer
        answer.add_done_callback(lambda _: self._answers.pop(stream, None))
        return answer

    @override
    def _greet(self) -> bytes:
        size = HELLO_BYTES + PROOF_BYTES
        if len(self._greeting) < size:
            return b""
        acceptor = Hello.unpack(bytes(self._greeting[:HELLO_BYTES]))
        keys = LinkKeys.derive(self._secret, self._cluster, self._hello, acceptor)
        keys.require(bytes(self._greeting[HELLO_BYTES:size]), acceptor, (self._peer.number, self._peer.boot))
        self._transport.write(keys.opener_proof)
        self._established(keys.to_acceptor, keys.to_opener)
        self.opened.set_result(None)
        return bytes(self._greeting[size:])

    @override
    def _got(self, frame: Frame) -> None:
        answer = self._answers.get(frame.stream)
        # No task waits for the answer to a question that was cancelled.
        if answer is None or answer.done():
            if frame.kind in (FrameKind.DATA, FrameKind.PIECE):
                self.send(FrameKind.CLOSE, frame.stream, b"")
            return
        if frame.kind in (FrameKind.DATA, FrameKind.PIECE):
            try:
                channel = self._channels.open(frame.stream)
            except ChannelEndedError as error:
                self.send(FrameKind.CLOSE, frame.stream, b"")
                answer.set_exception(MemberFailedError(str(error)))
                return
            channel.got(frame)
            answer.set_result(channel)
        elif frame.kind is FrameKind.ANSWER:
            answer.set_result(frame.content)
        elif frame.kind is FrameKind.FAILED:
            answer.set_exception(MemberFailedError(f"member {self._peer.name!r} failed. Its log has the reason."))

    @override
    def _watch(self) -> None:
        self.send(FrameKind.PING, 0, b"")
        super()._watch()


async def answered(answer: asyncio.Future[bytes | LinkChannel]) -> bytes | LinkChannel:
    """Return the answer to a question, or the channel that it began; the caller closes it.

    Raises:
        LinkLostError, MemberFailedError: See `Link.ask`.
    """
    try:
        return await answer
    except asyncio.CancelledError:
        # Both may happen in one turn of the event loop, and then nothing else would close the channel.
        if answer.done() and not answer.cancelled() and isinstance(begun := answer.result(), LinkChannel):
            begun.close()
        raise
