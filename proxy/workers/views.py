"""Requests that name no task: the worker that gets one asks all workers, and puts their parts together."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode

import httpx
import orjson

from proxy.control.paging import packed_cursor, unpacked_cursor
from proxy.http.asgi import AsgiApp, Receive, Scope, Send
from proxy.http.problems import problem_of
from proxy.http.responses import send_response
from proxy.refusals import RefusalError
from proxy.workers.merging import (
    added,
    merged_metrics,
    merged_page,
    merged_stats,
    merged_steps,
    merged_wrong_answers,
)
from proxy.workers.messages import ViewAnswer, ViewRequest
from proxy.workers.siblings import Siblings, WorkerAwayError

_PAGES = {"/api/v1/tasks": "task", "/api/v1/snapshots": "created_at", "/api/v1/sandboxes": "-age_s"}
"""Lists in pages, with their order by default."""
_USUAL = "100"
"""Items of a page unless the request names another limit, as in `proxy.control.paging`."""
_REFUSED = {
    "/api/v1/report": "Ask for each task: GET /api/v1/tasks/{task}/report",
    "/api/v1/trajectories": "Ask for each task: GET /api/v1/tasks/{task}/trajectories",
    "/api/v1/backup": "Export each task, or stop the proxy and copy its data directory",
}
"""What is not there for all workers together, and what to do instead."""
_JSON = "application/json"
_EMPTY: dict[str, Any] = {"items": [], "total": 0, "next": None}
"""What is left of a list that was shown to its end."""


class WorkerPart(NamedTuple):
    """A worker's response.

    Attributes:
        status: The HTTP status.
        headers: Names and values.
        body: The body.
    """

    status: int
    headers: list[list[str]]
    body: bytes


class _RefusedError(Exception):
    """A worker has refused its part, as all would: its response answers the request."""

    def __init__(self, part: WorkerPart) -> None:
        super().__init__(part.status)
        self.part = part


class AllWorkers:
    """Answers requests of clients: those that name no task for all workers, and all others by the application."""

    def __init__(self, application: AsgiApp, siblings: Siblings) -> None:
        """Stand before an application.

        Args:
            application: This worker's data plane.
            siblings: The other workers.
        """
        self._application, self._siblings = application, siblings
        self._transport = httpx.ASGITransport(application)
        self._merges: dict[tuple[str, str], Callable[[Scope], Awaitable[WorkerPart]]] = {
            ("GET", "/metrics"): self._metrics,
            ("GET", "/readyz"): self._ready,
            ("GET", "/api/v1/stats"): self._of_all(merged_stats),
            ("GET", "/api/v1/videos"): self._of_all(added),
            ("POST", "/api/v1/gc"): self._of_all(added),
            ("GET", "/api/v1/timeline"): self._of_all(lambda views: _with_steps(views, "seconds")),
            ("GET", "/api/v1/system/history"): self._of_all(lambda views: _with_steps(views, "steps")),
            ("GET", "/api/v1/system/wrong-answers"): self._of_all(lambda views: _whole(merged_wrong_answers(views))),
            ("GET", "/api/v1/system/warnings"): self._of_all(_newest_first),
            **{("GET", path): self._page for path in _PAGES},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        path = scope.get("path", "")
        merge = self._merges.get((scope.get("method", ""), path))
        if scope["type"] != "http" or (merge is None and path not in _REFUSED):
            await self._application(scope, receive, send)
            return
        try:
            part = await (self._refuse(scope) if merge is None else merge(scope))
        except _RefusedError as refused:
            part = refused.part
        except RefusalError as refusal:
            problem = problem_of(refusal)
            named = [[name.decode(), value.decode()] for name, value in problem.headers()]
            part = WorkerPart(problem.status, named, problem.body())
        own = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in part.headers]
        # Merged, a part has another length than the worker's that it began with.
        headers = [header for header in own if header[0] != b"content-length"]
        await send_response(send, part.status, headers, part.body)

    async def respond(self, request: ViewRequest) -> tuple[ViewAnswer, bytes]:
        """Return this worker's part of a view."""
        part = await self._own(request)
        return ViewAnswer(part.status, part.headers), part.body

    # -- parts -------------------------------------------------------------------------------------------------------

    async def _own(self, request: ViewRequest) -> WorkerPart:
        url = httpx.URL("http://worker", path=request.path, query=request.query.encode("latin-1"))
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]
        response = await self._transport.handle_async_request(httpx.Request(request.method, url, headers=headers))
        named = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in response.headers.raw]
        return WorkerPart(response.status_code, named, await response.aread())

    async def _part(self, number: int, request: ViewRequest) -> WorkerPart:
        """Return a worker's part.

        Raises:
            WorkerAwayError: The worker does not answer.
        """
        if number == self._siblings.routes.share.number:
            return await self._own(request)
        envelope = await self._siblings.ask(number, request)
        return WorkerPart(envelope.message.status, envelope.message.headers, envelope.body)

    async def _parts(self, requests: Mapping[int, ViewRequest]) -> list[WorkerPart]:
        """Return the parts of some workers, in their order.

        Raises:
            WorkerAwayError: One of them does not answer.
            _RefusedError: One of them refused.
        """
        parts = await asyncio.gather(*(self._part(number, request) for number, request in requests.items()))
        for part in parts:
            if part.status >= 300:
                raise _RefusedError(part)
        return parts

    def _to_all(self, request: ViewRequest) -> dict[int, ViewRequest]:
        return dict.fromkeys(range(self._siblings.count), request)

    # -- views -------------------------------------------------------------------------------------------------------

    def _of_all(self, merge: Callable[[list[Any]], Any]) -> Callable[[Scope], Awaitable[WorkerPart]]:
        async def view(scope: Scope) -> WorkerPart:
            parts = await self._parts(self._to_all(_request(scope)))
            return _json(merge([orjson.loads(part.body) for part in parts]))

        return view

    async def _ready(self, scope: Scope) -> WorkerPart:
        return (await self._parts(self._to_all(_request(scope))))[0]

    async def _refuse(self, scope: Scope) -> WorkerPart:
        """Refuse a request that the token allows.

        Raises:
            RefusalError: 501.
        """
        # Anything else that shows all tasks.
        allowed = replace(_request(scope), path="/api/v1/stats", query="")
        await self._parts({self._siblings.routes.share.number: allowed})
        path = scope["path"]
        raise RefusalError(501, "workers", f"{path} is not there with several workers. {_REFUSED[path]}.")

    async def _metrics(self, scope: Scope) -> WorkerPart:
        """Return the metrics of the workers that answer, so that one that does not is noticed."""
        request = _request(scope)
        numbers = range(self._siblings.count)
        answers = await asyncio.gather(*(self._part(number, request) for number in numbers), return_exceptions=True)
        texts, headers = dict[int, bytes](), list[list[str]]()
        for number, part in zip(numbers, answers, strict=True):
            if isinstance(part, WorkerPart):
                if part.status >= 300:
                    raise _RefusedError(part)
                texts[number], headers = part.body, part.headers
            elif not isinstance(part, WorkerAwayError):
                raise part
        return WorkerPart(200, headers, merged_metrics(texts))

    async def _page(self, scope: Scope) -> WorkerPart:
        """Return a page of all workers' lists.

        The cursor of the next page is the cursor of each worker's list. A worker that gave more items than the page
        has of it gets another request, for as many as it has, so that its cursor is the position of the last one shown.
        """
        query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
        cursors = _cursors(query.pop("cursor", None), self._siblings.count)
        sort = query.get("sort", _PAGES[scope["path"]])

        def asking(number: int, limit: int | None = None) -> ViewRequest:
            own = {"cursor": cursors[number], "limit": limit}
            return _request(scope, urlencode({**query, **{name: value for name, value in own.items() if value}}))

        # Lists that were shown to their end are requested only for their length.
        unseen = [number for number, cursor in enumerate(cursors) if cursor is not None]
        requests = {number: asking(number, None if number in unseen else 1) for number in range(self._siblings.count)}
        views = [orjson.loads(part.body) for part in await self._parts(requests)]
        pages = [view if number in unseen else _EMPTY for number, view in enumerate(views)]
        limit = int(query.get("limit", _USUAL))
        items, taken = merged_page(pages, sort.removeprefix("-"), descending=sort.startswith("-"), limit=limit)
        cut = {n: asking(n, taken[n]) for n in unseen if 0 < taken[n] < len(pages[n]["items"])}
        places = dict(zip(cut, (orjson.loads(part.body)["next"] for part in await self._parts(cut)), strict=True))
        following = [
            places[number] if number in cut else pages[number]["next"] if taken[number] else cursors[number]
            for number in range(self._siblings.count)
        ]
        following = [None if not pages[n]["items"] else following[n] for n in range(self._siblings.count)]
        more = any(cursor is not None for cursor in following)
        total = sum(view["total"] for view in views)
        return _json({"items": items, "total": total, "next": packed_cursor(following) if more else None})


