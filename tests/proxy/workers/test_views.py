"""Views of all workers: what one worker asks the others, and what it makes of their parts."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.http.asgi import AsgiMessage, Receive, Scope, Send
from proxy.shares import Share
from proxy.workers.siblings import Siblings
from proxy.workers.views import AllWorkers
from tests.proxy.workers.parts import serving


class Lists:
    """An application with one list, `/api/v1/tasks`, in pages; its cursor is the last item shown."""

    def __init__(self, names: list[str], status: int = 200) -> None:
        self.names, self.status = sorted(names), status
        self.asked: list[str] = []

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        query = dict(pair.split("=") for pair in scope["query_string"].decode().split("&") if pair)
        self.asked.append(scope["path"])
        limit, after = int(query.get("limit", 100)), query.get("cursor", "")
        rest = [name for name in self.names if name > after]
        more = rest[limit - 1] if len(rest) > limit else None
        page = {"items": [{"task": name} for name in rest[:limit]], "total": len(self.names), "next": more}
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": orjson.dumps(page)})


async def request(application: AllWorkers, path: str, query: str = "", method: str = "GET") -> tuple[int, Any]:
    sent: list[AsgiMessage] = []

    async def send(message: AsgiMessage) -> None:
        sent.append(message)

    async def receive() -> AsgiMessage:
        return {"type": "http.request"}

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [],
        "raw_path": path.encode(),
    }
    await application(scope, receive, send)
    assert dict(sent[0]["headers"])[b"content-length"] == b"%d" % len(sent[1]["body"])
    return sent[0]["status"], orjson.loads(sent[1]["body"])


def pages(folder: Path, lists: list[Lists], limit: int) -> list[list[str]]:
    """Return the pages of a list of several workers, in one event loop."""
    directories = [folder / f"worker-{number}" for number in range(len(lists))]

    async def scenario() -> list[list[str]]:
        workers = []
        for number, part in enumerate(lists):
            directories[number].mkdir()
            links = Siblings(Share(number, len(lists)), directories)
            workers.append(AllWorkers(part, links))
            links.open(asyncio.Protocol, serving(workers[-1]))
        shown, cursor = list[list[str]](), ""
        while True:
            query = f"limit={limit}" + (f"&cursor={cursor}" if cursor else "")
            # Any worker may be asked for the next page.
            status, page = await request(workers[len(shown) % len(workers)], "/api/v1/tasks", query)
            assert (status, page["total"]) == (200, sum(len(part.names) for part in lists))
            shown.append([item["task"] for item in page["items"]])
            if (cursor := page["next"]) is None:
                break
        for worker in workers:
            await worker._others.aclose()  # type: ignore[attr-defined]
        return shown

    return asyncio.run(scenario())


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_pages_follow_each_other(tmp_path: Path, limit: int) -> None:
    """Each item comes once, in order, whichever worker has it and is asked."""
    names = ["a", "b", "c", "d", "e", "f", "g"]
    shown = pages(tmp_path, [Lists(["a", "d", "e"]), Lists([]), Lists(["b", "c", "f", "g"])], limit)
    assert [name for page in shown for name in page] == names
    assert {len(page) for page in shown[:-1]} <= {limit}


def alone(folder: Path, part: Lists, path: str, query: str = "") -> tuple[int, Any]:
    """Return the response of the only worker."""

    async def scenario() -> tuple[int, Any]:
        links = Siblings(Share(0, 1), [folder])
        worker = AllWorkers(part, links)
        links.open(asyncio.Protocol, serving(worker))
        try:
            return await request(worker, path, query)
        finally:
            await links.aclose()

    return asyncio.run(scenario())


def test_refusals_are_passed_on(tmp_path: Path) -> None:
    """Each worker checks the token and the query itself."""
    for path in ("/api/v1/tasks", "/api/v1/backup"):
        assert alone(tmp_path, Lists([], 401), path)[0] == 401


@pytest.mark.parametrize("cursor", ["x", "e30", "W10", "WzEse31d", "WzFd"])
def test_foreign_cursor_is_refused(tmp_path: Path, cursor: str) -> None:
    status, problem = alone(tmp_path, Lists([]), "/api/v1/tasks", f"cursor={cursor}")
    assert (status, problem["type"]) == (422, "urn:forkpoint:cursor")
