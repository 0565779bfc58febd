"""What this member answers its peers: calls of the tasks that it owns, and questions about its agents."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from proxy.cluster.hits.calls import Heads, KnownAnswer, PassedCall, passed_call
from proxy.cluster.leaving import LEAVE_S
from proxy.cluster.link.channels import LinkChannel
from proxy.cluster.link.frames import Hello
from proxy.cluster.link.server import LinkServer
from proxy.cluster.member import Member
from proxy.cluster.messages import (
    CallAnswer,
    CallQuestion,
    ConfirmAnswer,
    ConfirmQuestion,
    DrainAnswer,
    DrainQuestion,
    ElsewhereAnswer,
    HandQuestion,
    Kind,
    LeaveAnswer,
    LeaveQuestion,
    LoadAnswer,
    LoadQuestion,
    ReportAnswer,
    ReportQuestion,
    StreamedAnswer,
    TakeQuestion,
    unpack,
)
from proxy.cluster.origin import ORIGIN, Origin
from proxy.cluster.owned import DroppedError, IngressCalls, Owned, TakenCall
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.protocol import CopyKind
from proxy.cluster.streams import Begin
from sandboxes.ipc.codec import decode_bytes, encode
from sandboxes.ipc.frames import MalformedFrameError

log = structlog.get_logger()


class PeerPlane(Protocol):
    """The data plane of this member, as calls of peers need it. Each question is a call that was taken."""

    def known_to_peer(self, question: CallQuestion | PassedCall) -> bytes | None:
        """Return the HTTP response to a call that the tree knows, and take its step; None for any other call."""
        ...

    def expect_of_peer(self, question: CallQuestion | PassedCall) -> object | None:
        """Note a call that the tree does not know; see `DataPlane.expect`."""
        ...

    def handled(self, expected: object) -> None:
        """Note that a call which was noted has been handled."""
        ...

    async def answer_peer(
        self, question: CallQuestion | PassedCall, owned: Owned, begin: Begin, expected: object | None
    ) -> bytes | None:
        """Return the HTTP response to any other call; None after it was sent as a stream."""
        ...

    async def converse_peer(self, question: CallQuestion | PassedCall, owned: Owned, channel: LinkChannel) -> None:
        """Serve a connection that is a stream from the beginning."""
        ...


class PeerQuestions:
    """Answers the questions of peers.

    Attributes:
        server: Accepts their links.
    """

    def __init__(self, member: Member, secret: bytes, plane: PeerPlane) -> None:
        """Answer for a member, with the secret that all members share."""
        self._member, self._plane, self._heads = member, plane, Heads()
        self.server = LinkServer(secret, member.database.membership, self.handle, self.take_passed)

    async def aclose(self) -> None:
        """Answer the calls that were taken, and close the links."""
        each_ingress = (calls for owned in self._member.gate.owned.values() for calls in owned.calls.values())
        answers = [call.answer for calls in each_ingress for call in calls.answers.values() if call.answer is not None]
        if answers:
            await asyncio.wait(answers, timeout=LEAVE_S)
        await self.server.aclose()

    async def handle(self, hello: Hello, content: bytes, begin: Callable[[], LinkChannel]) -> bytes:
        """Answer a question of a peer."""
        match unpack(content):
            case CallQuestion() as question:
                taken = self._take(hello, question, begin)
                return _answer_to_known(taken) if isinstance(taken, bytes) else await taken
            case ReportQuestion() as question:
                return encode(self._report(question))
            case TakeQuestion() as question:
                return encode(await self._take_over(question))
            case DrainQuestion() | HandQuestion() | LoadQuestion() as question:
                return encode(await self._operate(question))
            case LeaveQuestion():
                return encode(LeaveAnswer(await self._member.leaving.let_go(hello.member)))
            case ConfirmQuestion() as question:
                call = self._member.ingress.call(question.number)
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

    def _report(self, question: ReportQuestion) -> ReportAnswer:
        accepted, get = self._member.adopt(question.task, question.view), self._member.gate.positions.get
        known = {number: position for number in question.rollouts if (position := get(number)) is not None}
        return ReportAnswer(accepted, known)

    def take_passed(
        self, hello: Hello, content: bytes, begin: Callable[[], LinkChannel]
    ) -> bytes | Coroutine[Any, Any, bytes]:
        """Take a call that this member may know the answer to: return that answer, or how it is answered later."""
        try:
            question = passed_call(content, self._heads)
        except MalformedFrameError as error:
            # The ingress sends it again on the regular way, which may read it otherwise.
            log.warning("a call of a peer was not read", error=str(error))
            return _elsewhere()
        return self._take(hello, question, begin)

    def _take(
        self, hello: Hello, question: CallQuestion | PassedCall, begin: Callable[[], LinkChannel]
    ) -> bytes | Coroutine[Any, Any, bytes]:
        """Take a call of a peer, once for all its copies. No await: calls of a link keep their order.

        Returns:
            The answer that the tree knows, a `KnownAnswer` as bytes, or what returns the message with any other.
        """
        owned = self._member.gate.owned.get(question.task)
        if owned is None or owned.rules.view != question.view:
            return self._elsewhere(question)
        calls = owned.calls_of(hello.member, hello.boot)
        if calls is None:
            return _elsewhere()
        match calls.take(question.number, oldest=question.oldest):
            case CopyKind.NEW:
                call = calls.answers[question.number] = TakenCall(hello)
                return self._begin(owned, calls, question, call, begin)
            case CopyKind.COPY:
                call = calls.answers[question.number]
                call.link = hello
                return call.known if call.answer is None and call.known is not None else _answer_of(call)
            case CopyKind.LATE:
                return _elsewhere()

    def _begin(
        self,
        owned: Owned,
        calls: IngressCalls,
        question: CallQuestion | PassedCall,
        call: TakenCall,
        begin: Callable[[], LinkChannel],
    ) -> bytes | Coroutine[Any, Any, bytes]:
        """Answer a call that is no copy, at once if the tree knows it."""
        ingress = call.link.member
        origin = Origin(
            ingress,
            lambda: self.server.is_latest(call.link),
            lambda: self._member.confirm(ingress, question.number),
        )
        # What is started from here on works for this call, and what this link brings next does not.
        before = ORIGIN.set(origin)
        try:
            response = self._known_whole(question)
            if response is not None:
                # A hit moves one rollout.
                ((rollout, position),) = origin.positions.items()
                assert position is not None
                call.known = encode(KnownAnswer(owned.rules.view, rollout, position, response))
                return call.known
            call.answer = asyncio.get_running_loop().create_future()
            taken = _Taken(owned, calls, question, call, begin, origin)
            taken.expected = self._plane.expect_of_peer(question) if question.kind == Kind.CALL else None
            work = self._run if question.kind == Kind.CALL else self._serve_stream
            owned.tasks.spawn("call of a peer", work(taken))
        finally:
            ORIGIN.reset(before)
        return _answer_of(call)

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

    async def _elsewhere(self, question: CallQuestion | PassedCall) -> bytes:
        """Say which view holds, for a peer that asks for another one."""
        # A newer view than the one that is owned here ends it.
        self._member.adopt(question.task, question.view)
        try:
            owner = await self._member.locate(question.task, creates=False)
        except DatabaseError:
            return encode(ElsewhereAnswer(0))
        if isinstance(owner, Owned):
            return encode(ElsewhereAnswer(owner.rules.view))
        return encode(ElsewhereAnswer(0 if owner is None else owner.view))

    def _known_whole(self, question: CallQuestion | PassedCall) -> bytes | None:
        if question.kind != Kind.CALL:
            return None
        try:
            return self._plane.known_to_peer(question)
        except Exception:  # noqa: BLE001 - the regular path meets the same error and reports it
            return None

    async def _run(self, taken: "_Taken") -> None:
        """Answer a call that was taken, and that the tree does not know."""
        owned, origin = taken.owned, taken.origin
        try:
            response = await self._plane.answer_peer(taken.question, owned, taken.begin_response, taken.expected)
            if response is not None:
                await taken.written()
        except DroppedError:
            response = b""
        except BaseException as error:
            taken.fail(error)
            raise
        finally:
            if taken.expected is not None:
                self._plane.handled(taken.expected)
        if response is None:
            # A stream: `begin_response` has answered.
            origin.end()
        elif owned.is_dropped or origin.is_stale:
            taken.release()
        else:
            taken.answer(CallAnswer(owned.rules.view, origin.positions, response))
            origin.end()

    async def _serve_stream(self, taken: "_Taken") -> None:
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
                await self._plane.converse_peer(taken.question, taken.owned, channel)
        finally:
            taken.origin.end()
            channel.close()


def _answer_to_known(known: bytes) -> bytes:
    """Return a `KnownAnswer` as the answer to a question."""
    answer = decode_bytes(known, KnownAnswer)
    return encode(CallAnswer(answer.view, {answer.rollout: answer.position}, answer.response))


async def _answer_of(call: TakenCall) -> bytes:
    assert call.answer is not None
    return await asyncio.shield(call.answer)


async def _elsewhere() -> bytes:
    return encode(ElsewhereAnswer(0))


@dataclass(slots=True, eq=False)
class _Taken:
    """A call that was taken, and how it is answered.

    Attributes:
        owned: The task.
        calls: The calls of its ingress.
        question: The call.
        call: Where its answer goes.
        begin: Begins the channel of the question that brought it first.
        origin: What its code works for.
        expected: What `PeerPlane.expect_of_peer` returned.
    """

    owned: Owned
    calls: IngressCalls
    question: CallQuestion | PassedCall
    call: TakenCall
    begin: Callable[[], LinkChannel]
    origin: Origin
    expected: object | None = None

    async def begin_response(self, head: bytes) -> LinkChannel:
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
        channel.write(encode(CallAnswer(self.owned.rules.view, self.origin.positions, head)))
        self.answer(StreamedAnswer())
        return channel

    async def written(self) -> None:
        """Wait for what the call has written besides its record: the beginning or the end of a rollout, for example."""
        for written in self.origin.pending:
            await asyncio.shield(written)
        await self.owned.settled()

    def answer(self, answer: CallAnswer | StreamedAnswer | ElsewhereAnswer) -> None:
        """Answer all copies of the call, unless they are answered."""
        assert self.call.answer is not None
        if not self.call.answer.done():
            self.call.answer.set_result(encode(answer))

    def release(self) -> None:
        """Note that the call has come to nothing here, so that a copy of it is taken as new."""
        self.calls.answers.pop(self.question.number, None)
        self.calls.rules.release(self.question.number)
        self.answer(ElsewhereAnswer(0))

    def fail(self, error: BaseException) -> None:
        """Note a defect."""
        self.calls.answers.pop(self.question.number, None)
        assert self.call.answer is not None
        if not self.call.answer.done():
            failure = error if isinstance(error, Exception) else RuntimeError("the call was cancelled")
            self.call.answer.set_exception(failure)
