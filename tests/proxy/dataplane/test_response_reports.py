"""What a connection learns of the responses to its requests."""

import asyncio

import pytest

from proxy.dataplane.response_reports import CONNECTION, report_responses
from proxy.http.asgi import AsgiMessage, Receive, Scope, Send
from proxy.http.exchange import EXPECTED


class Connection:
    """Records what is reported."""

    def __init__(self) -> None:
        self.expected: object | None = "noted"
        self.events: list[object] = []

    def response_ended(self) -> None:
        self.events.append("ended")

    def release(self, expected: object | None) -> None:
        self.events.append(expected)


@pytest.mark.parametrize("fails", [False, True])
def test_end_and_return_are_reported(*, fails: bool) -> None:
    """A request is released however its application returns; only the last part of a response ends it."""
    connection = Connection()

    async def application(scope: Scope, _receive: Receive, send: Send) -> None:
        assert scope[EXPECTED] == "noted"
        await send({"type": "http.response.start"})
        await send({"type": "http.response.body", "more_body": True})
        if fails:
            raise ValueError
        await send({"type": "http.response.body"})

    async def receive() -> AsgiMessage:
        raise AssertionError

    async def send(message: AsgiMessage) -> None:
        connection.events.append(message["type"])

    async def go() -> None:
        try:
            await report_responses(application)({"type": "http", "state": {CONNECTION: connection}}, receive, send)
        except ValueError:
            connection.events.append("failed")

    asyncio.run(go())
    begun = ["http.response.start", "http.response.body"]
    rest = ["noted", "failed"] if fails else ["http.response.body", "ended", "noted"]
    assert connection.events == [*begun, *rest]
    assert connection.expected is None
