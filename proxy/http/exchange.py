"""One request's response to its client, in the form that its dialect has for it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple, cast

from proxy.dialects.base import AT_ONCE_BYTES, Call, Dialect, Eventful, Local, Request, Response
from proxy.execution.step_notes import Answer
from proxy.http.answer_cache import PreparedAnswer, RawHeaders, raw
from proxy.http.asgi import Receive, Send
from proxy.http.responses import send_response
from proxy.http.streaming import COMMENT_S, ResponseRelay, ServerEvents
from proxy.refusals import Problem
from proxy.tree.rollout import Rollout
from sandboxes.listener import Headers
from sandboxes.task_owner import start

Given = TypeVarTuple("Given")
Result = TypeVar("Result")

EXPECTED = "forkpoint.expected"
"""Member of a scope with the rollout whose request it is, if the order of its calls already counts the request."""


class Exchange:
    """A request whose response is still to be sent; the order of calls of the rollout `expected` counts it."""

    def __init__(self, send: Send, receive: Receive, expected: Rollout | None = None) -> None:
        self.send, self.receive, self.expected = send, receive, expected
        self.began = time.perf_counter()  # When the request was read, by `time.perf_counter`.
        self._dialect: Dialect | None = None
        self._request: Request | None = None
        self._relay: ResponseRelay | None = None
        self._is_streamed = False
        # The server-sent events of the call, if its client may get or cancel some.
        self.events: ServerEvents | None = None
        self.extra: Headers = ()  # More headers for the response, whatever it is.

    def understood(self, dialect: Dialect, request: Request) -> None:
        """Note the dialect that reads this request."""
        self._dialect, self._request = dialect, request

    def listener(self, call: Call) -> ResponseRelay | ServerEvents | None:
        """Return the listener that passes the response to a call on while it arrives; None for no such listener."""
        if call.events:
            self.events = self._server_events()
        if not call.streams:
            return None
        return self.events or self._response_relay()

    async def until(self, running: "asyncio.Future[Answer]", call: Call) -> Answer:
        """Return the answer of a running call; meanwhile send comments, and watch for a client that hangs up.

        That cancels a call only if its dialect says so (`Call.hangup`); else its record is there for the next one.
        """
        if self._relay is not None:
            # A response that has no end is only read for as long as its client is there.
            watching = start(self._lose_relay(self._relay))
            try:
                return await asyncio.shield(running)
            finally:
                watching.cancel()
        if self.events is None:
            return await asyncio.shield(running)
        hangup = start(self._disconnected()) if call.hangup else None
        try:
            while not running.done():
                awaited: set[asyncio.Future[Any]] = {running} if hangup is None else {running, hangup}
                await asyncio.wait(awaited, timeout=COMMENT_S, return_when=asyncio.FIRST_COMPLETED)
                if hangup is not None and hangup.done():
                    self.events.cancel()
                    hangup = None
                elif not running.done():
                    await self.events.comment()
            return running.result()
        finally:
            if hangup is not None:
                hangup.cancel()

    async def passed(self) -> bool:
        """Send the end of a relayed response, before its record is read; return whether there was one."""
        if self._relay is None or not self._relay.started:
            return False
        await self._relay.finish()
        return True

    async def answer(self, ready: PreparedAnswer, more: RawHeaders) -> None:
        """Send a recorded answer, with headers that say how this request came by it."""
        assert self._dialect is not None
        assert self._request is not None
        if self.events is not None and self.events.started:
            dialect = cast("Eventful", self._dialect)
            size = len(self._request.body) + len(ready.body)
            await self.events.finish(await beside(size, dialect.last_event, _recorded(ready), self._request))
            return
        status, headers, body = ready.status, ready.headers, ready.body
        # Most dialects send a recorded answer as it is.
        if type(self._dialect).answer is not Dialect.answer:
            size = len(self._request.body) + len(body)
            own = await beside(size, client_form, ready, self._dialect, self._request)
            status, headers, body = own.status, raw(own.headers) + headers[ready.own :], own.body
        headers += more + (raw(self.extra) if self.extra else [])
        await send_response(self.send, status, headers, body, sized=self._request.method != "HEAD")

    async def stream(
        self,
        headers: Headers,
        content: Callable[[Callable[[bytes], Awaitable[None]]], Coroutine[Any, Any, None]],
    ) -> None:
        """Send a response with status 200 and no length piece by piece, until it ends or the client disconnects.

        If `content` fails, its error is raised, and the response has no end, so that no client takes it as whole.
        """
        self._is_streamed = True
        await self.send({"type": "http.response.start", "status": 200, "headers": raw(headers)})

        async def send(data: bytes) -> None:
            await self.send({"type": "http.response.body", "body": data, "more_body": True})

        sending, hangup = start(content(send)), start(self._disconnected())
        try:
            await asyncio.wait({sending, hangup}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, hangup):
                task.cancel()
        await asyncio.gather(sending, hangup, return_exceptions=True)
        if not sending.cancelled():
            sending.result()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def local(self, local: Local) -> None:
        """Send a reply of the proxy's own."""
        await self._respond(local.status, raw(local.headers), local.body)

    async def problem(self, problem: Problem) -> None:
        """Report a problem. A client that already has half a response is cut off instead."""
        if self._is_streamed or (self._relay is not None and self._relay.started):
            return
        local = None
        if self._dialect is not None and self._request is not None:
            local = self._dialect.problem(problem, self._request)
        if self.events is not None and self.events.started:
            await self.events.finish(b"event: message\ndata: " + (local.body if local else b"") + b"\n\n")
            return
        local = local or Local(problem.status, problem.body(), ())
        headers = raw(local.headers) + problem.marks if local.headers else problem.headers()
        if problem.status == 413:
            # The rest of the request was not read, so the next request on this connection could not be found.
            headers.append((b"connection", b"close"))
        await self._respond(local.status, headers, local.body)

    def _server_events(self) -> ServerEvents:
        dialect, request = cast("Eventful", self._dialect), self._request
        assert request is not None
        return ServerEvents(
            self.send,
            lambda message: dialect.event(message, request),
            self.extra,
            accepted=dialect.takes_events(request),
        )

    def _response_relay(self) -> ResponseRelay:
        dialect, request, extra = self._dialect, self._request, self.extra
        assert dialect is not None
        assert request is not None

        def head_for_client(head: Response) -> Response:
            own = dialect.answer(head, request)
            return Response(own.status, own.headers + extra, b"")

        self._relay = ResponseRelay(self.send, head_for_client)
        return self._relay

    async def _lose_relay(self, relay: ResponseRelay) -> None:
        await self._disconnected()
        relay.lose()

    async def _disconnected(self) -> None:
        """Return once the client has disconnected. Its request must have been read to the end."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _respond(self, status: int, headers: RawHeaders, body: bytes) -> None:
        await send_response(self.send, status, headers + raw(self.extra), body)


async def beside(size: int, work: Callable[[*Given], Result], *given: *Given) -> Result:
    """Return the result of a function: of one that reads more than `AT_ONCE_BYTES`, beside the event loop."""
    return await asyncio.to_thread(work, *given) if size > AT_ONCE_BYTES else work(*given)


def client_form(ready: PreparedAnswer, dialect: Dialect, request: Request) -> Response:
    """Return a recorded answer in the form of the client that sent a request, with its length in the headers."""
    response = dialect.answer(_recorded(ready), request)
    has_length = any(name.lower() == "content-length" for name, _ in response.headers)
    # Only a response to GET would tell the length of one to HEAD.
    if response.status in (204, 304) or request.method == "HEAD" or has_length:
        return response
    length = ("content-length", str(len(response.body)))
    return Response(response.status, (*response.headers, length), response.body)


def _recorded(ready: PreparedAnswer) -> Response:
    own = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in ready.headers[: ready.own])
    return Response(ready.status, own, ready.body)
