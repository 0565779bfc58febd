"""An owner takes each call of a peer once, in the order of the link, and answers what its tree knows at once."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

from proxy.cluster.answering import PeerQuestions
from proxy.cluster.hits.calls import HeadCall, KnownAnswer, PassedCall
from proxy.cluster.link.frames import Hello
from proxy.cluster.messages import CallAnswer, CallQuestion, ElsewhereAnswer, Kind, unpack
from proxy.cluster.origin import ORIGIN
from proxy.cluster.owned import Owned
from proxy.cluster.protocol import OwnedTask, Position
from sandboxes.ipc.codec import decode_bytes, encode

HELLO = Hello(2, 1, 1, b"n")
HEAD = b"POST /t/t/r/1/x HTTP/1.1\r\nhost: h"
BEGIN = cast("Any", None)


class Plane:
    """A data plane that knows the answer to calls whose body begins with `known`."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def known_to_peer(self, question: CallQuestion | PassedCall) -> bytes | None:
        self.events.append(f"look up {question.body.decode()}")
        if not question.body.startswith(b"known"):
            return None
        origin = ORIGIN.get()
        assert origin is not None
        origin.positions[7] = Position(question.number, 9)
        return b"response to " + question.body

    def expect_of_peer(self, question: CallQuestion | PassedCall) -> object:
        self.events.append(f"expect {question.body.decode()}")
        return question.number

    def handled(self, expected: object) -> None:
        self.events.append(f"handled {expected}")

    async def answer_peer(self, question: CallQuestion | PassedCall, *_: object) -> bytes:
        self.events.append(f"answer {question.body.decode()}")
        return b"late response"

    async def converse_peer(self, *_: object) -> None:
        raise AssertionError


class Owner:
    """A member that owns the task `t` in view 3."""

    def __init__(self) -> None:
        self.plane = Plane()
        self.owned = Owned("t", OwnedTask(3), cast("Any", None), cast("Any", None))
        member = SimpleNamespace(
            gate=SimpleNamespace(owned={"t": self.owned}), database=SimpleNamespace(membership=None), confirm=None
        )
        self.questions = PeerQuestions(cast("Any", member), b"secret", self.plane)

    def take(self, number: int, body: bytes, oldest: int = 1) -> bytes | Coroutine[Any, Any, bytes]:
        content = encode(HeadCall("t", 3, number, oldest, HEAD, False, body))
        return self.questions.take_passed(HELLO, content, BEGIN)

    async def ask(self, number: int, body: bytes, oldest: int = 1) -> object:
        """Send a call again, as an ingress does whose link broke."""
        question = CallQuestion("t", 3, number, oldest, "POST", "/t/t/r/1/x", "", [], "http", Kind.CALL, body)
        return unpack(await self.questions.handle(HELLO, encode(question), BEGIN))


def test_copies_of_a_known_call_take_no_step() -> None:
    """The link may break before the answer arrives; the copy gets the answer of the first one."""

    async def go() -> None:
        owner = Owner()
        taken = owner.take(1, b"known 1")
        assert isinstance(taken, bytes)
        answer = decode_bytes(taken, KnownAnswer)
        assert (answer.position, answer.response) == (Position(1, 9), b"response to known 1")
        assert ORIGIN.get() is None
        assert await owner.ask(1, b"known 1") == CallAnswer(3, {7: Position(1, 9)}, answer.response)
        assert owner.plane.events == ["look up known 1"]
        # The ingress has it, and does not wait for it any more.
        owner.take(2, b"known 2", oldest=2)
        assert await owner.ask(1, b"known 1") == ElsewhereAnswer(0)
        assert list(owner.owned.calls[2].answers) == [2]

    asyncio.run(go())


def test_a_known_call_overtakes_no_call_before_it() -> None:
    """A call that has to run is noted before the next frame of the link is looked up."""

    async def go() -> None:
        owner = Owner()
        later = owner.take(1, b"new")
        assert not isinstance(later, bytes)
        owner.take(2, b"known")
        assert owner.plane.events == ["look up new", "expect new", "look up known"]
        assert unpack(await later) == CallAnswer(3, {}, b"late response")
        assert owner.plane.events[3:] == ["answer new", "handled 1"]

    asyncio.run(go())


def test_calls_of_another_start_are_forgotten() -> None:
    """An ingress numbers its calls anew after each start; what an earlier start sends is not taken."""

    async def go() -> None:
        owner = Owner()
        owner.take(1, b"known")
        later_start = HELLO._replace(boot=2)
        content = encode(HeadCall("t", 3, 1, 1, HEAD, False, b"known again"))
        taken = owner.questions.take_passed(later_start, content, BEGIN)
        assert isinstance(taken, bytes)
        assert decode_bytes(taken, KnownAnswer).response == b"response to known again"
        assert await owner.ask(2, b"known") == ElsewhereAnswer(0)

    asyncio.run(go())


def test_a_call_that_is_not_read_is_sent_again() -> None:
    """The ingress sends it on the regular way, which may read its head otherwise."""

    async def go() -> None:
        owner = Owner()
        taken = owner.questions.take_passed(HELLO, b"nonsense", BEGIN)
        assert not isinstance(taken, bytes)
        assert unpack(await taken) == ElsewhereAnswer(0)
        assert owner.plane.events == []

    asyncio.run(go())
