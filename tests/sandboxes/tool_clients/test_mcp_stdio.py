"""MCP over the pipes of a server that does not keep to one response for each request."""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

import orjson

from sandboxes.tool_clients.mcp import ID, Message
from sandboxes.tool_clients.mcp_stdio import StdioTransport


def line(**members: object) -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", **members}) + b"\n"


class Writing(Protocol):
    """Writes bytes of a server, once the server has read something."""

    def __call__(self, data: bytes, *, at_once: bool = False) -> Coroutine[Any, Any, None]: ...


@asynccontextmanager
async def piped(*, fresh: bool = True) -> AsyncIterator[tuple[StdioTransport, Writing]]:
    """Give a transport, and what writes as its server."""
    from_us, to_server = os.pipe()
    from_server, to_us = os.pipe()
    transport = StdioTransport([to_server, from_server], max_bytes=16 << 20, fresh=fresh)

    def write(data: bytes) -> None:
        with open(to_us, "wb", closefd=False) as file:
            file.write(data)

    async def server(data: bytes, *, at_once: bool = False) -> None:
        if not at_once:
            await asyncio.to_thread(os.read, from_us, 999)
        await asyncio.to_thread(write, data)

    try:
        yield transport, server
    finally:
        transport.close()
        os.close(from_us)
        os.close(to_us)


def received(waiting: bytes, answers: bytes) -> list[Message]:
    """Return what a request passes on if some bytes wait in the pipe before it, and others come after it."""
    got: list[Message] = []

    async def receive(message: Message) -> bool:
        got.append(message)
        return "method" not in message

    async def go() -> None:
        async with piped(fresh=not waiting) as (transport, server):
            await server(waiting, at_once=True)
            asking = asyncio.ensure_future(transport.exchange({"id": ID, "method": "tools/call"}, receive, 5.0))
            await server(answers)
            await asking

    asyncio.run(go())
    return got


def test_a_second_response_is_not_that_of_the_next_request() -> None:
    """Every request has the same id, and notifications that came late are passed on."""
    late = line(method="notifications/message")
    got = received(line(id=ID, result="of the last request") + late, line(id=ID, result="its own"))
    assert [message.get("result", "") for message in got] == ["", "its own"]


def test_half_of_an_earlier_response_is_skipped() -> None:
    got = received(b'lt": "of the last request"}\n', line(id=7, result="of another") + line(id=ID, result="its own"))
    assert [message["result"] for message in got] == ["its own"]
