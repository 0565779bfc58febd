"""The data plane of a member: a request goes to the owner of its task, wherever that is.

A request of a task that this member owns takes the ordinary way. Any other one is passed on over a link, and passed on
again if the task has changed hands meanwhile. Requests that name no task are answered here.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from hashlib import sha256
from typing import Any

import orjson
from typing_extensions import override

from proxy.cluster.forwarding import Forwarder, Relay
from proxy.cluster.gate import ORIGIN, Origin
from proxy.cluster.ingress import TaskIngress, WaitingCall
from proxy.cluster.link.greeting import Hello
from proxy.cluster.link.listener import PeerListener
from proxy.cluster.link.passing import ASK, PEER, TUNNEL, VIEW, Passed, Tunnelled
from proxy.cluster.member import Member
from proxy.cluster.named_task import NamedTask, named_task
from proxy.cluster.operations import PATHS, Operations
from proxy.cluster.others import OtherMembers
from proxy.cluster.owned import Owned
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import Ownership
from proxy.cluster.tunnels import Tunnels
from proxy.compat.endpoints import Stream, StreamTransport
from proxy.dataplane.app import DataPlane
from proxy.engine import Engine
from proxy.http.access import ALL, GRANT
from proxy.http.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send
from proxy.http.browser_guard import refuse_foreign
from proxy.http.responses import send_response
from proxy.refusals import RefusalError

_UPLOADS = re.compile(r"/api/v1/tasks/[^/]+/import")
"""Requests whose bodies are too large to be held until an owner is found."""


class ClusterPlane(DataPlane):
    """Answers agents' requests, or lets the owners of their tasks answer them."""

    tunnels: Tunnels

    def __init__(self, engine: Engine, behind: AsgiApp, member: Member, secret: bytes) -> None:
        super().__init__(engine, behind)
        self._member = member
        self._forwarder = Forwarder(member)
        self._operations = Operations(member, engine.executor.quotas)
        self.listener = PeerListener(secret, member.database.membership)  # Accepts the connections of peers.
        self.others = OtherMembers(member, self._authorise)
        self._is_leaving = False
        engine.lifecycle.at_hang_up.append(self._leave)
        self.tunnels = Tunnels(
            member, self._forwarder, lambda scope: named_task(scope, engine.access, self._addressing)
        )
        self.tunnels.most = engine.settings.max_connections

    def _leave(self) -> None:
        self._is_leaving = True

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await super().__call__(scope, receive, send)
            return
        if scope["type"] == "http" and PATHS.fullmatch(scope["path"]):
            await self._operate(scope, receive, send)
            return
        peer, is_http = _peer_of(scope), scope["type"] == "http"
        if peer is not None and is_http:
            await self._answer_peer(peer, scope, receive, send)
            return
        if not is_http:
            await self._converse_here(peer, scope, receive, send)
            return
        try:
            task = named_task(scope, self.engine.access, self._addressing)
            if task is None:
                await super().__call__(scope, receive, send)
            elif _UPLOADS.fullmatch(scope["path"]):
                await self._answer(task, scope, PassedUpload(receive), receive, send)
            else:
                body = await self._body(receive)
                if body is not None:
                    await self._answer(task, scope, body, receive, send)
        except RefusalError as refusal:
            await self._refuse_request(scope, receive, send, refusal)

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the body of a request; None if its client has hung up. Raises RefusalError: 413, it is too large."""
        parts, size = list[bytes](), 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.engine.settings.max_body_bytes:
                raise RefusalError(413, "body", "the body is larger than max_body_bytes. Send less, or raise it.")
            if not message.get("more_body"):
                return b"".join(parts)

    # -- answers -----------------------------------------------------------------------------------------------------

    async def _answer(
        self, named: NamedTask, scope: Scope, body: "bytes | PassedUpload", receive: Receive, send: Send
    ) -> None:
        task = self._member.ingress.task(named.name)
        is_upload = isinstance(body, PassedUpload)
        digest = b"" if isinstance(body, PassedUpload) else _digest(scope, body)
        watched = None if is_upload else receive
        with self._member.ingress.calling(task, watched, named.rollout, digest) as call:

            async def here(owned: Owned) -> bool:
                incoming = body.receive() if isinstance(body, PassedUpload) else _replaying(body, receive)
                return await self._answer_here(owned, self._origin(task, call), scope, incoming, send)

            async def away(owner: Ownership) -> bool:
                sent = body.pieces() if isinstance(body, PassedUpload) else body
                return await self._forwarder.pass_on(owner, task, call, scope, sent, receive, Relay(send))

            if not await self._forwarder.route(task, call, here, away, creates=named.creates):
                # A task that does not exist has no owner.
                incoming = body.receive() if isinstance(body, PassedUpload) else _replaying(body, receive)
                await super().__call__(scope, incoming, send)

    async def _answer_peer(self, peer: Hello, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that a peer has passed on, or has made itself; it is not passed on again."""
        passed = Passed.taken_from(scope)
        if self._is_leaving:
            # The server waits for its connections.
            send = _closing(send)
        if passed is None and scope["path"] == ASK:
            answer = await self._member.answer(await self._body(receive) or b"")
            await send_response(send, 200, [], answer)
            return
        if passed is None:
            await super().__call__(scope, receive, send)
            return
        scope["scheme"] = passed.scheme
        owned = self._owned(passed)
        if owned is None:
            await _send_elsewhere(send, await self._view_of(passed.task, passed.view))
            return
        origin = self._passed_origin(owned, peer, passed)
        try:
            is_answered = await self._answer_here(owned, origin, scope, receive, send)
        finally:
            origin.is_over = True
        if not is_answered:
            await _send_elsewhere(send, 0)

    def _owned(self, passed: Passed) -> Owned | None:
        """Return the task of a request that a peer has passed on; None if this member does not own it in that view."""
        owned = self._member.gate.owned.get(passed.task)
        return None if owned is None or owned.view != passed.view else owned

    def _passed_origin(self, owned: Owned, peer: Hello, passed: Passed) -> Origin:
        owned.floors.note(peer.member, peer.boot, passed.oldest)
        return Origin(
            peer.member, peer.boot, passed.number, passed.oldest, passed.is_again,
            lambda: not owned.floors.is_late(peer.member, peer.boot, passed.number),
            lambda: self._member.confirm(peer.member, peer.boot, passed.number),
        )  # fmt: skip

    async def _view_of(self, task: str, view: int) -> int:
        """Return the view that holds, for a peer that knows another one; 0 if that is not known."""
        # A newer view than the one that is owned here ends it.
        self._member.adopt(task, view)
        try:
            owner = await self._member.locate(task, creates=False)
        except DatabaseError:
            return 0
        return 0 if owner is None else owner.view

    @override
    def serve_peers(self, make: Callable[..., asyncio.Protocol]) -> None:
        """Answer requests that peers pass on; `make` makes the protocol of a connection, given its state."""
        self.tunnels.make_peer = make
        self.listener.make_http = lambda hello: make(
            **({TUNNEL: Tunnelled(hello)} if hello.is_tunnel else {PEER: hello})
        )

    def _origin(self, task: TaskIngress, call: WaitingCall) -> Origin:
        """Return what the code that answers an own agent's call works for."""
        membership = self._member.database.membership
        return Origin(
            membership.number, membership.boot, call.number, task.oldest, call.is_again, lambda: True, call.waits
        )

    async def _answer_here(self, owned: Owned, origin: Origin, scope: Scope, receive: Receive, send: Send) -> bool:
        ORIGIN.set(origin)
        is_over = is_stream = False

        async def sending(message: AsgiMessage) -> None:
            nonlocal is_over, is_stream
            if message["type"] == "http.response.start":
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
        with owned.ending(lambda: is_stream):
            # The server closes the connection of a response that has no end.
            await super().__call__(own, receive, sending)
        return not is_over

    # -- streams: `tunnels` has brought them to their owner ----------------------------------------------------------

    async def _converse_here(self, peer: Hello | None, scope: Scope, receive: Receive, send: Send) -> None:
        passed = None if peer is None else Passed.taken_from(scope)
        if peer is None or passed is None:
            await super().__call__(scope, receive, send)
            return
        owned = self._owned(passed)
        if owned is None:
            view = await self._view_of(passed.task, passed.view)
            await receive()
            headers = [(VIEW.encode(), b"%d" % view)]
            await send({"type": "websocket.http.response.start", "status": 421, "headers": headers})
            await send({"type": "websocket.http.response.body", "body": b""})
            return

        async def sending(event: AsgiMessage) -> None:
            await owned.settled()
            await send(event)

        origin = self._begin_stream(owned, peer, passed)
        ORIGIN.set(origin)
        try:
            with owned.ending():
                await super().__call__(scope, receive, sending)
        finally:
            origin.is_over = True

    def _begin_stream(self, owned: Owned, peer: Hello, passed: Passed) -> Origin:
        origin = self._passed_origin(owned, peer, passed)
        # From here on its ingress may wait for younger calls only.
        origin.is_current = lambda: True
        return origin

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
        origin, context = self._begin_stream(owned, peer, passed), copy_context()
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
        """Return None: the log has each step before its answer is sent, which takes an await."""

    @override
    def expect(self, scope: Scope) -> None:
        """Note nothing: no known answer could overtake the request."""

    @override
    def may_stream(self, scope: Scope) -> bool:
        """Return whether a request may take its connection over; its owner authorises it (`takes_connection`)."""
        return self.streaming is not None and self.streaming.may_stream(scope)

    async def _operate(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            refuse_foreign(scope["method"], scope["headers"], tool=False, names=self.engine.names)
            refusal = self._authorise(scope)
            if refusal is not None:
                raise refusal
            scope.get(GRANT, ALL).require_whole()
            query = scope["query_string"].decode("latin-1")
            value = await self._operations.answer(scope["method"], scope["path"], query)
        except (RefusalError, DatabaseError) as error:
            refusal = error if isinstance(error, RefusalError) else RefusalError(503, "database", str(error))
            await self._refuse_request(scope, receive, send, refusal)
            return
        await send_response(send, 200, [(b"content-type", b"application/json")], orjson.dumps(value))


class PassedUpload:
    """The body of a request that is passed on as it comes, once."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._is_begun = receive, False

    def receive(self) -> Receive:
        """Return what yields the events of the body. Raises RefusalError: 503, a part of it was read before."""
        if self._is_begun:
            raise RefusalError(503, "upload", "the owner of the task has changed during the upload. Send it again.")
        return self._first

    async def _first(self) -> AsgiMessage:
        self._is_begun = True
        return await self._receive()

    def pieces(self) -> AsyncIterator[bytes]:
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


async def _send_elsewhere(send: Send, view: int) -> None:
    await send_response(send, 421, [(VIEW.encode(), b"%d" % view)], b"")


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns a body first, and then what comes after it."""
    is_sent = False

    async def replaying() -> AsgiMessage:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replaying


def _digest(scope: Scope, body: bytes) -> bytes:
    return sha256(b"\0".join((scope["method"].encode(), scope["raw_path"], scope["query_string"], body))).digest()
