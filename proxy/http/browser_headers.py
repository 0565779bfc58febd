"""Stands before the control plane: other sites' pages steer nothing, and no answer is taken for a page."""

from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from proxy.http.browser_guard import refuse_foreign
from proxy.http.problems import problem_of
from proxy.refusals import Refused

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_NOSNIFF = (b"x-content-type-options", b"nosniff")


class Guard:
    """Refuses foreign requests and connections; adds to each answer that its media type is to be believed."""

    def __init__(self, behind: App, names: Collection[str] | None) -> None:
        self._behind, self._names = behind, names

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._behind(scope, receive, send)
            return
        try:
            # A websocket is no page that could be followed, and steers what it is opened for.
            method = scope["method"] if scope["type"] == "http" else "POST"
            refuse_foreign(method, scope["headers"], tool=False, names=self._names)
        except Refused as refused:
            await _refuse(scope, receive, send, refused)
            return
        await self._behind(scope, receive, _sniffless(send))


def _sniffless(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and _NOSNIFF not in message["headers"]:
            message = {**message, "headers": [*message["headers"], _NOSNIFF]}
        await send(message)

    return sending


async def _refuse(scope: Message, receive: Receive, send: Send, refused: Refused) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    problem = problem_of(refused)
    await send({"type": "http.response.start", "status": problem.status, "headers": problem.headers()})
    await send({"type": "http.response.body", "body": problem.body()})
