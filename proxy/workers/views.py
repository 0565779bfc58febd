"""Requests that name no task: the process that gets one asks all of them, and puts their parts together.

The processes are the workers of a proxy, or the members of a cluster (`OtherProxies`). Each one's part is its
response to the same request, passed on as HTTP.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode

import orjson
import structlog
from starlette.responses import StreamingResponse

from proxy.address import TOTAL
from proxy.control.paging import packed_cursor, unpacked_cursor
from proxy.control.reports import ReportPart, report_of
from proxy.control.routes.transfer import MEDIA_TYPE as BUNDLE_TYPE
from proxy.dataplane.app import OtherProxies
from proxy.http.asgi import AsgiApp, Receive, Scope, Send
from proxy.http.problems import problem_of
from proxy.http.responses import send_problem, send_response
from proxy.refusals import RefusalError
from proxy.workers import merging
from proxy.workers.streams import PartCutError, ResponsePart, joined_backup, joined_trajectories, whole
from sandboxes.http_message import end_to_end

log = structlog.get_logger()

_PAGES = {"/api/v1/tasks": "task", "/api/v1/snapshots": "created_at", "/api/v1/sandboxes": "-age_s"}
"""Lists in pages, with their order by default."""
_USUAL = "100"
"""Items of a page unless the request names another limit, as in `proxy.control.paging`."""
_STREAMS = {"/api/v1/trajectories": joined_trajectories, "/api/v1/backup": joined_backup}
"""Responses that are read from all workers in pieces, and what joins them."""
_UNJOINED = frozenset({"content-length", "content-type", TOTAL})
"""Headers that a joined response does not take from its first part."""
_OF_A_PART = frozenset({"content-length"})
_JSON = "application/json"
_EMPTY: dict[str, Any] = {"items": [], "total": 0, "next": None}
"""What is left of a list that was shown to its end."""


class WorkerPart(NamedTuple):
    """A worker's response."""

    status: int
    headers: dict[str, str]  # By names in lower case.
    body: bytes


class _RefusedError(Exception):
    """A worker has refused its part, as all would: its response answers the request."""

    def __init__(self, part: WorkerPart) -> None:
        super().__init__(part.status)
        self.part = part


