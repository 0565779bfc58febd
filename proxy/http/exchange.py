"""One request's way back to its client, in the form that its dialect has for it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

from proxy.dialects.base import Call, Dialect, Eventful, Local, Request, Response
from proxy.http.answer_cache import RawHeaders, Ready
from proxy.http.asgi import Receive, Send
from proxy.http.sse import COMMENT_S, EventStream
from proxy.http.streaming import Passing
from proxy.refusals import Problem
from proxy.step import Answer
from sandboxes.listener import Headers


class Exchange:
    """Knows what a request meant once it is `understood`. extra: headers for its answer, whatever that is."""

    def __init__(self, send: Send, receive: Receive) -> None:
        self.send, self.receive = send, receive
        self.began = time.perf_counter()
        self._dialect: Dialect | None = None
        self._request: Request | None = None
        self._passing: Passing | None = None
        self.events: EventStream | None = None
        self.extra: Headers = ()

    def understood(self, dialect: Dialect, request: Request) -> None:
        """Note who reads this request."""
        self._dialect, self._request = dialect, request

    def listener(self, call: Call) -> Passing | EventStream | None:
        """Return what hears the answer to call while it comes, for its client, if anything does."""
        if call.events:
            self.events = self._eventful()
        if not call.streams:
            return None
        return self.events or self.passing()

    async def until(self, made: "asyncio.Future[Answer]", call: Call) -> Answer:
        """Return the answer when it is made. Meanwhile its client is told that it is not forgotten, where it can be."""
        if self.events is None:
            return await asyncio.shield(made)
        leaving = asyncio.ensure_future(self._left()) if call.hangup else None
        try:
            while not made.done():
                awaited: set[asyncio.Future[Any]] = {made} if leaving is None else {made, leaving}
                await asyncio.wait(awaited, timeout=COMMENT_S, return_when=asyncio.FIRST_COMPLETED)
                if leaving is not None and leaving.done():
                    self.events.cancel()
                    leaving = None
                elif not made.done():
                    await self.events.comment()
            return made.result()
        finally:
            if leaving is not None:
                leaving.cancel()

    async def _left(self) -> None:
        """Return once the client has left. Its request has been read to the end."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def _eventful(self) -> EventStream:
        dialect, request = cast("Eventful", self._dialect), self._request
        assert request is not None
        return EventStream(
            self.send,
            lambda said: dialect.event(said, request),
            self.extra,
            speaks=dialect.takes_events(request),
        )

    def passing(self) -> Passing:
        """Return what passes an answer on while it comes."""
        dialect, request, extra = self._dialect, self._request, self.extra
        assert dialect is not None
        assert request is not None

        def place(told: Response) -> Response:
            placed = dialect.answer(told, request)
            return Response(placed.status, placed.headers + extra, b"")

        self._passing = Passing(self.send, place)
        return self._passing

    async def passed(self) -> bool:
        """Send the end of an answer that its client had while it came; False where there is none.

        Asked before the record is read: what is too large to be held is not read back for nobody.
        """
        if self._passing is None or not self._passing.started:
            return False
        await self._passing.finish()
        return True

    async def answer(self, ready: Ready, told: RawHeaders) -> None:
        """Send a recorded answer; told: headers on how it was come by."""
        assert self._dialect is not None
        assert self._request is not None
        if self.events is not None and self.events.started:
            own = tuple(
                (name.decode("latin-1"), value.decode("latin-1")) for name, value in ready.headers[: ready.told]
            )
            dialect = cast("Eventful", self._dialect)
            await self.events.finish(dialect.last_event(Response(ready.status, own, ready.body), self._request))
            return
        mine = told_by(ready, self._dialect, self._request)
        headers = raw(mine.headers) + ready.headers[ready.told :] + told
        await self._respond(mine.status, headers, mine.body)

    async def stream(
        self,
        headers: Headers,
        content: Callable[[Callable[[bytes], Awaitable[None]]], Awaitable[None]],
    ) -> None:
        """Send what content sends, piece by piece, until it ends or the client leaves."""
        await self.send({"type": "http.response.start", "status": 200, "headers": raw(headers)})

        async def send(data: bytes) -> None:
            await self.send({"type": "http.response.body", "body": data, "more_body": True})

        sending, leaving = asyncio.ensure_future(content(send)), asyncio.ensure_future(self._left())
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
        await asyncio.gather(sending, leaving, return_exceptions=True)
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def local(self, local: Local) -> None:
        """Send an answer of the proxy's own."""
        await self._respond(local.status, raw(local.headers), local.body)

    async def problem(self, problem: Problem) -> None:
        """Tell what went wrong; a client that has half an answer is cut off instead."""
        if self._passing is not None and self._passing.started:
            return
        local = None
        if self._dialect is not None and self._request is not None:
            local = self._dialect.problem(problem, self._request)
        if self.events is not None and self.events.started:
            await self.events.finish(b"event: message\ndata: " + (local.body if local else b"") + b"\n\n")
            return
        local = local or Local(problem.status, problem.body(), ())
        headers = raw(local.headers) or list(problem.headers())
        if problem.status == 413:
            # What is left of the request was not read, so the connection cannot be used again.
            headers.append((b"connection", b"close"))
        await self._respond(local.status, headers, local.body)

    async def _respond(self, status: int, headers: RawHeaders, body: bytes) -> None:
        headers = headers + raw(self.extra)
        if status not in (204, 304) and not any(name == b"content-length" for name, _ in headers):
            headers.append((b"content-length", b"%d" % len(body)))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def raw(headers: Headers) -> RawHeaders:
    """Return headers as they go over the wire."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def told_by(ready: Ready, dialect: Dialect, request: Request) -> Response:
    """Return a recorded answer in the form for who sent request, its length among its headers."""
    own = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in ready.headers[: ready.told])
    told = dialect.answer(Response(ready.status, own, ready.body), request)
    if told.status in (204, 304) or any(name.lower() == "content-length" for name, _ in told.headers):
        return told
    return Response(told.status, (*told.headers, ("content-length", str(len(told.body)))), told.body)
