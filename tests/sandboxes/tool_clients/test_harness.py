"""A harness's requests over its relay, which runs here without a sandbox."""

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from forkpoint.ephemeral_proxy import free_port
from sandboxes.server_spec import Harness
from sandboxes.tool_clients import harness, harness_relay
from sandboxes.tool_clients.harness import Begin, Delivery, ModelPort, body_of
from sandboxes.tool_clients.http1 import MalformedResponseError

ASK = """
import http.client, sys, threading
def ask(path, body, method="POST", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=20)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    return response.status, response.read().decode()
"""


@asynccontextmanager
async def relayed(script: str) -> AsyncIterator[tuple[ModelPort, Begin]]:
    """Run a script of an agent behind a relay; `ask` sends a request."""
    port = free_port()
    spec = Harness(command=shlex.join([sys.executable, "-c", (ASK + script).replace("PORT", str(port))]), port=port)
    command = [sys.executable, "-B", "-S", harness_relay.__file__, str(port), f"/tmp/relay-{port}.log"]
    relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert relay.stdin is not None
    assert relay.stdout is not None
    port_of_model = ModelPort([os.dup(relay.stdin.fileno()), os.dup(relay.stdout.fileno())], 20.0)
    try:
        yield port_of_model, Begin.of(spec, {})
    finally:
        port_of_model.close()
        relay.stdin.close()
        relay.stdout.close()
        relay.kill()
        relay.wait()
        os.unlink(command[-1])  # noqa: PTH108


def answer(connection: int, text: str) -> Delivery:
    return Delivery(connection, 200, (("content-type", "text/plain"),), text.encode())


def test_a_turn_ends_with_a_whole_request_and_the_last_one_with_the_exit() -> None:
    async def go() -> None:
        script = "print(ask('/v1/messages', 'x' * 300_000)); print(len(ask('/v1/messages', 'two')[1])); sys.exit(4)"
        async with relayed(script) as (port, begin):
            first = await port.turn(begin)
            (request,) = first.requests
            assert (request["method"], request["target"], len(body_of(request))) == ("POST", "/v1/messages", 300_000)
            second = await port.turn(answer(request["connection"], "one"))
            assert [body_of(request) for request in second.requests] == [b"two"]
            last = await port.turn(answer(second.requests[0]["connection"], "y" * 200_000))
            assert last.exit is not None
            assert last.exit["code"] == 4
            assert last.exit["log"] == "(200, 'one')\n200000\n"

    asyncio.run(go())


def test_what_is_no_request_for_a_response_is_answered_at_once() -> None:
    async def go() -> None:
        script = "print([ask(path, None, 'GET')[0] for path in ('/', '/v1/models')]); ask('/v1/responses', '')"
        async with relayed(script) as (port, begin):
            (request,) = (await port.turn(begin)).requests
            assert request["target"] == "/v1/responses"
            ended = await port.turn(answer(request["connection"], ""))
            assert ended.exit == {"code": 0, "log": "[404, 404]\n"}

    asyncio.run(go())


def test_requests_that_wait_together_are_answered_one_after_the_other() -> None:
    async def go() -> None:
        script = """
def one(word):
    # In one write: threads share the output.
    print(f"{word} {ask('/v1/messages', word)[1]}\\n", end="", flush=True)
threads = [threading.Thread(target=one, args=(word,)) for word in 'abc']
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
        async with relayed(script) as (port, begin):
            turn, waiting, done = await port.turn(begin), [], 0
            while turn.exit is None:
                waiting += turn.requests
                request = waiting.pop(0)
                done += 1
                reply = answer(request["connection"], body_of(request).decode().upper())
                turn = await port.turn(reply, others_wait=bool(waiting))
            assert done == 3
            assert sorted(turn.exit["log"].split("\n")) == ["", "a A", "b B", "c C"]

    asyncio.run(go())


def test_a_request_that_is_given_up_waits_no_more() -> None:
    async def go() -> None:
        script = """