class AllWorkers:
    """Answers requests of clients: those that name no task for all processes, and all others by the application."""

    def __init__(self, application: AsgiApp, others: OtherProxies) -> None:
        self._application, self._others = application, others
        self._merges: dict[tuple[str, str], Callable[[Scope], Awaitable[WorkerPart]]] = {
            ("GET", "/metrics"): self._metrics,
            ("GET", "/readyz"): self._ready,
            ("GET", "/api/v1/report"): self._report,
            ("GET", "/api/v1/stats"): self._of_all(merging.merged_stats),
            ("GET", "/api/v1/videos"): self._of_all(merging.added),
            ("POST", "/api/v1/gc"): self._of_all(merging.added),
            ("GET", "/api/v1/timeline"): self._of_all(lambda views: _with_steps(views, "seconds")),
            ("GET", "/api/v1/system/history"): self._of_all(lambda views: _with_steps(views, "steps")),
            ("GET", "/api/v1/system/wrong-answers"): self._of_all(
                lambda views: _whole(merging.merged_wrong_answers(views))
            ),
            ("GET", "/api/v1/system/warnings"): self._of_all(_newest_first),
            ("GET", "/api/v1/system/changes"): self._of_all(_newest_first),
            ("GET", "/api/v1/system/alerts"): self._of_all(_once_each),
            **{("GET", path): self._page for path in _PAGES},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        path = scope.get("path", "")
        merge = self._merges.get((scope.get("method", ""), path))
        is_stream = scope.get("method") == "GET" and path in _STREAMS
        if scope["type"] != "http" or (merge is None and not is_stream) or not self._others.answers(scope):
            await self._application(scope, receive, send)
            return
        try:
            if merge is None:
                await self._stream(scope, receive, send)
                return
            part = await merge(scope)
        except _RefusedError as refused:
            part = refused.part
        except RefusalError as refusal:
            await send_problem(scope, receive, send, problem_of(refusal))
            return
        # Merged, a part has another length than the worker's that it began with.
        kept = end_to_end(part.headers.items(), without=_OF_A_PART)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept]
        await send_response(send, part.status, headers, part.body)

    # -- parts -------------------------------------------------------------------------------------------------------

    async def _begin(self, number: int, scope: Scope) -> ResponsePart:
        """Let a process begin its part; the caller closes it. Raises RefusalError, _RefusedError."""
        part = await ResponsePart.begun(partial(self._others.request, number, scope))
        if part.status < 300:
            return part
        try:
            raise _RefusedError(WorkerPart(part.status, part.headers, await whole(part)))
        finally:
            await part.aclose()

    async def _part(self, number: int, scope: Scope) -> WorkerPart:
        part = await self._begin(number, scope)
        try:
            return WorkerPart(part.status, part.headers, await whole(part))
        finally:
            await part.aclose()

    async def _parts(self, scopes: Mapping[int, Scope]) -> list[WorkerPart]:
        """Return the parts of some workers, in their order. Raises RefusalError, _RefusedError."""
        return await asyncio.gather(*(self._part(number, scope) for number, scope in scopes.items()))

    async def _of_each(self, scope: Scope) -> list[WorkerPart]:
        return await self._parts(dict.fromkeys(await self._others.numbers(scope), scope))

    # -- views -------------------------------------------------------------------------------------------------------

    def _of_all(self, merge: Callable[[list[Any]], Any]) -> Callable[[Scope], Awaitable[WorkerPart]]:
        async def view(scope: Scope) -> WorkerPart:
            return _json(merge([orjson.loads(part.body) for part in await self._of_each(scope)]))

        return view

    async def _report(self, scope: Scope) -> WorkerPart:
        bodies = [part.body for part in await self._of_each({**scope, "raw_path": b"/api/v1/report/part"})]
        # As long as a report of all tasks takes: the seconds of each call are sorted.
        report = await asyncio.to_thread(lambda: report_of([ReportPart.unpacked(body) for body in bodies]))
        return _json(report.model_dump(mode="json"))

    async def _ready(self, scope: Scope) -> WorkerPart:
        return (await self._of_each(scope))[0]

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a response that is joined while the parts are read. Raises WorkerAwayError, _RefusedError."""
        numbers = await self._others.numbers(scope)
        async with AsyncExitStack() as stack:
            begun = await asyncio.gather(*(self._begin(number, scope) for number in numbers), return_exceptions=True)
            parts = [part for part in begun if not isinstance(part, BaseException)]
            for part in parts:
                stack.push_async_callback(part.aclose)
            for each in begun:
                if isinstance(each, BaseException):
                    raise each
            response = StreamingResponse(_STREAMS[scope["path"]](parts), headers=_joined_headers(parts))
            try:
                await response(scope, receive, send)
            except PartCutError as error:
                # Without the end of the response, the server cuts the connection off.
                log.warning("a response of all workers was cut off", path=scope["path"], error=str(error))

    async def _metrics(self, scope: Scope) -> WorkerPart:
        """Return the metrics of the workers that answer, so that one that does not is noticed."""
        numbers = await self._others.numbers(scope)
        answers = await asyncio.gather(*(self._part(number, scope) for number in numbers), return_exceptions=True)
        texts, headers = dict[int, bytes](), dict[str, str]()
        for number, part in zip(numbers, answers, strict=True):
            if isinstance(part, WorkerPart):
                texts[number], headers = part.body, part.headers
            elif not isinstance(part, RefusalError):
                raise part
        return WorkerPart(200, headers, merging.merged_metrics(texts))

    async def _page(self, scope: Scope) -> WorkerPart:
        """Return a page of all workers' lists.

        The cursor of the next page is the cursor of each worker's list. A worker that gave more items than the page
        has of it gets another request, for as many as it has, so that its cursor is the position of the last one shown.
        """
        query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
        numbers = await self._others.numbers(scope)
        cursors = dict(zip(numbers, _cursors(query.pop("cursor", None), len(numbers)), strict=True))
        sort = query.get("sort", _PAGES[scope["path"]])

        def asking(number: int, limit: int | None = None) -> Scope:
            own = {"cursor": cursors[number], "limit": limit}
            asked = urlencode({**query, **{name: value for name, value in own.items() if value}})
            return {**scope, "query_string": asked.encode()}

        # Lists that were shown to their end are requested only for their length.
        unseen = [number for number in numbers if cursors[number] is not None]
        requests = {number: asking(number, None if number in unseen else 1) for number in numbers}
        views = [orjson.loads(part.body) for part in await self._parts(requests)]
        shown = [view if number in unseen else _EMPTY for number, view in zip(numbers, views, strict=True)]
        limit = int(query.get("limit", _USUAL))
        items, counts = merging.merged_page(shown, sort.removeprefix("-"), descending=sort.startswith("-"), limit=limit)
        lists = list(zip(numbers, shown, counts, strict=True))
        cut = {number: asking(number, taken) for number, page, taken in lists if 0 < taken < len(page["items"])}
        places = dict(zip(cut, (orjson.loads(part.body)["next"] for part in await self._parts(cut)), strict=True))
        following = [
            places.get(number, page["next"] if taken or not page["items"] else cursors[number])
            for number, page, taken in lists
        ]
        more = any(cursor is not None for cursor in following)
        total = sum(view["total"] for view in views)
        return _json({"items": items, "total": total, "next": packed_cursor(following) if more else None})


def _joined_headers(parts: Sequence[ResponsePart]) -> dict[str, str]:
    """Return the headers of a joined response: its total is the sum of the parts' totals or lengths."""
    totals = [part.headers.get(TOTAL, part.headers.get("content-length", "")) for part in parts]
    first = dict(end_to_end(parts[0].headers.items()))
    # A backup of one worker may be the file of its store; those of several workers are a bundle.
    kept = {name: value for name, value in first.items() if name not in _UNJOINED}
    kept["content-type"] = BUNDLE_TYPE if "content-disposition" in first else first["content-type"]
    return kept | ({TOTAL: str(sum(map(int, totals)))} if all(map(str.isdecimal, totals)) else {})


def _cursors(cursor: str | None, count: int) -> list[str | None]:
    """Return the cursor of each worker's list: empty for its beginning, None after its end. Raises RefusalError."""
    if cursor is None:
        return [""] * count
    cursors = unpacked_cursor(cursor)
    if not isinstance(cursors, list) or len(cursors) != count or not all(isinstance(c, str | None) for c in cursors):
        raise RefusalError(422, "cursor", "the cursor is not the `next` of a page of this list. Begin without one.")
    return cursors


def _json(value: Any) -> WorkerPart:
    return WorkerPart(200, {"content-type": _JSON}, orjson.dumps(value))


def _whole(items: list[Any]) -> Any:
    return {"items": items, "total": len(items), "next": None}


def _with_steps(views: list[Any], name: str) -> Any:
    return {**views[0], name: merging.merged_steps([view[name] for view in views])}


def _once_each(views: list[Any]) -> Any:
    """Return the alerts of all processes, each since it was first raised."""
    alerts = {item["summary"]: item for item in _newest_first(views)["items"]}
    return _whole(list(alerts.values()))


def _newest_first(views: list[Any]) -> Any:
    items = [item for view in views for item in view["items"]]
    return _whole(sorted(items, key=lambda item: item.get("timestamp", ""), reverse=True))
