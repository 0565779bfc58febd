"""Connections: which part answers a request, in which order, and when a connection is closed."""

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import httptools
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from proxy.dataplane import closing_responses
from proxy.dataplane.hit_protocol import MAX_HELD_BYTES, HitFirst, protocol_for
from proxy.dataplane.response_reports import report_responses
from proxy.http.asgi import Receive, Scope, Send

if TYPE_CHECKING:
    from proxy.dataplane.app import DataPlane


class Client(asyncio.Transport):
    """The client's end of a connection, in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.received = b""
        self.writes = 0
        self.is_held = False
        self.gone, self.written = asyncio.Event(), asyncio.Event()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.received += bytes(data)
        self.written.set()
        self.writes += 1

    @property
    def closed(self) -> bool:
        return self.gone.is_set()

    def close(self) -> None:
        self.gone.set()

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.is_held = True

    def resume_reading(self) -> None:
        self.is_held = False


class Server:
    """One connection to a server that knows the answer to each request whose path begins with /hit.

    The application answers every request with its path and body, so that the order of responses can be seen.
    """

    def __init__(self, *, timeout_keep_alive: int = 120, hits: Any = None, kind: type[HitFirst] | None = None) -> None:
        self.app_paths: list[str] = []
        self.turn = asyncio.Event()
        self.turn.set()
        self.gate_second: asyncio.Event | None = None
        plane = SimpleNamespace(known=self._known, streaming=None, may_stream=lambda _: False, expect=lambda _: None)
        plane.tunnels, plane.hits = None, hits
        plane.engine = SimpleNamespace(
            counts=SimpleNamespace(hit_s=SimpleNamespace(observe=lambda _: None)),
            settings=SimpleNamespace(max_connections=100),
        )
        config = uvicorn.Config(
            report_responses(self._app), lifespan="off", log_config=None, timeout_keep_alive=timeout_keep_alive
        )
        self.state, self.client = ServerState(), Client()
        self.connection = protocol_for(cast("DataPlane", plane), kind=kind)(config, self.state, {})
        self.connection.connection_made(self.client)

    async def send(self, *chunks: bytes) -> bytes:
        """Send chunks, each after the last was read; return what the client has received once all tasks have ended."""
        for chunk in chunks:
            if not self.client.closed:
                self.connection.data_received(chunk)
                await asyncio.sleep(0)
        return await self.settled()

    async def settled(self) -> bytes:
        async with asyncio.timeout(30):
            while self.state.tasks:
                await asyncio.wait(self.state.tasks)
        return self.client.received

    def _known(self, scope: Scope, body: bytes) -> bytes | None:
        if not scope["path"].startswith("/hit"):
            return None
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body) + 4, b"hit " + body)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.app_paths.append(scope["path"])
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await self.turn.wait()
        if self.gate_second is not None and len(self.app_paths) == 2:
            await self.gate_second.wait()
        content = b"app " + body
        headers = [(b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def request(path: str, body: bytes = b"", extra: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body


def contents(received: bytes) -> list[bytes]:
    """Return the bodies of responses in their order."""
    bodies = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        bodies.append(received[:length])
        received = received[length:]
    return bodies


def test_known_request_is_one_write_without_a_task() -> None:
    async def go() -> None:
        server = Server()
        server.connection.data_received(request("/hit", b"1"))
        assert (contents(server.client.received), server.client.writes) == ([b"hit 1"], 1)
        assert not server.state.tasks
        assert (server.state.total_requests, server.app_paths) == (1, [])

    asyncio.run(go())


def test_hits_and_misses_share_a_connection() -> None:
    async def go() -> None:
        server = Server()
        paths = ["/hit", "/miss", "/hit", "/hit", "/miss", "/miss", "/hit"]
        received = await server.send(*(request(path, b"%d" % number) for number, path in enumerate(paths)))
        assert contents(received) == [b"hit 0", b"app 1", b"hit 2", b"hit 3", b"app 4", b"app 5", b"hit 6"]
        assert server.app_paths == ["/miss"] * 3

    asyncio.run(go())


def test_request_behind_an_unanswered_one_waits() -> None:
    """A known answer must not overtake the response to the request before it."""

    async def go() -> None:
        server = Server()
        server.turn.clear()
        server.connection.data_received(request("/miss", b"1"))
        server.connection.data_received(request("/hit", b"2"))
        await asyncio.sleep(0)
        assert server.client.received == b""
        server.gate_second = asyncio.Event()
        server.turn.set()
        await server.client.written.wait()
        # The first response is out, the second is not, and a third request comes.
        server.connection.data_received(request("/hit", b"3"))
        assert contents(server.client.received) == [b"app 1"]
        server.gate_second.set()
        assert contents(await server.settled()) == [b"app 1", b"app 2", b"app 3"]
        assert contents(await server.send(request("/hit", b"4")))[-1] == b"hit 4"

    asyncio.run(go())


def test_hit_path_waits_for_a_requests_end() -> None:
    """A response may end while the next request is half read: the half that is still to come is not a request."""

    async def go() -> None:
        server = Server()
        second = request("/hit", b"12345")
        server.connection.data_received(request("/miss") + second[:-2])
        await server.client.written.wait()
        assert contents(server.client.received) == [b"app "]
        assert contents(await server.send(second[-2:]))[1:] == [b"app 12345"]

    asyncio.run(go())


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["/hit", "/miss"]), st.binary(max_size=30), st.booleans()), max_size=5),
    st.lists(st.integers(0, 600), max_size=8),
)
def test_responses_do_not_depend_on_packets(requests: list[tuple[str, bytes, bool]], cuts: list[int]) -> None:
    """However the bytes are cut into packets, each request gets its own response, in order."""

    async def go() -> None:
        server = Server()
        sent = b""
        for path, body, chunked in requests:
            if chunked and body:
                sent += f"POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
                sent += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            else:
                sent += request(path, body)
        edges = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
        received = await server.send(*(sent[start:end] for start, end in pairwise(edges)))
        assert [content[4:] for content in contents(received)] == [body for _, body, _ in requests]
        # Between two requests the connection always comes back to the hit path.
        assert contents(await server.send(request("/hit", b"last")))[-1] == b"hit last"

    asyncio.run(go())


def test_split_request_head_can_be_a_hit() -> None:
    """A request whose head arrives in two packets can be a hit."""

    async def go() -> None:
        server = Server()
        whole = request("/hit", b"1")
        assert contents(await server.send(*(bytes([byte]) for byte in whole[:20]), whole[20:])) == [b"hit 1"]
        assert server.app_paths == []

    asyncio.run(go())


def test_a_body_in_a_packet_of_its_own_can_be_a_hit() -> None:
    """Python's clients send it so."""

    async def go() -> None:
        server = Server()
        for path, answer in (("/hit", b"hit 12345"), ("/miss", b"app 12345"), ("/hit", b"hit 12345")):
            whole = request(path, b"12345")
            assert contents(await server.send(whole[:-5], whole[-5:-2], whole[-2:]))[-1] == answer
        assert server.app_paths == ["/miss"]

    asyncio.run(go())


