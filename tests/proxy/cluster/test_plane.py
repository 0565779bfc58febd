"""A call is answered here, or made again under its number by the next owner of its task."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.cluster.gate import ORIGIN, Origin
from proxy.cluster.ingress import Ingress, TaskIngress
from proxy.cluster.link.greeting import Hello
from proxy.cluster.link.passing import ASK, ELSEWHERE, PEER, Passed
from proxy.cluster.named_task import NamedTask
from proxy.cluster.owned import Owned
from proxy.cluster.plane import ClusterPlane, HeldBody, PassedUpload
from proxy.cluster.protocol import Ended, StepId, Steps
from proxy.dataplane.app import DataPlane
from proxy.http.asgi import AsgiMessage, Receive, Scope, Send
from proxy.http.passed_head import PASSED
from proxy.lifecycle import Lifecycle
from proxy.refusals import RefusalError

HELLO = Hello(2, 6, b"n")


async def never() -> AsgiMessage:
    raise AssertionError


async def waits() -> bool:
    return True


class Owner:
    """A member that owns the task `t` in view 3. Its log takes rows when a test lets it.

    Attributes:
        drops: Whether the task has another owner before the answer is sent.
        origins: What the calls came from that were answered.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drops, self.origins, self.log = False, list[Origin](), asyncio.Semaphore(0)
        self.owned = Owned("t", 3, Steps(), self._append, lambda owned, _reason: owned.drop())
        self.plane = ClusterPlane.__new__(ClusterPlane)
        self.plane.engine = cast("Any", SimpleNamespace(lifecycle=Lifecycle()))
        self.plane._member = cast("Any", SimpleNamespace(
            gate=SimpleNamespace(owned={"t": self.owned}), supersede=lambda *_: None, locate=self._locate,
        ))  # fmt: skip
        monkeypatch.setattr(DataPlane, "__call__", self._answer)

    async def _append(self, _task: str, _row: int, _body: bytes) -> bool:
        await self.log.acquire()
        return True

    async def _locate(self, _task: str, *, creates: bool) -> Any:
        assert not creates
        return SimpleNamespace(view=9)

    async def _answer(self, scope: Scope, _receive: Receive, send: Send) -> None:
        origin = ORIGIN.get()
        assert origin is not None
        # Neither an application nor a driver may take it for the agent's.
        assert PASSED not in dict(scope["headers"])
        self.origins.append(origin)
        self.owned.note([Ended(7)])
        if self.drops:
            self.owned.drop()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answer"})

    async def pass_on(self, number: int, view: int = 3, oldest: int = 1) -> tuple[int, dict[bytes, bytes]]:
        """Pass a call on to it; return the status and the headers of the response."""
        sent: list[AsgiMessage] = []

        async def send(message: AsgiMessage) -> None:
            sent.append(message)

        header = (PASSED, Passed(view, number, oldest, False, "https", "t").pack())
        scope = {"type": "http", "path": "/t/t/r/1/x", "headers": [header], "state": {PEER: HELLO}}
        await self.plane(scope, never, send)
        assert scope["scheme"] == "https"
        return sent[0]["status"], dict(sent[0]["headers"])


def test_an_answer_waits_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        owner = Owner(monkeypatch)
        answer = asyncio.create_task(owner.pass_on(4))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not answer.done()
        owner.log.release()
        assert await answer == (200, {})
        assert [origin.call for origin in owner.origins] == [StepId(2, 6, 4, 0)]

    asyncio.run(go())


def test_a_call_of_a_dropped_task_is_answered_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its answer was: the next owner gives it again, or another one."""

    async def go() -> None:
        owner = Owner(monkeypatch)
        owner.drops = True
        status, headers = await owner.pass_on(4)
        assert (status, headers[ELSEWHERE.encode()]) == (421, b"0")

    asyncio.run(go())


def test_a_call_for_another_view_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a late copy, or for a later owner."""

    async def go() -> None:
        owner = Owner(monkeypatch)
        status, headers = await owner.pass_on(4, view=2)
        assert (status, ELSEWHERE.encode() in headers, owner.origins) == (421, True, [])

    asyncio.run(go())


