"""Requests are passed on over connections that have proven the secret."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from proxy.cluster.link import passing
from proxy.cluster.link.greeting import Hello
from proxy.cluster.link.passing import Passed, Passing, PeerLostError, in_chunks
from proxy.http.asgi import Scope
from proxy.http.passed_head import PASSED, head_of
from sandboxes.listener import Headers
from tests.machine import until
from tests.proxy.cluster.link.ends import ANSWERER, ASKER, SECRET, accepting

SCOPE: Scope = {
    "type": "http", "method": "POST", "raw_path": b"/t/a%20b", "query_string": b"q=1", "scheme": "http",
    "headers": [
        (b"host", b"x"), (b"connection", b"keep-alive, x-hop"), (b"x-hop", b"1"), (b"content-length", b"9"),
        (PASSED, b"forged"), (b"authorization", b"Bearer t"),
    ],
}  # fmt: skip


class Application(asyncio.Protocol):
    """Answers each request with what has come of it; a request with `hang` gets no answer."""

    made: list["Application"]

    def __init__(self, hello: Hello) -> None:
        self.hello, self.data = hello, b""
        self.made.append(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.data.startswith(b"GET /healthz") or not self.data.endswith((b"\r\n\r\n", b"end")):
            # The ping of a member that does not live any more is not answered.
            return
        if b"hang" in self.data:
            return
        body, self.data = self.data, b""
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


class Response:
    def __init__(self) -> None:
        self.status, self.body = 0, b""

    async def head(self, status: int, headers: Headers) -> None:  # noqa: ARG002
        self.status = status

    async def data(self, chunk: bytes) -> None:
        self.body += chunk


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Application]:
    monkeypatch.setattr(Application, "made", [], raising=False)
    return Application.made


async def ask(own: Passing, peer: Any, body: bytes | AsyncIterator[bytes], length: int | None) -> Response:
    response = Response()
    await own.request(peer, head_of(SCOPE, length), body, response)
    return response


def test_one_header_is_added() -> None:
    """Those of the connection go, and what an agent says in the name of a member does."""
    passed = Passed(3, 4, 2, True, "https", "a b/\u00e9", "::1/9")
    lines = head_of(SCOPE, 9, [(PASSED, passed.pack())]).split(b"\r\n")
    assert lines == [
        b"POST /t/a%20b?q=1 HTTP/1.1", b"host: x", b"authorization: Bearer t", b"content-length: 9",
        PASSED + b": 3 4 2 1 https a%20b%2F%C3%A9 ::1/9", b"", b"",
    ]  # fmt: skip
    scope: Scope = {"type": "http", "headers": [(b"host", b"x"), (PASSED, lines[4].partition(b": ")[2])]}
    assert Passed.taken_from(scope) == passed
    own = {"headers": [(b"host", b"x")], "scheme": "https", "client": ("::1", 9)}
    assert scope == {"type": "http", **own}, "the owner sees the agent, and not the member that has passed it on"
    assert Passed.taken_from(scope) is None


def test_a_connection_is_used_again(made: list[Application]) -> None:
    """The application learns which member has it; a body without a length goes in chunks, over one of its own."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b"abc"
        yield b"end"

    async def go() -> None:
        async with accepting(Application) as peer:
            own = Passing(SECRET, ASKER)
            first = await ask(own, peer, b"123456end", 9)
            assert (first.status, first.body.endswith(b"\r\n\r\n123456end")) == (200, True)
            await ask(own, peer, b"123456end", 9)
            assert [(each.hello.member, each.hello.boot) for each in made] == [(1, 7)]
            streamed = await ask(own, peer, in_chunks(pieces(), lambda: None), None)
            assert streamed.body.endswith(b"3\r\nabc\r\n3\r\nend\r\n0\r\n\r\n")
            own.close()

    asyncio.run(go())


def test_the_secret_is_proven_first(made: list[Application]) -> None:
    """In both directions, and by the very start of the member that is meant."""

    async def go() -> None:
        async with accepting(Application) as peer:
            for secret, to in ((b"another secret", peer), (SECRET, peer._replace(boot=ANSWERER.boot + 1))):
                with pytest.raises(PeerLostError):
                    await ask(Passing(secret, ASKER), to, b"", 0)
        with pytest.raises(PeerLostError):
            await ask(Passing(SECRET, ASKER), peer, b"", 0)

    asyncio.run(go())
    assert made == []


def test_a_silent_peer_loses_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has no time limit. So its peer is asked whether it lives."""
    monkeypatch.setattr(passing, "PING_S", 0.01)
    monkeypatch.setattr(passing, "SILENT_S", 0.5)

    async def hang() -> AsyncIterator[bytes]:
        yield b"hang"

    async def go() -> None:
        async with accepting(Application) as peer:
            own = Passing(SECRET, ASKER)
            with pytest.raises(PeerLostError):
                await ask(own, peer, in_chunks(hang(), lambda: None), None)
            own.close()

    asyncio.run(go())


def test_connections_to_an_earlier_start_are_closed() -> None:
    """A peer that starts again and again leaves no descriptors behind."""

    async def go() -> None:
        own = Passing(SECRET, ASKER)
        async with accepting(Application) as peer:
            await ask(own, peer, b"123456end", 9)
            (kept,) = own._to[peer].idle
        await until(lambda: not kept.is_usable)
        own._to[peer].is_watched = False
        with pytest.raises(PeerLostError):
            await ask(own, peer._replace(boot=9), b"", 0)
        assert peer not in own._to
        own.close()

    asyncio.run(go())
