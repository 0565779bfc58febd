"""MCP with servers that do not keep to it, whatever carries their messages."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from sandboxes.tool_clients import mcp
from sandboxes.tool_clients.http1 import MalformedResponseError
from sandboxes.tool_clients.mcp import ID, McpConversation, McpResponse, SessionLostError, require_list
from sandboxes.tool_clients.mcp_http import HttpTransport
from tests.sandboxes.tool_clients.test_mcp_stdio import line, piped

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def asked(*lines: bytes) -> McpResponse:
    """Return a server's response that consists of some lines."""

    async def go() -> McpResponse:
        async with piped() as (transport, server):
            asking = asyncio.ensure_future(McpConversation(transport).request("tools/call", {}, silence_s=5))
            await server(b"".join(lines))
            return await asking

    return asyncio.run(go())


WRONG: list[dict[str, Any]] = [
    {"id": ID},
    {"id": ID, "result": None},
    {"id": ID, "result": []},
    {"id": ID, "result": "done"},
    {"id": ID, "error": "failed"},
    {"id": ID, "error": {"code": [1]}},
    {"method": ["sampling/createMessage"], "id": 7},
    {"method": "notifications/message", "params": "text"},
]


@pytest.mark.parametrize("message", WRONG, ids=str)
def test_message_of_another_shape_is_refused(message: dict[str, Any]) -> None:
    """What it holds reaches clients, and code that expects objects."""
    with pytest.raises(MalformedResponseError):
        asked(line(**message))


def test_null_stands_for_nothing() -> None:
    response = asked(line(method="notifications/message", params=None), line(id=ID, result={"a": 1}, error=None))
    assert response.notifications == [{"method": "notifications/message", "params": {}}]
    assert response.payload == {"result": {"a": 1}}


@pytest.mark.parametrize("result", [{}, {"tools": None}, {"tools": ["a"]}, {"tools": [{}]}, {"tools": [{"name": 5}]}])
def test_list_of_something_else_is_refused(result: dict[str, Any]) -> None:
    with pytest.raises(MalformedResponseError, match="its result of tools/list has"):
        require_list("tools/list", {"result": result})


def test_lists_and_errors_are_taken() -> None:
    require_list("tools/list", {"result": {"tools": [{"name": "a"}]}})
    require_list("prompts/list", {"error": {"code": -32601}})
    # What the proxy reads nothing of is the client's business.
    require_list("resources/list", {"result": {"resources": [{}, "text"]}})
    require_list("resources/templates/list", {"result": {}})


def test_notifications_of_one_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "_NOTIFICATIONS", 10)
    with pytest.raises(MalformedResponseError, match="more than 10 notifications"):
        asked(line(method="a") * 11)


def test_server_that_writes_without_end_keeps_nothing_else_waiting() -> None:
    """Each byte is looked at once, and others have their turn: lines, or one line without an end."""

    async def go(data: bytes) -> None:
        async with piped() as (transport, server):
            asking = asyncio.ensure_future(McpConversation(transport).request("tools/call", {}, silence_s=5))
            writing = asyncio.ensure_future(server(data))
            loop, stalls = asyncio.get_running_loop(), list[float]()
            while not asking.done():
                before = loop.time()
                await asyncio.sleep(0)
                stalls.append(loop.time() - before)
            with pytest.raises(MalformedResponseError, match="it sends more than"):
                await asking
        # The end of the pipe is closed by now.
        await asyncio.gather(writing, return_exceptions=True)
        assert len(stalls) > 20
        assert max(stalls) < 1

    asyncio.run(go(b"x" * (17 << 20)))
    asyncio.run(go(line(method="a") * (17 << 15)))


@asynccontextmanager
async def over_http(answer: Callable[[str, dict[str, Any]], bytes]) -> AsyncIterator[McpConversation]:
    """Give a conversation with a server over HTTP that answers by its session and by the request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(each.split(": ", 1) for each in head.lower().split("\r\n")[1:] if each)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        reply = answer(headers.get("mcp-session-id", ""), orjson.loads(body)) if body else b"HTTP/1.1 405 No\r\n\r\n"
        # In small pieces, as a server may send it.
        for at in range(0, len(reply), 1000):
            writer.write(reply[at : at + 1000])
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()

        async def connect() -> socket.socket:
            return socket.create_connection(address)

        url = f"http://127.0.0.1:{address[1]}/mcp"
        yield McpConversation(HttpTransport(url, await connect(), connect, "", max_bytes=4 << 20))


def reply(result: dict[str, Any]) -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", "id": ID, "result": result})


@pytest.mark.parametrize("kind", ["json", "one event", "many events"])
def test_long_response_comes_in_pieces(kind: str) -> None:
    text = "x" * 300_000
    notes = [b"event: message\r\ndata: " + line(method=f"n{n}").strip() + b"\r\n\r\n" for n in range(999)]
    whole = {
        "json": JSON + b"\r\n" + reply({"text": text}),
        "one event": EVENTS + b"data:" + reply({"text": text}) + b"\n\n",
        "many events": EVENTS + b"".join(notes) + b": a comment\n\ndata: " + reply({"text": text}) + b"\n\n",
    }[kind]

    async def go() -> None:
        async with over_http(lambda _, __: whole) as conversation:
            response = await conversation.request("ping", {}, silence_s=5)
            assert response.payload == {"result": {"text": text}}
            assert len(response.notifications) == (999 if kind == "many events" else 0)

    asyncio.run(go())


def test_half_a_json_response_is_none() -> None:
    async def go() -> None:
        async with over_http(lambda _, __: JSON + b'\r\n{"result": {') as conversation:
            with pytest.raises(MalformedResponseError):
                await conversation.request("ping", {}, silence_s=5)

    asyncio.run(go())


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**30])
def test_large_integer_is_no_float(number: int) -> None:
    """A parser makes a float of it, and the agent would get another number: the call fails instead."""

    async def go(body: bytes) -> None:
        async with over_http(lambda _, __: body) as conversation:
            with pytest.raises(MalformedResponseError, match="beyond 64 bits"):
                await conversation.request("ping", {}, silence_s=5)

    message = reply({"n": [7]}).replace(b"7", str(number).encode())
    for body in (JSON + b"\r\n" + message, EVENTS + b"data:" + message + b"\n\n"):
        asyncio.run(go(body))
    with pytest.raises(MalformedResponseError, match="beyond 64 bits"):
        asked(message + b"\n")


def test_numbers_of_64_bits_and_digits_in_texts_stay() -> None:
    result = {"least": -(2**63), "most": 2**64 - 1, "text": "1" * 40, "float": 1.2345678901234567e300}

    async def go() -> None:
        async with over_http(lambda _, __: JSON + b"\r\n" + reply(result)) as conversation:
            assert (await conversation.request("ping", {}, silence_s=5)).payload == {"result": result}

    asyncio.run(go())


def test_lost_session_is_told_apart() -> None:
    """A server that was started anew by another process knows no session, and answers 404."""

    def answer(session: str, request: dict[str, Any]) -> bytes:
        if request["method"] == "initialize":
            return JSON + b"Mcp-Session-Id: of-before\r\n\r\n" + reply({})
        return JSON.replace(b"200", b"404" if session else b"200") + b"\r\n" + reply({})

    async def go() -> None:
        async with over_http(answer) as conversation:
            await conversation.initialize(silence_s=5)
            with pytest.raises(SessionLostError):
                await conversation.request("ping", {}, silence_s=5)

    asyncio.run(go())
