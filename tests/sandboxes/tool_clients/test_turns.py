"""What a sandbox sends keeps nothing else waiting, however small its pieces are and however fast they come.

Each test counts the turns of the event loop that others get meanwhile.
"""

import asyncio
import fcntl
import os
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from sandboxes.calls import ToolCall
from sandboxes.host.pty import Pty
from sandboxes.http_message import request_head
from sandboxes.tool_clients import websocket
from sandboxes.tool_clients.harness import ModelPort
from sandboxes.tool_clients.harness_relay import HEADER
from sandboxes.tool_clients.http1 import MalformedResponseError, WholeResponse, exchange
from sandboxes.tool_clients.websocket import Socket

CHUNKS = b"1\r\nx\r\n" * 9000
MESSAGE = ToolCall("x", "y", {"target": "/", "subprotocols": [], "binary": False, "answers": "quiet"}, b"hello")


async def turns_during(work: Coroutine[Any, Any, Any]) -> int:
    """Return how many turns of the loop others get until some work is done."""
    task, turns = asyncio.ensure_future(work), 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    await task
    return turns


def full_pipe(data: bytes) -> int:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)
    assert os.write(writing, data) == len(data)
    os.close(writing)
    return reading


def test_response_in_chunks_of_a_byte() -> None:
    async def go() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS + b"0\r\n\r\n")
            response = WholeResponse()
            head = request_head("GET", "/", (), "x", 0)
            assert await turns_during(exchange(ours, head, b"", response, silence_s=5)) > 100
            assert response.body == b"x" * 9000

    asyncio.run(go())


def test_request_of_a_harness_in_chunks_of_a_byte() -> None:
    async def go() -> None:
        head = b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        request = head + CHUNKS + b"0\r\n\r\n"
        frames = HEADER.pack(1, b"d", len(request)) + request + HEADER.pack(0, b"p", 0)
        port = ModelPort([os.open("/dev/null", os.O_WRONLY), full_pipe(frames)], 5)
        assert await turns_during(port.turn(None)) > 100
        port.close()

    asyncio.run(go())


def test_output_of_a_terminal_that_is_always_there() -> None:
    async def go() -> None:
        # Of a pipe, because a terminal holds less than one read takes.
        terminal = Pty(full_pipe(b"x" * (1 << 20)))

        async def read() -> None:
            while await terminal.read():
                pass

        assert await turns_during(read()) > 10
        terminal.close()

    asyncio.run(go())


def test_messages_of_a_websocket_without_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_FRAMES", 20_000)

    async def go() -> None:
        reading = full_pipe(b"\x81\x00" * 30_000)
        connection = Socket([os.open("/dev/null", os.O_WRONLY), reading], MESSAGE, 1, max_bytes=1 << 20, opened=True)

        async def ask() -> None:
            with pytest.raises(MalformedResponseError, match="20000 frames"):
                await connection.exchange(MESSAGE, silence_s=5)

        assert await turns_during(ask()) > 5
        connection.close()

    asyncio.run(go())
