"""What this member answers its peers, beside the requests that they pass on."""

from proxy.cluster.member import Member
from proxy.cluster.messages import (
    ConfirmAnswer,
    ConfirmQuestion,
    DrainQuestion,
    ElsewhereAnswer,
    HandQuestion,
    LoadQuestion,
    TakeQuestion,
    unpack,
)
from proxy.cluster.postgres.connection import DatabaseError
from sandboxes.ipc.codec import encode
from sandboxes.ipc.frames import MalformedFrameError


class PeerQuestions:
    """Answers the questions of peers."""

    def __init__(self, member: Member) -> None:
        self._member = member

    async def answer(self, content: bytes) -> bytes:
        """Answer a question. Raises MalformedFrameError: it is none."""
        member = self._member
        match unpack(content):
            case TakeQuestion() as question:
                return encode(await self._take_over(question))
            case DrainQuestion():
                return encode(await member.drain())
            case HandQuestion(task=task, target=target):
                return encode(await member.hand_to(task, target))
            case LoadQuestion():
                return encode(member.load)
            case ConfirmQuestion(boot=boot, number=number):
                call = member.ingress.call(number) if boot == member.database.membership.boot else None
                return encode(ConfirmAnswer(call is not None and await call.waits()))
            case other:
                raise MalformedFrameError(f"a peer sent the message {type(other).__name__}")

    async def _take_over(self, question: TakeQuestion) -> ElsewhereAnswer:
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
