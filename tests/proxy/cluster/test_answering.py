"""An owner answers calls of peers, and says who else does."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from proxy.cluster.answering import PeerQuestions
from proxy.cluster.link.channels import LinkChannel
from proxy.cluster.link.frames import Hello
from proxy.cluster.messages import CallAnswer, CallQuestion, ElsewhereAnswer, Kind, unpack
from proxy.cluster.origin import ORIGIN
from proxy.cluster.owned import Owned
from proxy.cluster.protocol import Ended, StepId, Steps
from sandboxes.ipc.codec import encode

HELLO = Hello(2, 6, 1, b"n")


class Plane:
    """A data plane that answers each call with its body; `drops` says whether the task has another owner by then."""

    def __init__(self) -> None:
        self.drops = False
        self.calls: list[StepId] = []

    async def answer_peer(self, question: CallQuestion, owned: Owned, _begin: object) -> bytes:
        origin = ORIGIN.get()
        assert origin is not None
        self.calls.append(origin.call)
        owned.note([Ended(7)])
        if self.drops:
            owned.drop()
        return b"answer to " + question.body

    async def converse_peer(self, *_: object) -> None:
        raise AssertionError


class Owner:
    """A member that owns the task `t` in view 3. Its log takes rows when a test lets it."""

    def __init__(self) -> None:
        self.plane, self.log = Plane(), asyncio.Semaphore(0)
        self.owned = Owned("t", 3, Steps(), self._append, lambda owned, _reason: owned.drop())
        member = SimpleNamespace(
            gate=SimpleNamespace(owned={"t": self.owned}), database=SimpleNamespace(membership=None),
            adopt=lambda *_: None, locate=self._locate,
        )  # fmt: skip
        self.questions = PeerQuestions(cast("Any", member), b"secret", self.plane)

    async def _append(self, _task: str, _row: int, _body: bytes) -> bool:
        await self.log.acquire()
        return True

    async def _locate(self, _task: str, *, creates: bool) -> Any:
        assert not creates
        return SimpleNamespace(view=9)

    async def ask(self, number: int, body: bytes, view: int = 3) -> object:
        question = CallQuestion("t", view, number, 1, False, "POST", "/t/t/r/1/x", "", [], "http", Kind.CALL, body)

        def begin() -> LinkChannel:
            raise AssertionError

        return unpack(await self.questions.handle(HELLO, encode(question), begin))


def test_an_answer_waits_for_the_log() -> None:
    async def go() -> None:
        owner = Owner()
        answer = asyncio.create_task(owner.ask(4, b"a"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not answer.done()
        owner.log.release()
        assert await answer == CallAnswer(b"answer to a")
        assert owner.plane.calls == [StepId(2, 6, 4, 0)]

    asyncio.run(go())


def test_a_call_of_a_dropped_task_is_asked_elsewhere() -> None:
    """Whatever its answer was: the next owner gives it again, or another one."""

    async def go() -> None:
        owner = Owner()
        owner.plane.drops = True
        assert await owner.ask(4, b"a") == ElsewhereAnswer(0)
        owner.log.release()

    asyncio.run(go())


def test_a_call_for_another_view_is_not_taken() -> None:
    """It may be a late copy, or for a later owner."""

    async def go() -> None:
        owner = Owner()
        assert await owner.ask(4, b"a", view=2) == ElsewhereAnswer(9)
        assert owner.plane.calls == []

    asyncio.run(go())
