"""Whole responses, as ASGI messages."""

import asyncio

import pytest

from proxy.http.asgi import AsgiMessage
from proxy.http.problems import problem_of
from proxy.http.responses import send_problem, send_response
from proxy.refusals import RefusalError


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (200, [], [(b"content-length", b"4")]),
        (200, [(b"content-length", b"9")], [(b"content-length", b"9")]),
        (204, [], []),
        (304, [], []),
    ],
)
def test_length_is_sent_where_one_belongs(
    status: int, headers: list[tuple[bytes, bytes]], expected: list[tuple[bytes, bytes]]
) -> None:
    sent: list[AsgiMessage] = []

    async def send(message: AsgiMessage) -> None:
        sent.append(message)

    asyncio.run(send_response(send, status, headers, b"body"))
    assert sent[0]["headers"] == expected
    assert sent[1]["body"] == b"body"


@pytest.mark.parametrize(("status", "code"), [(503, 1013), (403, 1008)])
def test_refused_websocket_is_closed_after_its_handshake_was_read(status: int, code: int) -> None:
    messages: list[AsgiMessage] = []

    async def receive() -> AsgiMessage:
        messages.append({"type": "websocket.connect"})
        return messages[-1]

    async def send(message: AsgiMessage) -> None:
        messages.append(message)

    problem = problem_of(RefusalError(status, "slug", "the reason"))
    asyncio.run(send_problem({"type": "websocket"}, receive, send, problem))
    assert [message["type"] for message in messages] == ["websocket.connect", "websocket.close"]
    assert messages[1]["code"] == code
