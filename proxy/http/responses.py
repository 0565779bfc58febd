"""Whole responses, as ASGI messages."""

from collections.abc import Iterable

from proxy.http.asgi import Receive, Scope, Send
from proxy.refusals import Problem


async def send_response(
    send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, sized: bool = True
) -> None:
    """Send a whole response, with its length if it is a `sized` one, the headers have none and its status allows it."""
    headers = list(headers)
    if sized and status not in (204, 304) and not any(name == b"content-length" for name, _ in headers):
        headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_problem(scope: Scope, receive: Receive, send: Send, problem: Problem) -> None:
    """Answer a request with a problem; a WebSocket is closed before it is accepted."""
    if scope["type"] == "websocket":
        # ASGI delivers `websocket.connect` first.
        await receive()
        # "Try again later", and "policy violation" (IANA's registry of close codes).
        await send({"type": "websocket.close", "code": 1013 if problem.status == 503 else 1008})
        return
    await send_response(send, problem.status, problem.headers(), problem.body())
