"""Connections and questions between workers, in one event loop."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from proxy.http.asgi import Receive, Scope, Send
from proxy.shares import Share
from proxy.workers import siblings as module
from proxy.workers.siblings import Siblings, WorkerAwayError
from sandboxes.tool_clients.http1 import WholeResponse
from tests.proxy.workers.parts import serving

REQUEST: Scope = {"method": "GET", "raw_path": b"/metrics", "query_string": b"", "headers": [(b"host", b"localhost")]}


class Recorded(asyncio.Protocol):
    """What a worker sees of a given connection; it answers with all of it at the end of a line."""

    received_before = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.data = transport, b""
        self.data_received(self.received_before)

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.data.endswith(b"\n"):
            self.transport.write(self.data.upper())
            self.transport.close()


def two(folder: Path) -> tuple[Siblings, Siblings]:
    directories = [folder / f"worker-{number}" for number in range(2)]
    for directory in directories:
        directory.mkdir(exist_ok=True)
    first, second = (Siblings(Share(number, 2), directories) for number in range(2))
    return first, second


async def echo(scope: Scope, _receive: Receive, send: Send) -> None:
    headers = [header for header in scope["headers"] if header[0] == b"host"]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": scope["raw_path"]})


def opened(worker: Siblings) -> None:
    worker.open(Recorded, serving(echo))


def connection() -> tuple[socket.socket, socket.socket]:
    client, server = socket.socketpair()
    client.setblocking(False)
    server.setblocking(False)
    return client, server


async def everything(client: socket.socket) -> bytes:
    data = b""
    async with asyncio.timeout(30):
        while part := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
            data += part
    return data


@pytest.mark.parametrize("length", [0, 1, 1 << 20])
def test_connection_goes_with_its_bytes(tmp_path: Path, length: int) -> None:
    """What was read of it comes first, and then what is still on its way."""

    async def scenario() -> bytes:
        first, second = two(tmp_path)
        opened(second)
        client, server = connection()
        with client:
            first.give(1, server, b"a" * length)
            client.send(b"b\n")
            data = await everything(client)
        await first.aclose()
        await second.aclose()
        return data

    assert asyncio.run(scenario()) == b"A" * length + b"B\n"


def test_connection_waits_for_its_worker(tmp_path: Path) -> None:
    """One that starts takes it, also over the socket that a killed one has left."""

    async def scenario() -> bytes:
        first, second = two(tmp_path)
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / "worker-1" / "link"))
        client, server = connection()
        with client:
            first.give(1, server, b"a\n")
            await asyncio.sleep(0)
            opened(second)
            data = await everything(client)
        await first.aclose()
        await second.aclose()
        return data

    assert asyncio.run(scenario()) == b"A\n"


def test_worker_that_stays_away_is_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client may try again: nothing was executed."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)

    async def scenario() -> tuple[bytes, str]:
        first, _ = two(tmp_path)
        client, server = connection()
        with client:
            first.give(1, server, b"a\n")
            data = await everything(client)
        with pytest.raises(WorkerAwayError) as away:
            await first.request(1, REQUEST, WholeResponse())
        await first.aclose()
        return data, str(away.value)

    response, reason = asyncio.run(scenario())
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"retry-after: 1\r\n" in head
    assert b"urn:forkpoint:worker-away" in body
    assert "worker 1" in reason


def test_only_so_many_connections_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds a descriptor."""
    monkeypatch.setattr(module, "MAX_WAITING", 0)

    async def scenario() -> bytes:
        first, _ = two(tmp_path)
        client, server = connection()
        with client:
            first.give(1, server, b"a\n")
            data = await everything(client)
        await first.aclose()
        return data

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 503 ")


def test_another_user_s_process_is_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could give away connections of its own as if they had been accepted here, and read views."""

    async def scenario() -> None:
        first, second = two(tmp_path)
        opened(second)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(WorkerAwayError):
            await first.request(1, REQUEST, WholeResponse())
        await first.aclose()
        await second.aclose()

    asyncio.run(scenario())


def test_parts_are_asked_for_by_http(tmp_path: Path) -> None:
    """Of this worker too."""

    async def scenario() -> list[WholeResponse]:
        first, second = two(tmp_path)
        parts = [WholeResponse(), WholeResponse()]
        for number, worker in enumerate((first, second)):
            opened(worker)
            await second.request(number, REQUEST, parts[number])
        await first.aclose()
        await second.aclose()
        return parts

    for part in asyncio.run(scenario()):
        assert (part.status, dict(part.headers)["host"], bytes(part.body)) == (200, "localhost", b"/metrics")


def test_dead_worker_is_connected_anew(tmp_path: Path) -> None:
    """The channel to the one before is not used again."""

    async def scenario() -> list[bytes]:
        first, second = two(tmp_path)
        answers = []
        for _ in range(2):
            opened(second)
            client, server = connection()
            with client:
                first.give(1, server, b"a\n")
                answers.append(await everything(client))
            await second.aclose()
            second = two(tmp_path)[1]
        await first.aclose()
        return answers

    assert asyncio.run(scenario()) == [b"A\n", b"A\n"]


def test_requests_of_other_tasks_are_elsewhere(tmp_path: Path) -> None:
    first, second = two(tmp_path)
    scope = {"raw_path": b"/t/task/r/1/shell/exec", "headers": []}
    assert {first.elsewhere(scope), second.elsewhere(scope)} == {None, Share(0, 2).worker_of("task")}
    assert first.elsewhere({"raw_path": b"/healthz", "headers": []}) is None
