"""Connections whose known answers wait for a log: their order, their end, and calls that are made again."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dataplane.logged_hits import LoggedHits
from proxy.http.asgi import Scope
from tests.proxy.dataplane.test_hit_protocol import Server, contents, request


class Hits:
    """Known calls: those whose paths begin with /hit. A test says when a step is in the log, and whether it is."""

    def __init__(self) -> None:
        self.waiting = list[Callable[[bool], None]]()
        self.begun = 0
        self.fails = set[bytes]()
        self.body = b""

    def of(self, _state: object) -> Any:
        return self.known

    def known(self, scope: Scope, body: bytes) -> bytes | None:
        self.body = body
        content = b"hit " + body
        whole = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)
        return whole if scope["path"].startswith("/hit") else None

    def log(self, logged: Callable[[bool], None]) -> object:
        self.waiting.append(logged)
        self.begun += 1
        return "call"

    def written(self, *, is_in_log: bool = True) -> None:
        waiting, self.waiting = self.waiting, []
        for logged in waiting:
            logged(is_in_log)


def server_of(hits: Hits) -> tuple[Server, list[object]]:
    """Return a connection to a server, and what was released of the calls that were begun."""
    server, released = Server(hits=hits, kind=LoggedHits), list[object]()
    cast("Any", server.connection.data_plane).handled = released.append
    return server, released


def test_an_answer_waits_for_the_log() -> None:
    async def go() -> None:
        hits = Hits()
        server, released = server_of(hits)
        server.connection.data_received(request("/hit", b"1"))
        assert (server.client.received, server.state.tasks) == (b"", set())
        hits.written()
        assert (contents(server.client.received), server.client.writes) == ([b"hit 1"], 1)
        assert (server.state.total_requests, server.app_paths, released) == (1, [], [])

    asyncio.run(go())


def test_a_step_that_is_not_in_the_log_is_answered_elsewhere() -> None:
    """The request goes the regular way, as the call that it is."""

    async def go() -> None:
        hits = Hits()
        server, released = server_of(hits)
        server.connection.data_received(request("/hit", b"1"))
        hits.written(is_in_log=False)
        assert contents(await server.settled()) == [b"app 1"]
        assert released == ["call"]
        server.connection.data_received(request("/hit", b"2"))
        hits.written()
        assert contents(server.client.received) == [b"app 1", b"hit 2"]

    asyncio.run(go())


@pytest.mark.parametrize("is_in_log", [True, False])
def test_what_follows_waits_for_the_answer(is_in_log: bool) -> None:
    """A client that sends more before it has its answer is held up."""

    async def go() -> None:
        hits = Hits()
        server, _ = server_of(hits)
        server.connection.data_received(request("/hit", b"1"))
        server.connection.data_received(request("/miss", b"2") + request("/hit", b"3")[:-1])
        assert (server.client.is_held, hits.begun, server.app_paths) == (True, 1, [])
        hits.written(is_in_log=is_in_log)
        server.connection.data_received(b"3")
        first = b"hit 1" if is_in_log else b"app 1"
        assert contents(await server.settled()) == [first, b"app 2", b"app 3"]
        assert not server.client.is_held
        for number in (b"4", b"5"):
            server.connection.data_received(request("/hit", number))
        hits.written()
        assert (server.client.is_held, hits.begun) == (False, 3)

    asyncio.run(go())


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["/hit", "/miss"]), st.booleans()), max_size=5),
    st.lists(st.integers(0, 600), max_size=8),
)
def test_responses_do_not_depend_on_packets(requests: list[tuple[str, bool]], cuts: list[int]) -> None:
    """However the bytes are cut into packets, and whichever rows are lost, each request gets one response, in order."""

    async def go() -> None:
        hits = Hits()
        server, _ = server_of(hits)
        sent = b"".join(request(path, b"%d" % number) for number, (path, _) in enumerate(requests))
        for start, end in pairwise(sorted({0, len(sent), *(cut % (len(sent) + 1) for cut in cuts)})):
            server.connection.data_received(sent[start:end])
            await asyncio.sleep(0)
        await server.settled()
        while hits.waiting:
            hits.written(is_in_log=requests[int(hits.body)][1])
            await server.settled()
        bodies = contents(server.client.received)
        assert [int(body[4:]) for body in bodies] == list(range(len(requests)))
        assert all(body.startswith(b"app") or requests[int(body[4:])] == ("/hit", True) for body in bodies)

    asyncio.run(go())


@pytest.mark.parametrize("is_in_log", [True, False])
def test_a_client_that_hangs_up_gets_nothing(is_in_log: bool) -> None:
    """Its call is over, whatever becomes of the step: nothing makes it again."""

    async def go() -> None:
        hits = Hits()
        server, released = server_of(hits)
        server.connection.data_received(request("/hit", b"1"))
        server.client.close()
        server.connection.connection_lost(None)
        hits.written(is_in_log=is_in_log)
        await server.settled()
        assert (server.client.received, server.app_paths) == (b"", [])
        assert released == ([] if is_in_log else ["call"])

    asyncio.run(go())


@pytest.mark.parametrize("is_in_log", [True, False])
@pytest.mark.parametrize("is_known_to_uvicorn", [True, False])
def test_shutdown_closes_after_the_response(is_in_log: bool, is_known_to_uvicorn: bool) -> None:
    async def go() -> None:
        hits = Hits()
        server, _ = server_of(hits)
        if is_known_to_uvicorn:
            await server.send(request("/miss"))
        server.connection.data_received(request("/hit", b"1"))
        for connection in list(server.state.connections):
            connection.shutdown()
        assert not server.client.closed
        hits.written(is_in_log=is_in_log)
        assert (await server.settled()).endswith(b" 1")
        assert server.client.closed

    asyncio.run(go())


def test_a_connection_that_waits_for_the_log_is_not_idle() -> None:
    async def go() -> None:
        hits = Hits()
        server, _ = server_of(hits)
        server.connection.data_received(request("/hit", b"1"))
        assert (server.connection.expire(), server.client.closed) == (True, False)
        hits.written()
        assert (server.connection.expire(), server.client.closed) == (False, True)

    asyncio.run(go())
