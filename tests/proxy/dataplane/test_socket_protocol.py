"""Floods of a WebSocket's frames are cut off, and unread answers stop the reading."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from proxy.dataplane.socket_protocol import BoundedSocketProtocol

HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)


async def echo(_scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(echo, ws=BoundedSocketProtocol, lifespan="off", log_config=None, ws_max_size=1 << 20)
    )
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join()
    listener.close()


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True) -> bytes:
    """Return a client's frame; its mask is zero, so the payload stays as it is."""
    assert len(payload) < 126
    return bytes([(0x80 if fin else 0) | opcode, 0x80 | len(payload)]) + b"\0\0\0\0" + payload


@pytest.fixture
def client(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(HANDSHAKE)
        assert connection.recv(4096).startswith(b"HTTP/1.1 101")
        yield connection


def drained(connection: socket.socket) -> bytes:
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize("opcode", [0x9, 0xA], ids=["ping", "pong"])
def test_floods_of_control_frames_are_closed(client: socket.socket, opcode: int) -> None:
    client.sendall(frame(opcode, b"x") * 5_000)
    assert b"\x03\xf0too many control frames" in drained(client)


def test_message_of_countless_frames_is_closed(client: socket.socket) -> None:
    client.sendall(frame(0x1, b"x", fin=False) + frame(0x0, b"x", fin=False) * 20_000)
    assert b"\x03\xf1the message has too many frames" in drained(client)


def test_pings_and_pieces_within_reason_are_served(client: socket.socket) -> None:
    client.sendall(frame(0x9, b"p") * 20 + frame(0x1, b"a", fin=False) + frame(0x0, b"b"))
    received = b""
    while b"\x81\x02ab" not in received:
        received += client.recv(4096)
    assert received.count(b"\x8a\x01p") == 20


def test_client_that_reads_nothing_is_not_read(client: socket.socket) -> None:
    """What it sends stays in its own buffers, instead of its answers in the server's memory."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(2)
    message = frame(0x1, b"x" * 125)
    with pytest.raises(TimeoutError):
        # Far more than both kernels' buffers hold.
        client.sendall(message * 1_000_000)
