"""MCP over the pipes of a server that does not keep to one response for each request."""

import asyncio
import os

import orjson

from sandboxes.tool_clients.mcp import ID, Message
from sandboxes.tool_clients.mcp_stdio import StdioTransport


def line(**members: object) -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", **members}) + b"\n"


def received(waiting: bytes, answers: bytes) -> list[Message]:
    """Return what a request passes on if some bytes wait in the pipe before it, and others come after it."""
    from_us, to_server = os.pipe()
    from_server, to_us = os.pipe()
    got: list[Message] = []

    async def receive(message: Message) -> bool:
        got.append(message)
        return "method" not in message

    async def go() -> None:
        os.write(to_us, waiting)
        transport = StdioTransport([to_server, from_server], max_bytes=1 << 20, fresh=not waiting)
        asking = asyncio.ensure_future(transport.exchange({"id": ID, "method": "tools/call"}, receive, 5.0))
        await asyncio.to_thread(os.read, from_us, 999)
        os.write(to_us, answers)
        await asking
        transport.close()

    asyncio.run(go())
    os.close(from_us)
    os.close(to_us)
    return got


def test_a_second_response_is_not_that_of_the_next_request() -> None:
    """Every request has the same id, and notifications that came late are passed on."""
    late = line(method="notifications/message")
    got = received(line(id=ID, result="of the last request") + late, line(id=ID, result="its own"))
    assert [message.get("result", "") for message in got] == ["", "its own"]


def test_half_of_an_earlier_response_is_skipped() -> None:
    got = received(b'lt": "of the last request"}\n', line(id=7, result="of another") + line(id=ID, result="its own"))
    assert [message["result"] for message in got] == ["its own"]
