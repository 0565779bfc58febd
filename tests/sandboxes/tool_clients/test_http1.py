"""HTTP/1.1 with a tool server: what is sent, what is heard, and what is refused."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from sandboxes.http_message import request_head
from sandboxes.listener import Headers
from sandboxes.tool_clients.http1 import MalformedResponseError, converse, exchange


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


class Slow:
    """A connection whose other end sends piece after piece, and takes each piece of a request slowly."""

    def __init__(self, pieces: list[bytes], *, pause_s: float, sends_after: int = 0) -> None:
        self.pieces, self.pause_s, self.sends_after = pieces, pause_s, sends_after
        self.sent, self.may_answer = list[bytes](), asyncio.Event()

    async def send(self, data: bytes) -> None:
        await asyncio.sleep(self.pause_s)
        self.sent.append(data)
        if len(self.sent) > self.sends_after:
            self.may_answer.set()

    async def receive(self) -> bytes:
        await self.may_answer.wait()
        await asyncio.sleep(self.pause_s)
        return self.pieces.pop(0) if self.pieces else b""

    def close(self) -> None:
        pass


SILENCE_S = 0.5


@pytest.mark.parametrize("piece", [b"X: y\r\n", b"\r\nHTTP/1.1 102 Processing\r\n"])
def test_pieces_of_a_head_restart_no_limit(piece: bytes) -> None:
    """Each piece comes in time, and the head as a whole does not."""
    first = b"HTTP/1.1 102 Processing\r\n" if piece.startswith(b"\r") else b"HTTP/1.1 200 OK\r\n"
    pieces = [first, *[piece] * 20, b"\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]

    async def test() -> None:
        with pytest.raises(TimeoutError):
            await converse(
                Slow(pieces, pause_s=SILENCE_S / 5), b"GET / HTTP/1.1\r\n\r\n", b"", Heard(), silence_s=SILENCE_S
            )

    asyncio.run(test())


def test_pieces_of_bodies_restart_the_limit() -> None:
    """A long upload and a long response are no silence."""
    answer = [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", *[b"x"] * 10]
    heard = Heard()

    async def body() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"y"

    async def test() -> None:
        slow = Slow(answer, pause_s=SILENCE_S / 5, sends_after=10)
        await converse(slow, b"PUT / HTTP/1.1\r\n\r\n", body(), heard, silence_s=SILENCE_S)

    asyncio.run(test())
    assert heard.body == b"x" * 10


def test_head_is_bounded_with_its_interim_responses() -> None:
    """None of them is large, and there are not many."""
    interim = b"HTTP/1.1 102 Processing\r\nX: " + b"y" * 20_000 + b"\r\n\r\n"
    pieces = [*[interim] * 20, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]

    async def test() -> None:
        with pytest.raises(MalformedResponseError, match="larger than"):
            await converse(Slow(pieces, pause_s=0), b"GET / HTTP/1.1\r\n\r\n", b"", Heard(), silence_s=60)

    asyncio.run(test())
