"""HTTP/1.1 with a tool server: what is sent, what is heard, and what is refused."""

import asyncio
import socket

import pytest

from sandboxes.http_message import request_head
from sandboxes.listener import Headers
from sandboxes.tool_clients.http1 import MalformedResponseError, exchange


class Heard:
    """Keeps what a listener hears."""

    def __init__(self) -> None:
        self.status, self.headers, self.body = 0, (), b""  # type: tuple[int, Headers, bytes]

    async def head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers

    async def data(self, chunk: bytes) -> None:
        self.body += chunk


def talk(answer: bytes, *, method: str = "GET", hangs_up: bool = True, silence_s: float = 0.3) -> Heard:
    """Have a server say answer to a request."""
    heard = Heard()
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(answer)
        if hangs_up:
            theirs.shutdown(socket.SHUT_WR)
        head = request_head(method, "/", (), "x", 0)
        asyncio.run(exchange(ours, head, b"", heard, silence_s=silence_s))
    return heard


def test_framing_and_interim_responses_are_removed() -> None:
    chunked = b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
    heard = talk(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Whatever\r\nX-One: 1\r\nx-Two:  2\r\n" + chunked)
    assert (heard.status, heard.body) == (201, b"abcde")
    assert [name for name, _ in heard.headers] == ["X-One", "x-Two", "Transfer-Encoding"]
    assert talk(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcrest").body == b"abc"
    assert talk(b"HTTP/1.0 200 OK\r\n\r\nuntil the end").body == b"until the end"
    assert talk(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", method="HEAD", hangs_up=False).status == 200
    assert talk(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", hangs_up=False).body == b""


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 300 + b"HTTP/1.1 200 OK\r\nX: y\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    ],
)
def test_malformed_response_is_refused(answer: bytes) -> None:
    with pytest.raises(MalformedResponseError):
        talk(answer)


def test_silence_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        talk(b"HTTP/1.1 200 OK\r\n", hangs_up=False)
