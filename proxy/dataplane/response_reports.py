"""Tells a connection when the application has written a response, and when it has returned."""

from typing import Protocol

from proxy.http.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send
from proxy.http.exchange import EXPECTED

CONNECTION = "forkpoint.connection"
"""The key of a connection in the `state` of its ASGI scopes, the only thing that uvicorn passes on from it."""


class ReportedConnection(Protocol):
    """A connection that has to know where the responses to its requests end."""

    expected: object | None  # What was noted of the request that uvicorn has got; None if nothing was.

    def response_ended(self) -> None:
        """Note that the end of a response was written."""
        ...

    def release(self, expected: object | None) -> None:
        """Note that the application has returned, given what was noted of its request."""
        ...


def report_responses(application: AsgiApp) -> AsgiApp:
    """Return an application that reports the end of each HTTP response to its connection."""

    async def reporting(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # WebSockets need no count: their connections never come back from uvicorn.
            await application(scope, receive, send)
            return
        connection: ReportedConnection = scope["state"][CONNECTION]
        # Taken at once: the next request on the connection sets them again.
        expected, connection.expected = connection.expected, None
        scope[EXPECTED] = expected

        async def sending(message: AsgiMessage) -> None:
            # Reported after the write, because a connection that has its requests back may write the next hit at once.
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                connection.response_ended()

        try:
            await application(scope, receive, sending)
        # Also after an error or a cancellation, or later requests of the rollout would wait for this one.
        finally:
            connection.release(expected)

    return reporting
