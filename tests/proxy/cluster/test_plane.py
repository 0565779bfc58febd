"""A call is answered here, or made again under its number by the next owner of its task."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.cluster.ingress import Ingress, TaskIngress, WaitingCall
from proxy.cluster.origin import ORIGIN
from proxy.cluster.owned import Owned
from proxy.cluster.plane import ClusterPlane
from proxy.cluster.protocol import StepId, Steps
from proxy.dataplane.app import DataPlane
from proxy.http.asgi import AsgiMessage, Receive, Scope, Send
from proxy.refusals import RefusalError


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_call_of_a_dropped_task_is_not_answered_here(monkeypatch: pytest.MonkeyPatch, is_dropped: bool) -> None:
    """A task is dropped before an answer is sent: the next owner answers the call."""
    sent: list[AsgiMessage] = []

    async def answer(_plane: DataPlane, _scope: Scope, _receive: Receive, send: Send) -> None:
        origin = ORIGIN.get()
        assert origin is not None
        assert origin.call == StepId(1, 5, 3, 0)
        if is_dropped:
            owned.drop()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answer"})

    async def append(_task: str, _row: int, _body: bytes) -> bool:
        return True

    async def never() -> AsgiMessage:
        raise AssertionError

    async def send(message: AsgiMessage) -> None:
        sent.append(message)

    async def run() -> bool:
        scope: Scope = {"type": "http", "headers": []}
        return await plane._answer_here(owned, TaskIngress("t"), WaitingCall(3, never), scope, b"", send)

    monkeypatch.setattr(DataPlane, "__call__", answer)
    owned = Owned("t", 1, Steps(), append, lambda _owned, _reason: None)
    plane = ClusterPlane.__new__(ClusterPlane)
    membership = SimpleNamespace(number=1, boot=5)
    plane._member = cast("Any", SimpleNamespace(database=SimpleNamespace(membership=membership)))
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
