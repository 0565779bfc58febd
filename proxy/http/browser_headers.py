"""Stands before the control plane: other sites' pages steer nothing, and no answer is taken for a page."""

from collections.abc import Collection

from proxy.http.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send
from proxy.http.browser_guard import refuse_foreign
from proxy.http.problems import problem_of
from proxy.refusals import RefusalError

_NOSNIFF = (b"x-content-type-options", b"nosniff")


class BrowserGuard:
    """Refuses foreign requests and connections; adds to each answer that its media type is to be believed."""

    def __init__(self, behind: AsgiApp, names: Collection[str] | None) -> None:
        self._behind, self._names = behind, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._behind(scope, receive, send)
            return
        try:
            # A websocket is no page that could be followed, and steers what it is opened for.
            method = scope["method"] if scope["type"] == "http" else "POST"
            refuse_foreign(method, scope["headers"], tool=False, names=self._names)
        except RefusalError as refused:
            await _refuse(scope, receive, send, refused)
            return
        await self._behind(scope, receive, _sniffless(send))


def _sniffless(send: Send) -> Send:
    async def sending(message: AsgiMessage) -> None:
        if message["type"] == "http.response.start" and _NOSNIFF not in message["headers"]:
            message = {**message, "headers": [*message["headers"], _NOSNIFF]}
        await send(message)

    return sending


async def _refuse(scope: Scope, receive: Receive, send: Send, refused: RefusalError) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    problem = problem_of(refused)
    await send({"type": "http.response.start", "status": problem.status, "headers": problem.headers()})
    await send({"type": "http.response.body", "body": problem.body()})
