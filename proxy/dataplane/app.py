"""The data plane: a bare ASGI application in front of the control plane.

A request is authorised once, before anything else. Requests of agents (`/t/…`, `/e/…`, `/ng-rollout/…`) then go to
`Dispatch` or `Sockets`; all others go to the application behind. A web framework would cost more than a whole hit
(measured: a framework's route serves half the requests).
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from structlog.contextvars import bind_contextvars

from proxy.compat.endpoints import EndpointContext, Stream, StreamingEndpoint, StreamTransport, make_endpoints
from proxy.dataplane.addressing import Addressing, request_of
from proxy.dataplane.dispatch import Dispatch
from proxy.dataplane.handover import Handover
from proxy.dataplane.hit_path import HitPath
from proxy.dataplane.websockets import Sockets, refuse
from proxy.engine import Engine
from proxy.http.access import ALL, GRANT
from proxy.http.address import Address, address_of
from proxy.http.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send
from proxy.http.exchange import EXPECTED, Exchange
from proxy.http.problems import count_problem, failed_call, problem_of
from proxy.http.sent_labels import take_from_query
from proxy.http.uploads import ClientDisconnectedError
from proxy.refusals import Problem, RefusalError
from proxy.tree.rollout import Rollout
from sandboxes.listener import Listener

_CONTENT_TYPE, _FORM = b"content-type", b"application/x-www-form-urlencoded"
_AGENTS_PATHS = ("/t/", "/e/", "/ng-rollout/")

_STOPPED = Problem(
    500, "stopped", "Proxy stopped",
    "The proxy was stopped before the call had an answer. The call may have run: look at the rollout's steps, and then "
    "continue the rollout or begin another.",
)  # fmt: skip
"""No failure of the infrastructure, after which clients send a call again: the call may take its step all the same."""


class OtherProxies(Protocol):
    """The processes that answer some requests together: the members of a cluster, or the workers of a proxy."""

    def answers(self, scope: Scope) -> bool:
        """Return whether they answer a request that names no task. One that asks a process for its part is its own."""
        ...

    async def numbers(self, scope: Scope) -> list[int]:
        """Return the processes that have a part of the response, this one too.

        Raises RefusalError: 401 or 403 if the request is not authorised, 503 if they are not known.
        """
        ...

    async def request(self, number: int, scope: Scope, listener: Listener) -> None:
        """Let a process answer a request without a body, and pass its response to the listener.

        Raises RefusalError (503) if it does not answer, or not to the end.
        """
        ...


class LoggedAnswers(Protocol):
    """Known calls whose answers wait for a log."""

    def of(self, state: Mapping[str, Any]) -> Callable[[Scope, bytes], bytes | None]:
        """Return what finds the response to a known call on a connection with a state; `log` follows, without an await.

        It returns None for any other request.
        """
        ...

    def log(self, logged: Callable[[bool], None]) -> object:
        """Write the step of the call that was found to the log; return what its request is `expected` as.

        `logged` is called in a later turn of the event loop. If it gets False, the answer must not be sent. The request
        is then served, or was `handled`.
        """
        ...


class DataPlane:
    """Answers agents' requests, and passes all others on to the application behind.

    In a cluster, `others` joins the members' parts, `tunnels` takes the connections that become streams, and `hits`
    answers known calls.
    """

    others: OtherProxies | None = None
    tunnels: Handover | None = None
    hits: LoggedAnswers | None = None

    def __init__(self, engine: Engine, behind: AsgiApp) -> None:
        self.engine, self._behind = engine, behind
        self._addressing, self._count = (
            Addressing(lambda: engine.names, engine.store.rollouts),
            partial(count_problem, engine.counts),
        )
        context = EndpointContext(
            engine.tasks, engine.step, engine.store, engine.journal, engine.answers, engine.executor, engine.restorer,
            engine.audit, engine.drivers, engine.settings, engine.lifecycle, engine.gate, engine.pin,
            self._addressing.address, request_of, self._count,
        )  # fmt: skip
        endpoints = self.endpoints = make_endpoints(context)
        # At most one answers on the hit path and takes connections over: Docker's.
        self.streaming = next((each for each in endpoints.values() if isinstance(each, StreamingEndpoint)), None)
        self.hit_path = partial(HitPath, context, self._addressing, engine.counts, endpoints)
        self._hit_path = self.hit_path()
        self._dispatch = Dispatch(engine, self._addressing, endpoints)
        self._sockets = Sockets(
            engine.tasks, engine.step, engine.answers, engine.access, engine.counts, engine.settings.max_requests
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        # The server's start and stop (`lifespan`) are no requests: they carry no headers to authorise.
        if scope["type"] == "lifespan":
            await self._behind(scope, receive, self._without_traceback(send))
            return
        agents = scope["path"].startswith(_AGENTS_PATHS)
        refusal = self._authorise(scope)
        if name := scope.get(GRANT, ALL).name:
            bind_contextvars(token=name)
        if refusal is None and not agents:
            await self._behind(_as_json(scope), receive, send)
        # A refused WebSocket of the control plane ends here too, so the application behind never sees it.
        elif scope["type"] == "websocket":
            await self._converse(scope, receive, send, refusal)
        elif refusal is not None:
            await self._refuse_request(scope, receive, send, refusal)
        else:
            exchange = Exchange(send, receive, scope.get(EXPECTED))
            try:
                await self._dispatch.serve(scope, receive, exchange)
            except ClientDisconnectedError:
                # No response can be sent any more, and it is no error: clients may close at any time.
                pass
            except asyncio.CancelledError:
                if not self.engine.lifecycle.closing.is_set():
                    raise
                # The server has given up waiting for this request (`server.GRACE_S`).
                await exchange.problem(_STOPPED)
            except Exception as error:  # noqa: BLE001 - every error of a request becomes its response
                await self._report(scope, error, exchange)

    def known(self, scope: Scope, body: bytes | bytearray) -> bytes | None:
        """Return the whole HTTP response to a call that the tree knows, and take its step; None otherwise."""
        # The grant is in the scope from here on: the look-ups below may rely on it, as the regular path does.
        if self._authorise(scope) is not None:
            return None
        streaming = self.streaming
        # Docker's endpoint reads its own paths. The cheap test of one path segment comes first, because every hit
        # passes here.
        if streaming is not None and streaming.path_part in scope["raw_path"] and streaming.owns(scope):
            return streaming.known(scope, body)
        return self._hit_path.known(scope, body)

    def expect(self, scope: Scope) -> object | None:
        """Note a request that the hit path does not answer; see `HitPath.expect`. The result is for `handled`."""
        return self._hit_path.expect(scope) if self._authorise(scope) is None else None

    def handled(self, expected: object) -> None:
        """Note that a request which `expect` noted has been handled."""
        assert isinstance(expected, Rollout)
        self.engine.step.order.expected(expected)

    def serve_peers(self, make: Callable[..., asyncio.Protocol]) -> None:
        """Serve connections of other members of a cluster; `make` makes their protocols, given members of the state."""

    def may_stream(self, scope: Scope) -> bool:
        """Return whether an authorised request may take its connection over as a stream."""
        streaming = self.streaming
        return streaming is not None and streaming.may_stream(scope) and self._authorise(scope) is None

    def takes_connection(self, scope: Scope, body: bytes) -> bool:
        """Return whether a whole request becomes a stream; `may_stream` has agreed."""
        return self.streaming is not None and self.streaming.takes_connection(scope, body)

    def open_stream(
        self, scope: Scope, body: bytes, transport: StreamTransport, *, upgrade: bool, rest: bytes
    ) -> tuple[Stream, Coroutine[Any, Any, None] | None]:
        """Take a connection over; see `StreamingEndpoint.open_stream`. `takes_connection` has agreed."""
        assert self.streaming is not None
        return self.streaming.open_stream(scope, body, transport, upgrade=upgrade, rest=rest)

    def _without_traceback(self, send: Send) -> Send:
        """Return a `send` that leaves out the traceback of a start that failed for a foreseen reason."""

        async def shortened(message: AsgiMessage) -> None:
            if message["type"] == "lifespan.startup.failed" and self.engine.lifecycle.start_error:
                message = {"type": message["type"], "message": ""}
            await send(message)

        return shortened

    def _authorise(self, scope: Scope) -> RefusalError | None:
        """Note in the scope what a request may see, and its labels; return why it may see nothing. Idempotent."""
        # `may_stream` and `known` may get the same scope, so the second of them finds the grant of the first.
        if GRANT in scope:
            return None
        take_from_query(scope)
        try:
            scope[GRANT] = self.engine.access.admit(scope, self.engine.store.rollouts.by_token)
        except RefusalError as refusal:
            return refusal
        return None

    async def _refuse_request(self, scope: Scope, receive: Receive, send: Send, refusal: RefusalError) -> None:
        await self._dispatch.refuse(scope, _address_of(scope), refusal, Exchange(send, receive))

    async def _converse(self, scope: Scope, receive: Receive, send: Send, refusal: RefusalError | None) -> None:
        # WebSocket scopes of ASGI have no method, but the check for foreign pages reads one. A handshake is a GET
        # (RFC 6455, 4.1).
        scope = {**scope, "method": "GET"}
        try:
            if refusal is not None:
                raise refusal
            address = self._addressing.address(scope)
        except RefusalError as error:
            # ASGI delivers `websocket.connect` first, and a server accepts no response before it was received.
            await receive()
            problem = problem_of(error)
            self._count(problem)
            await refuse(problem, send)
            return
        await self._sockets.serve(address, request_of(scope, address, b""), scope, receive, send)

    async def _report(self, scope: Scope, error: Exception, exchange: Exchange) -> None:
        await exchange.problem(failed_call(scope, error, self._count))


def _address_of(scope: Scope) -> Address:
    """Return a request's address; one without an endpoint for the control plane and for a malformed path."""
    if scope["path"].startswith(("/t/", "/e/")):
        # This address only chooses the form of a refusal, so its own errors do not matter.
        with suppress(RefusalError):
            return address_of(scope["raw_path"], scope["headers"])
    return Address("", "", "", "")


def _as_json(scope: Scope) -> Scope:
    """Return a request of the control plane whose body counts as JSON: `curl -d` says that every body is a form.

    No route takes forms, and a page of another site that sends one is refused by its Origin before this.
    """
    if scope["type"] != "http" or scope["method"] in {"GET", "HEAD"}:
        return scope
    if [value for name, value in scope["headers"] if name == _CONTENT_TYPE] not in ([], [_FORM]):
        return scope
    others = [header for header in scope["headers"] if header[0] != _CONTENT_TYPE]
    return {**scope, "headers": [*others, (_CONTENT_TYPE, b"application/json")]}
