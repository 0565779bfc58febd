"""What this member answers its peers: calls of the tasks that it owns, and questions about its agents."""

import asyncio
from collections.abc import Awaitable, Callable

from proxy.cluster.database import DatabaseError
from proxy.cluster.frames import Hello
from proxy.cluster.links import LinkServer
from proxy.cluster.member import LEAVE_S, Member
from proxy.cluster.messages import (
    CallAnswer,
    CallQuestion,
    ConfirmAnswer,
    ConfirmQuestion,
    DrainQuestion,
    ElsewhereAnswer,
    MessageError,
    ReportAnswer,
    ReportQuestion,
    TakeQuestion,
    pack,
    unpack,
)
from proxy.cluster.origin import ORIGIN, Origin
from proxy.cluster.owned import DroppedError, Owned, TakenCall
from proxy.cluster.protocol import CopyKind, TakenCalls


class PeerQuestions:
    """Answers the questions of peers.

    Attributes:
        server: Accepts their links.
    """

    def __init__(
        self,
        member: Member,
        secret: bytes,
        known: Callable[[CallQuestion], bytes | None],
        answer: Callable[[CallQuestion], Awaitable[bytes]],
    ) -> None:
        """Answer for a member.

        Args:
            member: The member.
            secret: The secret that all members share.
            known: Returns the HTTP response to a call that the tree knows; None for any other call.
            answer: Returns the HTTP response to any other call.
        """
        self._member, self._known, self._answer = member, known, answer
        self.server = LinkServer(secret, member.database.membership, self.handle)

    async def aclose(self) -> None:
        """Answer the calls that were taken, and close the links."""
        calls = [call.answer for owned in self._member.gate.owned.values() for call in owned.answers.values()]
        if calls:
            await asyncio.wait(calls, timeout=LEAVE_S)
        await self.server.aclose()

    async def handle(self, hello: Hello, content: bytes) -> bytes:
        """Answer a question of a peer."""
        match unpack(content):
            case CallQuestion() as question:
                return await self._take(hello, question)
            case ReportQuestion() as question:
                return pack(self._report(question))
            case TakeQuestion() as question:
                return pack(await self._take_over(question))
            case DrainQuestion():
                return pack(await self._member.drain())
            case ConfirmQuestion() as question:
                call = self._member.ingress.call(question.number)
                return pack(ConfirmAnswer(call is not None and await call.waits()))
            case other:
                raise MessageError(f"a peer asked with the message {type(other).__name__}")

    def _report(self, question: ReportQuestion) -> ReportAnswer:
        accepted, get = self._member.adopt(question.task, question.view), self._member.gate.positions.get
        known = {number: position for number in question.rollouts if (position := get(number)) is not None}
        return ReportAnswer(accepted, known)

    async def _take(self, hello: Hello, question: CallQuestion) -> bytes:
        """Take a call of a peer, once for all its copies."""
        owned = self._member.gate.owned.get(question.task)
        if owned is None or owned.rules.view != question.view:
            return pack(await self._elsewhere(question))
        ingress, boot = hello.member, hello.boot
        taken = owned.taken.get(ingress)
        if taken is None or taken.boot < boot:
            taken = owned.taken[ingress] = TakenCalls(boot)
        if taken.boot > boot:
            return pack(ElsewhereAnswer(0))
        for key in [key for key in owned.answers if key[0] == ingress and (key[1] < boot or key[2] < question.oldest)]:
            del owned.answers[key]
        name = (ingress, boot, question.number)
        match taken.take(question.number, oldest=question.oldest):
            case CopyKind.NEW:
                call = owned.answers[name] = TakenCall(hello)
                origin = Origin(
                    ingress,
                    lambda: self.server.is_latest(call.link),
                    lambda: self._member.confirm(ingress, question.number),
                )
                # This task answers no other call.
                ORIGIN.set(origin)
                try:
                    response = self._known(question)
                except Exception:  # noqa: BLE001 - the regular path meets the same error and reports it
                    response = None
                if response is not None:
                    call.answer.set_result(pack(CallAnswer(owned.rules.view, origin.positions, response)))
                else:
                    owned.tasks.spawn("call of a peer", self._run(owned, name, call, question, origin))
            case CopyKind.COPY:
                call = owned.answers[name]
                call.link = hello
            case CopyKind.LATE:
                return pack(ElsewhereAnswer(0))
        return await asyncio.shield(call.answer)

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
            return ElsewhereAnswer(0 if owned is None else owned.rules.view)

    async def _elsewhere(self, question: CallQuestion) -> ElsewhereAnswer:
        """Say which view holds, for a peer that asks for another one."""
        # A newer view than the one that is owned here ends it.
        self._member.adopt(question.task, question.view)
        try:
            owner = await self._member.locate(question.task, creates=False)
        except DatabaseError:
            return ElsewhereAnswer(0)
        if isinstance(owner, Owned):
            return ElsewhereAnswer(owner.rules.view)
        return ElsewhereAnswer(0 if owner is None else owner.view)

    async def _run(
        self, owned: Owned, name: tuple[int, int, int], call: TakenCall, question: CallQuestion, origin: Origin
    ) -> None:
        """Answer a call that was taken, and that the tree does not know."""
        ingress, _, number = name
        try:
            response = await self._answer(question)
            # What the call has written besides its record: the beginning or the end of a rollout, for example.
            for written in origin.pending:
                await asyncio.shield(written)
        except DroppedError:
            response = b""
        except BaseException as error:
            owned.answers.pop(name, None)
            call.answer.set_exception(error if isinstance(error, Exception) else RuntimeError("the call was cancelled"))
            raise
        if owned.is_dropped or origin.is_stale:
            # The call has come to nothing here.
            owned.answers.pop(name, None)
            owned.taken[ingress].release(number)
            call.answer.set_result(pack(ElsewhereAnswer(0)))
        else:
            call.answer.set_result(pack(CallAnswer(owned.rules.view, origin.positions, response)))
