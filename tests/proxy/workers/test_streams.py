"""Responses of all workers that are joined while they are read: their order, and the end of a worker in the middle."""

import asyncio
from pathlib import Path

import orjson
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.address import TOTAL
from proxy.http.asgi import AsgiMessage, Receive, Scope, Send
from proxy.shares import Share
from proxy.workers.siblings import Siblings
from proxy.workers.views import AllWorkers
from tests.proxy.workers.parts import serving


class Trajectories:
    """An application that streams lines in pieces of a few bytes, and may end too early."""

    def __init__(self, created: list[int], *, ends_at: int | None = None) -> None:
        self.hangs: asyncio.Event | None = None
        labels = {"tricky": ',"messages":['}
        heads = [
            {"task": "t", "labels": labels, "created_at": at, "messages": [{"content": "x" * 50}]} for at in created
        ]
        self.lines = [orjson.dumps(head) + b"\n" for head in heads]
        self._count, self._ends_at = len(created), ends_at

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/jsonl"), (TOTAL.encode(), b"%d" % self._count)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = b"".join(self.lines)[: self._ends_at]
        for at in range(0, len(body), 7):
            await send({"type": "http.response.body", "body": body[at : at + 7], "more_body": True})
        if self.hangs is not None:
            self.hangs.set()
            await asyncio.Event().wait()
        if self._ends_at is None:
            await send({"type": "http.response.body", "body": b""})


async def streamed(folder: Path, parts: list[Trajectories], *, dies: asyncio.Event | None = None) -> list[AsgiMessage]:
    """Return what the first of several workers sends for all trajectories; the second one ends after the event."""
    directories = [folder / f"worker-{number}" for number in range(len(parts))]
    made = list[HttpToolsProtocol]()
    links, sent = [Siblings(Share(number, len(parts)), directories) for number in range(len(parts))], []
    workers = [AllWorkers(part, link) for part, link in zip(parts, links, strict=True)]
    for directory, link, worker in zip(directories, links, workers, strict=True):
        directory.mkdir()
        link.open(asyncio.Protocol, serving(worker, made if link is links[1] else None))

    async def send(message: AsgiMessage) -> None:
        sent.append(message)

    async def receive() -> AsgiMessage:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/api/v1/trajectories",
        "raw_path": b"/api/v1/trajectories",
        "query_string": b"",
        "headers": [],
    }
    answering = asyncio.ensure_future(workers[0](scope, receive, send))
    if dies is not None:
        await dies.wait()
        for protocol in made:
            protocol.transport.abort()
    async with asyncio.timeout(30):
        await answering
    for link in links:
        await link.aclose()
    return sent


def test_trajectories_come_in_the_order_of_creation(tmp_path: Path) -> None:
    parts = [Trajectories([1, 4]), Trajectories([]), Trajectories([2, 3, 5])]
    head, *body = asyncio.run(streamed(tmp_path, parts))
    first, second, last = parts[0].lines, parts[2].lines, body.pop()
    assert b"".join(message["body"] for message in body) == b"".join(
        [first[0], second[0], second[1], first[1], second[2]]
    )
    assert dict(head["headers"])[TOTAL.encode()] == b"5"
    assert (last["body"], last["more_body"]) == (b"", False)


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("ends_at", [0, 20, -1, 10_000])
def test_response_without_all_of_a_worker_has_no_end(tmp_path: Path, worker: int, ends_at: int) -> None:
    """The server then cuts the connection off, so that nobody takes the rest for all of it."""
    parts = [Trajectories([1, 2]), Trajectories([3, 4])]
    parts[worker] = Trajectories([3, 4], ends_at=ends_at)
    sent = asyncio.run(streamed(tmp_path, parts))
    assert sent[0]["status"] == 200
    assert all(message["more_body"] for message in sent[1:])


def test_response_of_a_dead_worker_has_no_end(tmp_path: Path) -> None:
    """Its connection ends while the next piece is awaited."""

    async def scenario() -> list[AsgiMessage]:
        parts = [Trajectories([1, 2]), Trajectories([3], ends_at=30)]
        parts[1].hangs = asyncio.Event()
        return await streamed(tmp_path, parts, dies=parts[1].hangs)

    sent = asyncio.run(scenario())
    assert all(message["more_body"] for message in sent[1:])