def test_what_its_ingress_makes_no_more_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy may be on another connection than the calls after it."""

    async def go() -> None:
        owner = Owner(monkeypatch)
        owner.log = asyncio.Semaphore(9)
        await owner.pass_on(4, oldest=4)
        assert owner.origins[0].is_current()
        await owner.pass_on(5, oldest=5)
        await owner.pass_on(4, oldest=4)
        assert [origin.is_current() for origin in owner.origins] == [False, True, False]

    asyncio.run(go())


def test_a_call_of_an_own_agent_is_never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came here, so no copy of it is on its way. It may be one that is made again beside a younger one."""

    async def go() -> None:
        owner = Owner(monkeypatch)
        owner.log = asyncio.Semaphore(9)
        owner.owned.floors.note(HELLO.member, HELLO.boot, 100)
        owner.plane._member.ingress, owner.plane._member.hello = Ingress(), HELLO  # type: ignore[misc]

        async def route(_task: TaskIngress, _call: object, here: Any, _away: object, *, creates: bool) -> Any:
            assert creates
            return await here(owner.owned)

        async def send(_message: AsgiMessage) -> None:
            pass

        owner.plane._forwarder = cast("Any", SimpleNamespace(route=route))
        scope = {"type": "http", "method": "POST", "raw_path": b"/t/t", "query_string": b"", "headers": []}
        await owner.plane._answer(NamedTask("t", "1", creates=True), scope, HeldBody(b"x", never), never, send)
        assert owner.origins[0].is_current()

    asyncio.run(go())


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_call_of_a_dropped_task_is_not_answered_here(monkeypatch: pytest.MonkeyPatch, *, is_dropped: bool) -> None:
    """A task is dropped before an answer is sent: the next owner answers the call."""
    sent: list[AsgiMessage] = []

    async def send(message: AsgiMessage) -> None:
        sent.append(message)

    async def run() -> bool:
        owner = Owner(monkeypatch)
        owner.drops, owner.log = is_dropped, asyncio.Semaphore(1)
        origin = Origin(1, 5, 3, 3, False, lambda: True, waits)
        return await owner.plane._answer_here(owner.owned, origin, {"type": "http", "headers": []}, never, send)

    assert asyncio.run(run()) is not is_dropped
    assert bool(sent) is not is_dropped


def numbered(ingress: Ingress, task: TaskIngress, request: bytes, rollout: str = "r", *, fails: bool = False) -> Any:
    """Make a call that an owner gets; return its number, and whether it is made again. It may be refused."""
    seen: Any = None
    with suppress(RefusalError), ingress.calling(task, None, rollout, request) as call:
        call.is_asked, seen = True, (call.number, call.is_again)
        if fails:
            raise RefusalError(503, "no-owner", "Try again.")
    return seen


def test_the_same_request_after_a_refusal_is_the_same_call() -> None:
    """It may have taken its step. Another request of the rollout says that the agent has given it up."""
    ingress, task = Ingress(), TaskIngress("t")
    assert numbered(ingress, task, b"a", fails=True) == (1, False)
    assert numbered(ingress, task, b"a", "other") == (2, False)
    assert task.oldest == 1
    assert numbered(ingress, task, b"a", fails=True) == (1, True)
    assert numbered(ingress, task, b"a") == (1, True)
    assert numbered(ingress, task, b"a") == (3, False)
    assert numbered(ingress, task, b"a", fails=True) == (4, False)
    assert numbered(ingress, task, b"b") == (5, False)
    assert numbered(ingress, task, b"a") == (6, False)
    assert (task.oldest, task.unanswered) == (0, {})


def test_members_ask_each_other_over_the_same_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent cannot: its connection has proven nothing."""

    async def ask(state: dict[str, Any]) -> list[AsgiMessage]:
        sent: list[AsgiMessage] = []

        async def send(message: AsgiMessage) -> None:
            sent.append(message)

        async def receive() -> AsgiMessage:
            return {"type": "http.request", "body": b"question"}

        owner = Owner(monkeypatch)
        owner.plane.engine = cast(
            "Any",
            SimpleNamespace(
                settings=SimpleNamespace(max_body_bytes=100, data=None), access=None, lifecycle=Lifecycle()
            ),
        )
        owner.plane._addressing, owner.plane._member = cast("Any", None), cast("Any", Questions())
        monkeypatch.setattr(DataPlane, "__call__", ordinary)
        await owner.plane({"type": "http", "path": ASK, "headers": [], "state": state}, receive, send)
        return sent

    async def ordinary(_plane: DataPlane, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})

    class Questions:
        async def answer(self, content: bytes) -> bytes:
            return b"answer to " + content

    assert asyncio.run(ask({PEER: HELLO}))[1]["body"] == b"answer to question"
    assert asyncio.run(ask({}))[0]["status"] == 404


def test_an_upload_is_read_once() -> None:
    """It is not held, so another owner cannot get it too. A client that hangs up has not sent all of it."""

    async def read(*messages: AsgiMessage) -> bytes:
        events = iter(messages)

        async def receive() -> AsgiMessage:
            return next(events)

        upload = PassedUpload(receive)
        # Nothing was read, so the next owner may have it.
        upload.sent()
        body = b"".join([piece async for piece in upload.sent()])
        with pytest.raises(RefusalError) as refused:
            upload.sent()
        assert refused.value.status == 503
        return body

    first = {"type": "http.request", "body": b"a", "more_body": True}
    assert asyncio.run(read(first, {"type": "http.request", "body": b"b"})) == b"ab"
    with pytest.raises(ConnectionAbortedError):
        asyncio.run(read(first, {"type": "http.disconnect"}))