def _request(scope: Scope, query: str | None = None) -> ViewRequest:
    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]]
    text = scope["query_string"].decode("latin-1") if query is None else query
    return ViewRequest(scope["method"], scope["path"], text, headers)


def _cursors(cursor: str | None, count: int) -> list[str | None]:
    """Return the cursor of each worker's list: empty for its beginning, None after its end.

    Raises:
        RefusalError: 422, no page of all workers has the cursor.
    """
    if cursor is None:
        return [""] * count
    cursors = unpacked_cursor(cursor)
    if not isinstance(cursors, list) or len(cursors) != count or not all(isinstance(c, str | None) for c in cursors):
        raise RefusalError(422, "cursor", "the cursor is not the `next` of a page of this list. Begin without one.")
    return cursors


def _json(value: Any) -> WorkerPart:
    return WorkerPart(200, [["content-type", _JSON]], orjson.dumps(value))


def _whole(items: list[Any]) -> Any:
    return {"items": items, "total": len(items), "next": None}


def _with_steps(views: list[Any], name: str) -> Any:
    return {**views[0], name: merged_steps([view[name] for view in views])}


def _newest_first(views: list[Any]) -> Any:
    items = [item for view in views for item in view["items"]]
    return _whole(sorted(items, key=lambda item: item.get("timestamp", ""), reverse=True))
