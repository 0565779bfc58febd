"""Before any token is looked at: heads, bodies, responses and the number of connections are bounded."""

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httptools
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dataplane import connection_limits
from proxy.dataplane.request_reader import MAX_HEAD_BYTES, RequestReader
from tests.proxy.serving import Running, serving

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
CALL = b'{"command": "echo 1"}'
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
POST = b"POST /t/task/r/%b/shell/exec HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A proxy whose deadlines are short."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SWEEP_S": 0.05, "HEAD_S": 0.5, "BODY_S": 0.5, "UNUSED_S": 1.5, "UNREAD_S": 1.0}.items():
            patch.setattr(connection_limits, name, value)
        with serving(tmp_path_factory.mktemp("data"), max_connections=40) as running:
            yield running


def opened(proxy: Running) -> socket.socket:
    connection = socket.create_connection(proxy.address, timeout=15)
    connection.settimeout(15)
    return connection


def exchanged(proxy: Running, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Send pieces and return what comes back until the other side closes."""
    received = b""
    with opened(proxy) as connection:
        with contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause_s)
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                received += data
    return received


@pytest.mark.parametrize(
    "pieces",
    [
        [GET, b"x: " + b"a" * 70_000 + b"\r\n\r\n"],
        [GET + b"x: " + b"a" * 70_000 + b"\r\n\r\n"],
        [GET, *(b"x%d: %b\r\n" % (number, b"a" * 600) for number in range(200))],
        [GET + b"a: b\r\n" * 300 + b"\r\n"],
        [b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"],
        [b"GET /", *([b"a" * 1000] * 100)],
        [POST % b"trailers" + CHUNKED + b"1\r\n{\r\n0\r\n", *([b"t: " + b"a" * 900 + b"\r\n"] * 100)],
        [POST % b"chunks" + CHUNKED + b"1;", *([b"e" * 1000] * 100)],
        [GET + b"\r\n" + GET, *([b"x: " + b"a" * 1000 + b"\r\n"] * 100)],
    ],
    ids=["a value", "in one packet", "many", "numerous", "target", "pieces", "trailers", "extensions", "second"],
)  # fmt: skip
def test_large_heads_are_refused(proxy: Running, pieces: list[bytes]) -> None:
    assert b"HTTP/1.1 431 " in exchanged(proxy, *pieces)


def test_heads_within_the_bounds_are_served(proxy: Running) -> None:
    head = GET + b"".join(b"x%d: %b\r\n" % (number, b"a" * 200) for number in range(200)) + b"connection: close\r\n\r\n"
    assert exchanged(proxy, head).startswith(b"HTTP/1.1 200 ")
    body = b"%b" % CALL + b" " * 300_000
    large = POST % b"large" + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert b"HTTP/1.1 200 " in exchanged(proxy, large + body)


@pytest.mark.parametrize("first", [b"", GET + b"\r\n"], ids=["first request", "second request"])
@pytest.mark.parametrize("piece", [b"x", b"x: y\r\n"])
def test_slow_heads_are_cut_off(proxy: Running, first: bytes, piece: bytes) -> None:
    """A client that sends one byte in a while is not idle, and still has to come to an end."""
    began = time.monotonic()
    received = exchanged(proxy, first + GET, *([piece] * 40), pause_s=0.1)
    # After a response, a client could take the 408 for another response.
    assert (b"HTTP/1.1 408 " in received) is (first == b"")
    assert time.monotonic() - began < 10


def test_slow_bodies_are_cut_off(proxy: Running) -> None:
    """Also that of a request without a right to be read."""
    for path in (b"/t/task/r/slow/shell/exec", b"/api/v1/nowhere", b"/t/task/r/slow/docker/v1.43/exec/x/start"):
        head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n" % path
        began = time.monotonic()
        exchanged(proxy, head, *([b"x"] * 50), pause_s=0.1)
        assert time.monotonic() - began < 10, path


def test_unused_connections_are_closed(proxy: Running) -> None:
    assert exchanged(proxy) == b""


def test_slow_tools_have_no_deadline(proxy: Running) -> None:
    """A request that is complete may be answered after any time, and its connection serves the next one."""
    with opened(proxy) as connection:
        for number in range(2):
            body = b'{"command": "sleep 1.2; echo %d"}' % number
            connection.sendall(POST % b"tool" + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_response_that_nobody_reads_is_cut_off(proxy: Running) -> None:
    """A megabyte for each request, of which the client reads nothing."""
    body = b'{"command": "%b"}' % (b"x" * 500_000)
    request = POST % b"unread" + b"content-length: %d\r\n\r\n" % len(body) + body
    with opened(proxy) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(5)
        with pytest.raises(OSError):  # noqa: PT011 - reset, broken pipe or timeout of the peer
            connection.sendall(request * 200)
        assert proxy.client.get("/healthz").status_code == 200


def test_idle_connections_make_room_for_others(proxy: Running) -> None:
    """More connections than allowed, in every idle form, do not keep a new client out."""
    held = []
    try:
        for number in range(120):
            connection = opened(proxy)
            held.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall((b"", GET, GET + b"\r\n")[number % 3])
        for _ in range(5):
            assert httpx.get(f"http://{proxy.address[0]}:{proxy.address[1]}/healthz", timeout=30).status_code == 200
    finally:
        for connection in held:
            connection.close()


def test_busy_connections_are_never_closed_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit, with all connections in the middle of a request, a new one gets 503, and no request is lost."""
    with serving(tmp_path, max_connections=16) as running:
        # The client of `serving` has a connection of its own.
        running.client.close()
        monkeypatch.setattr(connection_limits, "BODY_S", 60.0)
        busy = [opened(running) for _ in range(16)]
        for number, connection in enumerate(busy):
            # The server answers that it waits for the body, so it has read the head.
            head = POST % b"busy%d" % number + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(CALL)
            connection.sendall(head)
            assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
            connection.sendall(CALL[:5])
        assert exchanged(running).startswith(b"HTTP/1.1 503 ")
        for connection in busy:
            connection.sendall(CALL[5:])
        assert {connection.recv(65536)[:12] for connection in busy} == {b"HTTP/1.1 200"}
        for connection in busy:
            connection.close()


def test_upgrades_to_other_protocols_are_ignored(proxy: Running) -> None:
    """As curl's to HTTP/2. What follows such a request is bounded as well."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
    assert exchanged(proxy, GET + upgrade + b"\r\n").startswith(b"HTTP/1.1 200 ")
    assert exchanged(proxy, POST % b"u" + upgrade + b"Content-Length: 5\r\n\r\nhello").startswith(b"HTTP/1.1 400 ")
    assert b"HTTP/1.1 400 " in exchanged(proxy, GET + b"\r\n" + GET + upgrade + b"\r\n" + b"x" * 100_000)


@given(st.lists(st.binary(min_size=1, max_size=3000), max_size=60))
def test_reader_never_holds_more_than_a_head(pieces: list[bytes]) -> None:
    """Whatever is sent: the reader takes it, refuses it, or the parser does."""
    reader, size = RequestReader(), 0
    reader.keeps_body = False
    for piece in (b"GET / HTTP/1.1\r\n", *pieces):
        size += len(piece)
        try:
            reader.feed(piece)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return
        assert sum(len(name) + len(value) for name, value in reader.headers) <= MAX_HEAD_BYTES
