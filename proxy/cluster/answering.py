"""What this member answers its peers: calls of the tasks that it owns, and questions about its agents."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from proxy.cluster.channels import Channel
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
    Kind,
    MessageError,
    ReportAnswer,
    ReportQuestion,
    StreamedAnswer,
    TakeQuestion,
    pack,
    unpack,
)
from proxy.cluster.origin import ORIGIN, Origin
from proxy.cluster.owned import DroppedError, Owned, TakenCall
from proxy.cluster.protocol import CopyKind, TakenCalls
from proxy.cluster.streams import Begin


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
        answer: Callable[[CallQuestion, Owned, Begin], Awaitable[bytes | None]],
        converse: Callable[[CallQuestion, Owned, Channel], Awaitable[None]],
    ) -> None:
        """Answer for a member.

        Args:
            member: The member.
            secret: The secret that all members share.
            known: Returns the HTTP response to a call that the tree knows; None for any other call.
            answer: Returns the HTTP response to any other call; None after it has sent a stream.
            converse: Serves a connection that is a stream from the beginning.
        """
        self._member, self._known, self._answer, self._converse = member, known, answer, converse
        self.server = LinkServer(secret, member.database.membership, self.handle)

    async def aclose(self) -> None:
        """Answer the calls that were taken, and close the links."""
        calls = [call.answer for owned in self._member.gate.owned.values() for call in owned.answers.values()]
        if calls:
            await asyncio.wait(calls, timeout=LEAVE_S)
        await self.server.aclose()

    async def handle(self, hello: Hello, content: bytes, begin: Callable[[], Channel]) -> bytes:
        """Answer a question of a peer."""
        match unpack(content):
            case CallQuestion() as question:
                return await self._take(hello, question, begin)
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

    async def _take(self, hello: Hello, question: CallQuestion, begin: Callable[[], Channel]) -> bytes:
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
                response = self._known_whole(question)
                if response is not None:
                    call.answer.set_result(pack(CallAnswer(owned.rules.view, origin.positions, response)))
                else:
                    taken_call = _Taken(owned, name, call, origin, begin)
                    work = self._run if question.kind == Kind.CALL else self._serve_stream
                    owned.tasks.spawn("call of a peer", work(taken_call, question))
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

    def _known_whole(self, question: CallQuestion) -> bytes | None:
        if question.kind != Kind.CALL:
            return None
        try:
            return self._known(question)
        except Exception:  # noqa: BLE001 - the regular path meets the same error and reports it
            return None

    async def _run(self, taken: "_Taken", question: CallQuestion) -> None:
        """Answer a call that was taken, and that the tree does not know."""
        owned, call, origin = taken.owned, taken.call, taken.origin
        try:
            response = await self._answer(question, owned, taken.begin_response)
            if response is not None:
                await taken.written()
        except DroppedError:
            response = b""
        except BaseException as error:
            taken.fail(error)
            raise
        if response is None:
            # A stream: `begin_response` has answered.
            origin.end()
        elif owned.is_dropped or origin.is_stale:
            taken.release()
        else:
            call.answer.set_result(pack(CallAnswer(owned.rules.view, origin.positions, response)))
            origin.end()

    async def _serve_stream(self, taken: "_Taken", question: CallQuestion) -> None:
        """Serve a connection that is a stream from the beginning."""
        try:
            channel = await taken.begin_response(b"")
        except DroppedError:
            taken.release()
            return
        except BaseException as error:
            taken.fail(error)
            raise
        try:
            with taken.owned.cutting(channel.abort):
                await self._converse(question, taken.owned, channel)
        finally:
            taken.origin.end()
            channel.close()


@dataclass(frozen=True, slots=True)
class _Taken:
    """A call that was taken, and that an application answers.

    Attributes:
        owned: The task.
        name: Its ingress, the start of the ingress, and its number.
        call: Where its answer goes.
        origin: What its code works for.
        begin: Begins the channel of the question that brought it first.
    """

    owned: Owned
    name: tuple[int, int, int]
    call: TakenCall
    origin: Origin
    begin: Callable[[], Channel]

    async def begin_response(self, head: bytes) -> Channel:
        """Answer with the beginning of a stream.

        Raises:
            DroppedError: The call has come to nothing here.
            ChannelEndedError: The link is closed, or has too many streams.
        """
        await self.written()
        if self.owned.is_dropped or self.origin.is_stale:
            raise DroppedError(self.owned.task)
        channel = self.begin()
        # What this answer does not carry must be in the log, and the answer cannot be sent again.
        self.origin.in_log = True
        channel.write(pack(CallAnswer(self.owned.rules.view, self.origin.positions, head)))
        self.call.answer.set_result(pack(StreamedAnswer()))
        return channel

    async def written(self) -> None:
        """Wait for what the call has written besides its record: the beginning or the end of a rollout, for example."""
        for written in self.origin.pending:
            await asyncio.shield(written)
        await self.owned.settled()

    def release(self) -> None:
        """Note that the call has come to nothing here, so that a copy of it is taken as new."""
        ingress, _, number = self.name
        self.owned.answers.pop(self.name, None)
        self.owned.taken[ingress].release(number)
        if not self.call.answer.done():
            self.call.answer.set_result(pack(ElsewhereAnswer(0)))

    def fail(self, error: BaseException) -> None:
        """Note a defect."""
        self.owned.answers.pop(self.name, None)
        if not self.call.answer.done():
            failure = error if isinstance(error, Exception) else RuntimeError("the call was cancelled")
            self.call.answer.set_exception(failure)
