"""The data plane of a member: a request goes to the owner of its task, wherever that is.

A request of a task that this member owns takes the ordinary way. Any other one is passed on over a link, and passed on
again if the task has changed hands meanwhile. Requests that name no task are answered here.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import orjson
from typing_extensions import override

from proxy.cluster.forwarding import Forwarder, Relay
from proxy.cluster.gate import ORIGIN, Origin
from proxy.cluster.hits import OwnHits
from proxy.cluster.ingress import WaitingCall
from proxy.cluster.link.greeting import Hello
from proxy.cluster.link.listener import PeerListener
from proxy.cluster.link.passing import ASK, ELSEWHERE, PEER, TUNNEL, Passed, Tunnelled
from proxy.cluster.member import Member
from proxy.cluster.named_task import NamedTask, named_task
from proxy.cluster.operations import PATHS, Operations
from proxy.cluster.others import OtherMembers
from proxy.cluster.owned import Owned
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import Ownership
from proxy.cluster.tunnels import Tunnels
from proxy.compat.endpoints import NamingEndpoint, Stream, StreamTransport
from proxy.dataplane.app import DataPlane
from proxy.engine import Engine
from proxy.http.access import ALL, GRANT
from proxy.http.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send
from proxy.http.browser_guard import refuse_foreign
from proxy.http.exchange import EXPECTED, beside
from proxy.http.responses import send_response
from proxy.http.uploads import ClientDisconnectedError, uploading
from proxy.refusals import RefusalError

_UPLOADS = re.compile(r"/api/v1/tasks/[^/]+/import")
"""Requests whose bodies are too large to be held until an owner is found."""


class ClusterPlane(DataPlane):
    """Answers agents' requests, or lets the owners of their tasks answer them."""

    tunnels: Tunnels
    hits: OwnHits

    def __init__(self, engine: Engine, behind: AsgiApp, member: Member, secret: bytes) -> None:
        super().__init__(engine, behind)
        self._member = member
        self._forwarder = Forwarder(member)
        self.hits = OwnHits(member, engine, self._authorise, self.hit_path)
        self._operations = Operations(member, engine.executor.quotas)
        self.listener = PeerListener(secret, member.database.membership)  # Accepts the connections of peers.
        self.others = OtherMembers(member, self._authorise)
        self.tunnels = Tunnels(
            member, self._forwarder, lambda scope: named_task(scope, engine.access, self._addressing)
        )
        self.tunnels.most = engine.settings.max_connections

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await super().__call__(scope, receive, send)
            return
        peer = _peer_of(scope)
        if peer is not None:
            await self._answer_peer(peer, scope, receive, send)
            return
        if scope["type"] == "websocket":
            await super().__call__(scope, receive, send)
            return
        try:
            if PATHS.fullmatch(scope["path"]):
                await self._operate(scope, send)
                return
            task = named_task(scope, self.engine.access, self._addressing)
            if task is None:
                await super().__call__(scope, receive, send)
            elif _UPLOADS.fullmatch(scope["path"]):
                await self._answer(task, scope, PassedUpload(receive), receive, send)
            else:
                body = await self._body(receive)
                await self._answer(await self._named(task, scope, body), scope, HeldBody(body, receive), receive, send)
        except ClientDisconnectedError:
            # Its call has not begun.
            pass
        except (RefusalError, DatabaseError) as error:
            refusal = error if isinstance(error, RefusalError) else RefusalError(503, "database", str(error))
            await self._refuse_request(scope, receive, send, refusal)

    async def _named(self, task: NamedTask, scope: Scope, body: bytes) -> NamedTask:
        """Return the task of an agent's request that may name another one than its URL. Raises RefusalError."""
        endpoint = self.endpoints.get(task.endpoint)
        if not isinstance(endpoint, NamingEndpoint):
            return task
        name, creates = await beside(len(body), endpoint.task_of, scope, self._addressing.address(scope), body)
        return replace(task, name=name, creates=creates and task.creates)

    async def _body(self, receive: Receive) -> bytes:
        """Return the body of a request. Raises ClientDisconnectedError, RefusalError (413)."""
        settings = self.engine.settings
        with uploading(settings.data, max_bytes=settings.max_body_bytes, spools=False) as upload:
            return await upload.receive(receive, await receive())

    # -- answers -----------------------------------------------------------------------------------------------------

    async def _answer(
        self, named: NamedTask, scope: Scope, body: "HeldBody | PassedUpload", receive: Receive, send: Send
    ) -> None:
        member, task, begun = self._member, self._member.ingress.task(named.name), scope.get(EXPECTED)
        with member.ingress.calling(task, body.watched, named.rollout, body.digest(scope), begun) as call:

            async def here(owned: Owned) -> bool:
                origin = self._origin(owned, member.hello, task.passed(call, owned.view, scope), may_be_late=False)
                return await self._answer_here(owned, origin, scope, body.receive(), send)

            async def away(owner: Ownership) -> bool:
                return await self._forwarder.pass_on(owner, task, call, scope, body.sent(), receive, Relay(send))

            if not await self._forwarder.route(task, call, here, away, creates=named.creates):
                # A task that does not exist has no owner.
                await super().__call__(scope, body.receive(), send)

    async def _answer_peer(self, peer: Hello, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that a peer has passed on, or has made itself; it is not passed on again."""
        passed, is_socket = Passed.taken_from(scope), scope["type"] == "websocket"
        if self.engine.lifecycle.closing.is_set():
            # The server waits for its connections.
            send = _closing(send)
        if passed is None and scope["path"] == ASK:
            answer = await self._member.answer(await self._body(receive))
            await send_response(send, 200, [], answer)
            return
        if passed is None:
            await super().__call__(scope, receive, send)
            return
        owned = self._owned(passed)
        if owned is None:
            # A later view ends the one that is owned here. What was dropped here is owned here again.
            self._member.supersede(passed.task, passed.view)
            with suppress(DatabaseError):
                await self._member.locate(passed.task, creates=False)
        else:
            origin = self._origin(owned, peer, passed, may_be_late=not is_socket)
            if await self._answer_here(owned, origin, scope, receive, send):
                return
        await _send_elsewhere(scope, receive, send)

    def _owned(self, passed: Passed) -> Owned | None:
        """Return the task of a request that a peer has passed on; None if this member does not own it in that view."""
        owned = self._member.gate.owned.get(passed.task)
        return None if owned is None or owned.view != passed.view else owned

    def _origin(self, owned: Owned, ingress: Hello, passed: Passed, *, may_be_late: bool) -> Origin:
        """Return what the code that answers a call works for. The ingress of a stream may wait for younger calls."""
        owned.floors.note(ingress.member, ingress.boot, passed.oldest)
        call = ingress.member, ingress.boot, passed.number
        return Origin(
            *call, passed.oldest, passed.is_again, lambda: not (may_be_late and owned.floors.is_late(*call)),
            lambda: self._member.confirm(*call),
        )  # fmt: skip

    @override
    def serve_peers(self, make: Callable[..., asyncio.Protocol]) -> None:
        """Answer requests that peers pass on; `make` makes the protocol of a connection, given its state."""
        self.tunnels.make_peer = make
        self.listener.make_http = lambda hello: make(
            **({TUNNEL: Tunnelled(hello)} if hello.is_tunnel else {PEER: hello})
        )

    async def _answer_here(self, owned: Owned, origin: Origin, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer a request; return False if the task was dropped before anything was sent."""
        ORIGIN.set(origin)
        is_over, is_socket = False, scope["type"] == "websocket"
        is_stream = is_socket

        async def sending(message: AsgiMessage) -> None:
            nonlocal is_over, is_stream
            if is_socket or message["type"] == "http.response.start":
                # A failure shows in `is_dropped`.
                with suppress(RefusalError):
                    await owned.settled()
                is_over = owned.is_dropped
            else:
                # It may never end by itself, but it ends with the task.
                is_stream = bool(message.get("more_body"))
                if is_stream:
                    origin.is_current = lambda: True
            if not is_over:
                await send(message)

        # A copy: it is given to the application again if the task is dropped meanwhile.
        own: Scope = {**scope, "headers": list(scope["headers"])}
        try:
            with owned.ending(lambda: is_stream):
                # The server closes the connection of a response that has no end.
                await super().__call__(own, receive, sending)
        finally:
            origin.is_over = True
        return is_socket or not is_over

    # -- streams: `tunnels` has brought them to their owner ----------------------------------------------------------

    @override
    def takes_connection(self, scope: Scope, body: bytes) -> bool:
        """Take a tunnel only at the owner of its task; other requests of a peer are answered as calls."""
        if not super().takes_connection(scope, body) or PEER in scope["state"]:
            return False
        if TUNNEL not in scope["state"]:
            return True
        passed = Passed.of(scope)
        return passed is not None and self._owned(passed) is not None and self._authorise(scope) is None

    @override
    def open_stream(
        self, scope: Scope, body: bytes, transport: StreamTransport, *, upgrade: bool, rest: bytes
    ) -> tuple[Stream, Coroutine[Any, Any, None] | None]:
        """Take a connection of an owned task over."""
        peer, passed = _peer_of(scope), Passed.taken_from(scope)
        owned = None if passed is None else self._owned(passed)
        assert peer is not None
        assert passed is not None
        assert owned is not None
        origin, context = self._origin(owned, peer, passed, may_be_late=False), copy_context()
        context.run(ORIGIN.set, origin)
        opened = super().open_stream
        stream, answering = context.run(opened, scope, body, transport, upgrade=upgrade, rest=rest)

        async def answer(rest: Coroutine[Any, Any, None]) -> None:
            ORIGIN.set(origin)
            with owned.cutting(transport.abort):
                await rest

        return stream, None if answering is None else answer(answering)

    @override
    def known(self, scope: Scope, body: bytes | bytearray) -> None:
        """Return None: the log has each step before its answer is sent (`hits`)."""

    @override
    def handled(self, expected: object) -> None:
        """Note that a request is over, which may be a call that `hits` has begun."""
        if isinstance(expected, WaitingCall):
            self._member.ingress.end(expected)
        else:
            super().handled(expected)

    @override
    def may_stream(self, scope: Scope) -> bool:
        """Return whether a request may take its connection over; its owner authorises it (`takes_connection`)."""
        return self.streaming is not None and self.streaming.may_stream(scope)

    async def _operate(self, scope: Scope, send: Send) -> None:
        """Answer a request about the cluster. Raises RefusalError, DatabaseError."""
        refuse_foreign(scope["method"], scope["headers"], tool=False, names=self.engine.names)
        refusal = self._authorise(scope)
        if refusal is not None:
            raise refusal
        scope.get(GRANT, ALL).require_whole()
        query = scope["query_string"].decode("latin-1")
        value = await self._operations.answer(scope["method"], scope["path"], query)
        await send_response(send, 200, [(b"content-type", b"application/json")], orjson.dumps(value))


@dataclass(frozen=True, slots=True)
class HeldBody:
    """The body of a request that any number of owners may get."""

    data: bytes
    watched: Receive  # The events of the connection behind it.

    def digest(self, scope: Scope) -> bytes:
        """Return what is the same for the same request."""
        parts = (scope["method"].encode(), scope["raw_path"], scope["query_string"], self.data)
        return sha256(b"\0".join(parts)).digest()

    def receive(self) -> Receive:
        """Return what yields the body first, and then what comes after it."""
        events: list[AsgiMessage] = [{"type": "http.request", "body": self.data, "more_body": False}]

        async def replaying() -> AsgiMessage:
            return events.pop() if events else await self.watched()

        return replaying

    def sent(self) -> bytes:
        """Return what is sent to another member."""
        return self.data


class PassedUpload:
    """The body of a request that is passed on as it comes, once."""

    watched = None  # Events behind it come only after all of it.

    def __init__(self, receive: Receive) -> None:
        self._receive, self._is_begun = receive, False

    def digest(self, scope: Scope) -> bytes:  # noqa: ARG002 - see `HeldBody`
        """Return nothing: no request is known to be the same."""
        return b""

    def receive(self) -> Receive:
        """Return what yields the events of the body. Raises RefusalError: 503, a part of it was read before."""
        if self._is_begun:
            raise RefusalError(503, "upload", "the owner of the task has changed during the upload. Send it again.")
        return self._first

    async def _first(self) -> AsgiMessage:
        self._is_begun = True
        return await self._receive()

    def sent(self) -> AsyncIterator[bytes]:
        """Return what yields the body, to its end. Raises RefusalError: see `receive`."""
        return self._pieces(self.receive())

    async def _pieces(self, receive: Receive) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionAbortedError("the client has hung up")
            more = bool(message.get("more_body"))
            yield message.get("body", b"")


def _peer_of(scope: Scope) -> Hello | None:
    state = scope.get("state", {})
    tunnel: Tunnelled | None = state.get(TUNNEL)
    peer: Hello | None = state.get(PEER)
    return peer if tunnel is None else tunnel.take()


def _closing(send: Send) -> Send:
    """Return a `send` that ends the connection with the response."""

    async def sending(message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return sending


async def _send_elsewhere(scope: Scope, receive: Receive, send: Send) -> None:
    kind, headers = "http.response", [(ELSEWHERE.encode(), b"0"), (b"content-length", b"0")]
    if scope["type"] == "websocket":
        kind = "websocket.http.response"
        # No response is accepted before `websocket.connect` was received.
        await receive()
    await send({"type": f"{kind}.start", "status": 421, "headers": headers})
    await send({"type": f"{kind}.body", "body": b""})