@pytest.mark.parametrize(
    "framing",
    [
        f"content-length: {MAX_HELD_BYTES + 1}",
        "transfer-encoding: chunked",
        "content-length: 2\r\nexpect: 100-continue",
    ],
)
def test_a_body_that_may_be_long_in_coming_is_not_held(framing: str) -> None:
    async def go() -> None:
        server = Server()
        server.connection.data_received(f"POST /hit HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n".encode())
        await asyncio.sleep(0)
        assert server.app_paths == ["/hit"]
        server.connection.connection_lost(None)

    asyncio.run(go())


@pytest.mark.parametrize(
    "extra", ["expect: 100-continue\r\n", "connection: close\r\n", "connection: upgrade\r\nupgrade: h2c\r\n"]
)
def test_special_requests_take_the_regular_path(extra: str) -> None:
    async def go() -> None:
        server = Server()
        received = await server.send(request("/hit", b"", extra))
        assert server.app_paths == ["/hit"]
        assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\n") == extra.startswith("expect")
        # The parser cannot follow a connection behind an upgrade, so it ends with the response.
        assert server.client.closed == extra.startswith("connection: ")

    asyncio.run(go())


@pytest.mark.parametrize("line", [b"GET http://other/ HTTP/1.1", b"GET /miss", b"nonsense", b"GET /miss HTTP/3.7"])
@pytest.mark.parametrize("before", [[], [request("/miss")], [request("/hit")]])
def test_bad_request_line_is_refused_and_closes(line: bytes, before: list[bytes]) -> None:
    async def go() -> None:
        server = Server()
        received = await server.send(*before, line + b"\r\nhost: x\r\n\r\n")
        assert received.count(b"HTTP/1.1 400 Bad Request") == 1
        assert received.endswith(closing_responses.INVALID)
        assert server.client.closed
        assert len(server.app_paths) == before.count(request("/miss"))

    asyncio.run(go())


def test_client_that_does_not_read_gets_no_more() -> None:
    async def go() -> None:
        server = Server()
        server.connection.pause_writing()
        server.connection.data_received(request("/hit", b"1"))
        await asyncio.sleep(0)
        assert server.client.received == b""
        server.connection.resume_writing()
        assert contents(await server.settled()) == [b"app 1"]

    asyncio.run(go())


def test_only_idle_connections_are_closed() -> None:
    """An idle connection is closed, and a busy connection is not."""

    async def go() -> None:
        server = Server(timeout_keep_alive=0)
        await server.send(request("/hit"))
        server.turn.clear()
        server.connection.data_received(request("/miss", b"1"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not server.client.closed
        server.turn.set()
        assert contents(await server.settled())[1] == b"app 1"
        await server.client.gone.wait()

    asyncio.run(go())


@pytest.mark.parametrize("busy", [False, True])
def test_shutdown_closes_after_the_response(busy: bool) -> None:
    async def go() -> None:
        server = Server()
        await server.send(request("/hit"), request("/miss"))
        server.turn.clear()
        if busy:
            server.connection.data_received(request("/miss", b"1"))
            await asyncio.sleep(0)
        for connection in list(server.state.connections):
            connection.shutdown()
        assert server.client.closed is not busy
        server.turn.set()
        received = await server.settled()
        assert server.client.closed
        assert received.endswith(b"app 1") == busy
        server.connection.connection_lost(None)
        assert not server.state.connections

    asyncio.run(go())


def test_a_request_that_uvicorn_refuses_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout is busy while one of its requests is noted. One that no application sees must not keep it busy."""

    async def go() -> None:
        server, rollout, noted = Server(), object(), 0

        def expect(_: Scope) -> object:
            nonlocal noted
            noted += 1
            return rollout

        def handled(released: object) -> None:
            nonlocal noted
            assert released is rollout
            noted -= 1

        plane = cast("Any", server.connection.data_plane)
        plane.expect, plane.handled = expect, handled
        server.turn.clear()
        server.connection.data_received(request("/miss", b"1"))
        assert noted == 1
        server.turn.set()
        await server.settled()
        assert noted == 0

        def refuse(_: bytes) -> None:
            raise httptools.HttpParserInvalidURLError

        monkeypatch.setattr(httptools, "parse_url", refuse)
        assert (await server.send(request("/miss", b"2"))).endswith(closing_responses.INVALID)
        assert (noted, server.app_paths) == (0, ["/miss"])

    asyncio.run(go())
