"""Malformed input of clients and failures of servers: an error in the protocol's form, and nothing is recorded."""

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.agents.serving import Proxy, real_proxy

HTTP = Path(__file__).with_name("tool_server.py").read_text()
SOCKETS = Path(__file__).with_name("socket_server.py").read_text()


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with real_proxy(max_body_bytes=1 << 18) as running:
        both = {
            "api": {"command": "exec python3 /srv.py 9000", "port": 9000},
            "ws": {"command": "exec python3 /ws.py 9001", "port": 9001, "ready": "/"},
            "gone": {"command": "echo no such luck; exit 3", "port": 9002},
        }
        running.put("t", files={"/srv.py": HTTP, "/ws.py": SOCKETS}, servers=both)
        yield running


def send_bytes(proxy: Proxy, data: bytes, *, half_close: bool = True) -> bytes:
    """Send bytes; return what is received until the connection ends."""
    with socket.create_connection(proxy.address, timeout=30) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        try:
            return b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionResetError:
            return b""


GET = b"GET /t/t/r/bad/api/echo HTTP/1.1\r\nhost: x\r\n"
PUT = b"POST /t/t/r/bad/api/put HTTP/1.1\r\nhost: x\r\n"
MALFORMED = {
    "unknown version": b"GET /t/t/r/bad/api/echo HTTP/3.7\r\nhost: x\r\n\r\n",
    "no version": b"GET /t/t/r/bad/api/echo\r\n\r\n",
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "invalid method": b"G=T /t/t/r/bad/api/echo HTTP/1.1\r\nhost: x\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    "bare line feed in a header": GET + b"x-a: 1\n\nGET /t/t/r/bad/api/die HTTP/1.1\r\n\r\n",
    "NUL in a header": GET + b"x-a: \x00\r\n\r\n",
    "length with a sign": PUT + b"content-length: +2\r\n\r\n{}",
    "negative length": PUT + b"content-length: -2\r\n\r\n{}",
    "unknown transfer coding": PUT + b"transfer-encoding: xchunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "truncated chunk": PUT + b"transfer-encoding: chunked\r\n\r\n9\r\n{}",
    "invalid chunk size": PUT + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "truncated head": GET + b"x-",
    "absolute target": b"GET http://127.0.0.1:1/t/t/r/bad/api/echo HTTP/1.1\r\nhost: x\r\n\r\n",
    "CONNECT": b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nhost: 127.0.0.1:1\r\n\r\n",
    "empty first segment": b"GET //evil.test/t/t/r/bad/api/echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "encoded base URL": b"GET /t%2Ft%2Fr%2Fbad%2Fapi/echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "parent directory as a name": b"GET /t/../r/bad/api/echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "path that is not UTF-8": b"GET /t/t/r/bad%ff/api/echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_request_begins_nothing(proxy: Proxy, case: str) -> None:
    """Bytes that are not a valid HTTP request are refused, and no rollout begins."""
    recorded = proxy.recorded
    name = f"bad{list(MALFORMED).index(case)}"
    answer = send_bytes(proxy, MALFORMED[case].replace(b"bad", name.encode()))
    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
    assert proxy.recorded == recorded
    assert ("t", name) not in proxy.engine.tasks.rollouts.running


@pytest.mark.parametrize("method", ["TRACE", "PROPFIND", "M-SEARCH", "DELETE"])
def test_unknown_method_reaches_the_server(proxy: Proxy, method: str) -> None:
    """A method that the tool server does not know is forwarded; the server's refusal is the answer."""
    answer = proxy.client.request(method, "/t/t/r/methods/api/echo")
    assert answer.status_code == 501
    assert "Unsupported method" in answer.text


def test_http_1_0_is_answered_and_closed(proxy: Proxy) -> None:
    """A request of HTTP/1.0 is answered, and its connection closed."""
    answer = send_bytes(proxy, b"GET /t/t/r/old/api/get?key=x HTTP/1.0\r\n\r\n", half_close=False)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b'{"value": null}')


def opened(proxy: Proxy, path: str, **more: Any) -> ClientConnection:
    url = f"ws://{proxy.address[0]}:{proxy.address[1]}/t/t/{path}"
    connection: ClientConnection = connect(url, proxy=None, open_timeout=30, **more)
    return connection


