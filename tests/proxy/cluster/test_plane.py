"""A call is answered once: here, or by the next owner of its task."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.cluster.ingress import WaitingCall
from proxy.cluster.origin import ORIGIN
from proxy.cluster.owned import Owned
from proxy.cluster.plane import ClusterPlane
from proxy.cluster.protocol import OwnedTask
from proxy.dataplane.app import DataPlane
from proxy.http.asgi import AsgiMessage, Receive, Scope, Send


@pytest.mark.parametrize("is_accepted", [True, False])
def test_accepted_call_is_answered_here(monkeypatch: pytest.MonkeyPatch, is_accepted: bool) -> None:
    """A task is dropped before an answer is sent. If the position was kept, the call must not be made again."""
    sent: list[AsgiMessage] = []

    async def answer(_plane: DataPlane, _scope: Scope, _receive: Receive, send: Send) -> None:
        origin = ORIGIN.get()
        assert origin is not None
        origin.is_accepted = is_accepted
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
        return await plane._answer_here(owned, WaitingCall(1, never), scope, b"", send)

    monkeypatch.setattr(DataPlane, "__call__", answer)
    owned = Owned("t", OwnedTask(1), append, lambda _owned, _reason: None)
    plane = ClusterPlane.__new__(ClusterPlane)
    plane._member = cast("Any", SimpleNamespace(number=1))
    assert asyncio.run(run()) is is_accepted
    assert bool(sent) is is_accepted