import socket
given_up = socket.create_connection(("127.0.0.1", PORT))
given_up.sendall(b"POST /v1/messages HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 2\\r\\n\\r\\nhi")
ask('/v1/messages', 'main')
given_up.close()
ask('/v1/messages', 'last')
"""
        async with relayed(script) as (port, begin):
            turn, seen = await port.turn(begin), []
            waiting = list(turn.requests)
            while turn.exit is None:
                waiting = [request for request in waiting if request["connection"] not in turn.gone]
                request = next((request for request in waiting if body_of(request) != b"hi"), None)
                seen += [] if request is None else [body_of(request)]
                waiting = [other for other in waiting if other is not request]
                turn = await port.turn(None if request is None else answer(request["connection"], ""))
                waiting += turn.requests
            assert seen == [b"main", b"last"]

    asyncio.run(go())


@pytest.mark.parametrize(
    ("written", "part"),
    [
        (harness_relay.HEADER.pack(1, b"d", 1 << 30), "too long"),
        (harness_relay.HEADER.pack(0, b"x", 3) + b"no\n", "how it has ended"),
        (harness_relay.HEADER.pack(1, b"d", 7) + b"garbage", None),
        (b"".join(harness_relay.HEADER.pack(n, b"e", 0) for n in range(9999)), "connections"),
        (b"", "has ended"),
    ],
)
def test_what_any_program_writes_to_the_pipe_ends_the_turn_alone(written: bytes, part: str | None) -> None:
    async def go() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            port = ModelPort([os.dup(ours.fileno()), os.dup(ours.fileno())], 0.5)
            theirs.sendall(written)
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(MalformedResponseError, match=part or "has ended"):
                await port.turn(None)
            port.close()

    asyncio.run(go())


def test_pipe_that_is_filled_without_end_keeps_nothing_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program fills the relay's pipe with empty frames, faster than they are read."""
    monkeypatch.setattr(harness, "_TURN_BYTES", 4 << 20)
    program = f"import os\nwhile True: os.write(1, {harness_relay.HEADER.pack(1, b'd', 0)!r} * 7000)"

    async def go() -> None:
        reading, writing = os.pipe()
        filling = subprocess.Popen([sys.executable, "-c", program], stdout=writing)  # noqa: ASYNC220
        os.close(writing)
        port = ModelPort([os.open("/dev/null", os.O_WRONLY), reading], 20.0)
        turn = asyncio.ensure_future(port.turn(None))
        try:
            # Of these turns of the loop, a turn of the harness that never waits would leave none.
            for _ in range(20):
                await asyncio.sleep(0)
                assert not turn.done()
            with pytest.raises(MalformedResponseError, match="bytes in a turn"):
                await turn
        finally:
            filling.kill()
            filling.wait()
            port.close()

    asyncio.run(go())


def test_request_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_REQUEST_BYTES", 1000)

    async def go() -> None:
        async with relayed("print(ask('/v1/messages', 'x' * 2000)[0]); ask('/v1/messages', 'y')") as (port, begin):
            (request,) = (await port.turn(begin)).requests
            turn = await port.turn(answer(request["connection"], ""))
            assert turn.exit == {"code": 0, "log": "400\n"}

    asyncio.run(go())


def test_what_is_no_http_request_is_refused_and_the_harness_goes_on() -> None:
    """As any server does: a program of the agent may try the port, or send its next request early."""
    script = """
import socket
def refused(data):
    with socket.create_connection(("127.0.0.1", PORT)) as connection:
        connection.sendall(data)
        return connection.makefile("rb").readline().decode().strip()
print(refused(bytes([22, 3, 1] + [0] * 300)), refused(b"GET / HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n" * 2))
early = socket.create_connection(("127.0.0.1", PORT))
early.sendall(b"POST /v1/messages HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 2\\r\\n\\r\\nhi\\r\\nGET /")
print(early.makefile("rb").read()[-5:].decode())
"""

    async def go() -> None:
        async with relayed(script) as (port, begin):
            (request,) = (await port.turn(begin)).requests
            assert body_of(request) == b"hi"
            turn = await port.turn(answer(request["connection"], "reply"))
            assert turn.exit == {"code": 0, "log": "HTTP/1.1 400 Bad Request HTTP/1.1 404 Not Found\nreply\n"}

    asyncio.run(go())


def test_a_harness_that_sends_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_TURN_BYTES", 1000)

    async def go() -> None:
        async with relayed("ask('/v1/messages', 'x' * 5000)") as (port, begin):
            with pytest.raises(MalformedResponseError, match="more than 1000 bytes"):
                await port.turn(begin)

    asyncio.run(go())


def test_variables_have_the_url_of_the_model() -> None:
    spec = Harness(command="run", env={"A_URL": "{model}/v1", "B": "b"}, port=9999)
    assert Begin.of(spec, {}) == Begin("run", {"A_URL": "http://127.0.0.1:9999/v1", "B": "b"})
    own = Begin.of(spec, {"command": "other", "env": {"B": "{model}"}})
    assert own == Begin("other", {"A_URL": "http://127.0.0.1:9999/v1", "B": "http://127.0.0.1:9999"})
    assert json.dumps(dict(own.env))