def closing(connection: ClientConnection) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed) as closed:
        connection.recv(30)
    end = closed.value.rcvd
    return (1006, "") if end is None else (end.code, end.reason)


def frame(opcode: int, data: bytes, *, masked: bool = True, final: bool = True) -> bytes:
    mask = os.urandom(4) if masked else b""
    body = bytes(byte ^ mask[n % 4] for n, byte in enumerate(data)) if masked else data
    assert len(data) < 126
    return bytes([opcode | (128 if final else 0), len(data) | (128 if masked else 0)]) + mask + body


INVALID_FRAMES = {
    "no mask": (frame(1, b"x", masked=False), 1002),
    "reserved opcode": (frame(3, b"x"), 1002),
    "reserved bits": (bytes([0xF1, 0x81]) + b"\0\0\0\0x", 1002),
    "text that is not UTF-8": (frame(1, b"\xff\xfe"), 1007),
    "continuation without a start": (frame(0, b"x"), 1002),
    "truncated close code": (frame(8, b"\x00"), 1002),
    "more than max_body_bytes": (bytes([0x82, 0xFF]) + struct.pack("!Q", 1 << 19) + b"\0\0\0\0", 1009),
}


@pytest.mark.parametrize("case", INVALID_FRAMES)
def test_invalid_frame_closes_with_its_code(proxy: Proxy, case: str) -> None:
    """A WebSocket frame that violates the protocol closes the connection with the code of RFC 6455."""
    data, code = INVALID_FRAMES[case]
    recorded = proxy.recorded
    with opened(proxy, f"r/broken-{code}/ws/x") as connection:
        connection.socket.sendall(data)
        assert closing(connection)[0] == code
    assert proxy.recorded == recorded


@pytest.mark.parametrize(
    ("header", "status"), [(b"sec-websocket-version: 12", b"4"), (b"sec-websocket-version: x", b"4")]
)
def test_other_websocket_version_is_refused(proxy: Proxy, header: bytes, status: bytes) -> None:
    """A WebSocket handshake with another version is refused."""
    key = b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    head = b"GET /t/t/r/v/ws/x HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n" + key
    assert send_bytes(proxy, head + header + b"\r\n\r\n").startswith(b"HTTP/1.1 " + status)


def test_other_upgrade_is_ignored(proxy: Proxy) -> None:
    """A request to upgrade to another protocol is answered as an ordinary request."""
    head = b"GET /t/t/r/u/api/echo HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: h2c\r\n\r\n"
    answer = send_bytes(proxy, head, half_close=False)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"upgrade"' not in answer.lower()


def test_failed_server_closes_websocket(proxy: Proxy) -> None:
    """A tool server that cannot start closes the WebSocket with a reason."""
    recorded = proxy.recorded
    with opened(proxy, "r/gone/gone/x") as connection:
        connection.send("x")
        code, reason = closing(connection)
    assert (code, reason[:12]) == (1013, "tool-server:")
    assert "gone" in reason
    assert proxy.recorded == recorded


def test_two_websockets_share_one_server(proxy: Proxy) -> None:
    """Two clients of a rollout have a connection each, and the same server."""
    with ExitStack() as stack:
        connections = [stack.enter_context(opened(proxy, "r/two/ws/x")) for _ in range(2)]
        answers: list[Any] = []

        def talk(connection: ClientConnection) -> None:
            for _ in range(5):
                connection.send("add x")
                answers.append(json.loads(connection.recv(30)))

        threads = [threading.Thread(target=talk, args=(connection,)) for connection in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(len(answer["said"]) for answer in answers) == sorted([1, 2, 3, 4, 5] * 2)
    assert sorted(len(answer["shared"]) for answer in answers) == list(range(1, 11))


def test_partial_message_is_not_sent(proxy: Proxy) -> None:
    """A client that disconnects within a message has sent nothing."""
    recorded = proxy.recorded
    with opened(proxy, "r/half/ws/x") as connection:
        connection.socket.sendall(frame(1, b"half of", final=False))
        connection.socket.sendall(frame(1, b"more than comes")[:-3])
        connection.socket.shutdown(socket.SHUT_WR)
    assert proxy.recorded == recorded
