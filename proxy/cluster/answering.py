"""What this member answers its peers: calls of the tasks that it owns, and questions about its agents."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from proxy.cluster.link.channels import LinkChannel
from proxy.cluster.link.frames import Hello
from proxy.cluster.link.server import LinkServer
from proxy.cluster.member import LEAVE_S, Member
from proxy.cluster.messages import (
    CallAnswer,
    CallQuestion,
    ConfirmAnswer,
    ConfirmQuestion,
    DrainAnswer,
    DrainQuestion,
    ElsewhereAnswer,
    HandQuestion,
    LoadAnswer,
    LoadQuestion,
    TakeQuestion,
    unpack,
)
from proxy.cluster.origin import ORIGIN, Origin
from proxy.cluster.owned import DroppedError, Owned
from proxy.cluster.postgres.connection import DatabaseError
from sandboxes.ipc.codec import encode
from sandboxes.ipc.frames import MalformedFrameError


class PeerPlane(Protocol):
    """The data plane of this member, as calls of peers need it."""

    async def converse_peer(self, question: CallQuestion, owned: Owned, channel: LinkChannel) -> None:
        """Serve a connection that is a stream from the beginning."""
        ...


class PeerQuestions:
    """Answers the questions of peers.

    Attributes:
        server: Accepts their links.
    """

    def __init__(self, member: Member, secret: bytes, plane: PeerPlane) -> None:
        """Answer for a member, with the secret that all members share."""
        self._member, self._plane = member, plane
        self.server = LinkServer(secret, member.database.membership, self.handle)
        self._unanswered: set[asyncio.Future[None]] = set()

    async def aclose(self) -> None:
        """Answer the calls that were taken, and close the links."""
        if self._unanswered:
            await asyncio.wait(self._unanswered, timeout=LEAVE_S)
        await self.server.aclose()

    async def handle(self, hello: Hello, content: bytes, begin: Callable[[], LinkChannel]) -> bytes:
        """Answer a question of a peer."""
        match unpack(content):
            case CallQuestion() as question:
                return encode(await self._answer(hello, question, begin))
            case TakeQuestion() as question:
                return encode(await self._take_over(question))
            case DrainQuestion() | HandQuestion() | LoadQuestion() as question:
                return encode(await self._operate(question))
            case ConfirmQuestion(boot=boot, number=number):
                is_own = boot == self._member.database.membership.boot
                call = self._member.ingress.call(number) if is_own else None
                return encode(ConfirmAnswer(call is not None and await call.waits()))
            case other:
                raise MalformedFrameError(f"a peer sent the message {type(other).__name__}")

    async def _operate(self, question: DrainQuestion | HandQuestion | LoadQuestion) -> DrainAnswer | LoadAnswer:
        match question:
            case DrainQuestion():
                return await self._member.drain()
            case HandQuestion(task=task, target=target):
                return await self._member.hand_to(task, target)
            case LoadQuestion():
                return self._member.load

    async def _take_over(self, question: TakeQuestion) -> ElsewhereAnswer:
        """Take a task over from a member that lives and asks for it."""
        task = self._member.ingress.task(question.task)
        async with task.looking:
            owned = self._member.gate.owned.get(question.task)
            if owned is None and not self._member.is_leaving:
                try:
                    owner = await self._member.database.owner(question.task)
                    if question.view == (0 if owner is None else owner.view):
                        owned = await self._member.claim(question.task)
                except DatabaseError:
                    return ElsewhereAnswer(0)
            return ElsewhereAnswer(0 if owned is None else owned.view)

    async def _elsewhere(self, question: CallQuestion) -> ElsewhereAnswer:
        """Say which view holds, for a peer that asks for another one."""
        # A newer view than the one that is owned here ends it.
        self._member.adopt(question.task, question.view)
        try:
            owner = await self._member.locate(question.task, creates=False)
        except DatabaseError:
            return ElsewhereAnswer(0)
        return ElsewhereAnswer(0 if owner is None else owner.view)

    async def _answer(
        self, hello: Hello, question: CallQuestion, begin: Callable[[], LinkChannel]
    ) -> CallAnswer | ElsewhereAnswer:
        """Answer a call of a peer, in a task of its own. If the link breaks meanwhile, the peer makes it again."""
        owned = self._member.gate.owned.get(question.task)
        if owned is None or owned.view != question.view:
            return await self._elsewhere(question)
        origin = Origin(
            hello.member, hello.boot, question.number, question.oldest, question.is_again,
            lambda: self.server.is_latest(hello),
            lambda: self._member.confirm(hello.member, hello.boot, question.number),
        )  # fmt: skip
        ORIGIN.set(origin)
        unanswered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unanswered.add(unanswered)

        def answered() -> None:
            self._unanswered.discard(unanswered)
            if not unanswered.done():
                unanswered.set_result(None)

        async def begin_response(head: bytes) -> LinkChannel:
            await owned.settled()
            owned.require()
            channel = begin()
            channel.write(encode(CallAnswer(head)))
            answered()
            return channel

        try:
            response = await self._run(question, owned, begin_response)
            await owned.settled()
        except DroppedError:
            return ElsewhereAnswer(0)
        finally:
            origin.is_over = True
            answered()
        # What a task that was dropped has answered is in the log, or is made again.
        return ElsewhereAnswer(0) if owned.is_dropped else CallAnswer(response)

    async def _run(
        self, question: CallQuestion, owned: Owned, begin: Callable[[bytes], Awaitable[LinkChannel]]
    ) -> bytes:
        """Serve a stream."""
        channel = await begin(b"")
        try:
            with owned.cutting(channel.abort):
                await self._plane.converse_peer(question, owned, channel)
        finally:
            channel.close()
        return b""
