"""Responses that are sent piece by piece: a client takes one that ends for whole."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from proxy.http.asgi import AsgiMessage
from proxy.http.exchange import Exchange
from proxy.refusals import Problem


class Client:
    """A client that stays connected. `messages`: what it was sent, without the heads' headers."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes, bool]] = []
        self.gone = asyncio.Event()

    async def send(self, message: AsgiMessage) -> None:
        self.messages.append((message["type"][14:], message.get("body", b""), message.get("more_body", False)))

    async def receive(self) -> AsgiMessage:
        await self.gone.wait()
        return {"type": "http.disconnect"}


HEAD = ("start", b"", False)


def test_stream_ends_with_its_content() -> None:
    async def content(send: Callable[[bytes], Awaitable[None]]) -> None:
        await send(b"one")
        await send(b"two")

    async def go() -> None:
        client = Client()
        await Exchange(client.send, client.receive).stream((), content)
        assert client.messages == [HEAD, ("body", b"one", True), ("body", b"two", True), ("body", b"", False)]

    asyncio.run(go())


def test_stream_that_fails_has_no_end() -> None:
    """Nothing follows what was sent, so the server cuts the connection off; the error is reported."""

    async def content(send: Callable[[bytes], Awaitable[None]]) -> None:
        await send(b"part")
        raise ValueError("the rest is lost")

    async def go() -> None:
        client = Client()
        exchange = Exchange(client.send, client.receive)
        with pytest.raises(ValueError, match="the rest is lost"):
            await exchange.stream((), content)
        await exchange.problem(Problem(500, "defect", "Internal error", "the rest is lost"))
        assert client.messages == [HEAD, ("body", b"part", True)]

    asyncio.run(go())


def test_stream_ends_with_its_client() -> None:
    async def go() -> None:
        client = Client()

        async def content(send: Callable[[bytes], Awaitable[None]]) -> None:
            await send(b"part")
            client.gone.set()
            await asyncio.Event().wait()

        await Exchange(client.send, client.receive).stream((), content)
        assert client.messages[:2] == [HEAD, ("body", b"part", True)]

    asyncio.run(go())
