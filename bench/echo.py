"""The baseline of `bench.hotpath`: an ASGI application that reads the body and returns the same bytes."""

from collections.abc import Awaitable, Callable
from typing import Any

BODY = b"x" * 2048
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"2048")]


async def app(scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": BODY})
