"""The data plane of a member: a request goes to the owner of its task, wherever that is.

A request of a task that this member owns takes the ordinary way. Any other one is passed on over a link, and passed on
again if the task has changed hands meanwhile. Requests that name no task are answered here.
"""

import asyncio
import re
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import orjson
import structlog
from typing_extensions import override

from proxy.cluster.answering import PeerQuestions
from proxy.cluster.database import DatabaseError, Ownership
from proxy.cluster.ingress import TaskIngress, WaitingCall
from proxy.cluster.links import LinkLostError, PeerFailedError
from proxy.cluster.member import Member
from proxy.cluster.messages import CallAnswer, CallQuestion, DrainAnswer, DrainQuestion, MessageError
from proxy.cluster.origin import ORIGIN, Origin
from proxy.cluster.owned import Owned
from proxy.dataplane.app import DataPlane
from proxy.engine import Engine
from proxy.http.access import ALL, GRANT
from proxy.http.asgi import AsgiApp, AsgiMessage, Receive, Scope, Send
from proxy.http.browser_guard import refuse_foreign
from proxy.http.problems import problem_of
from proxy.refusals import RefusalError

log = structlog.get_logger()

PATIENCE_S = 8.0
"""How long a request waits for an owner that can answer, in seconds, before it gets 503. A takeover takes a lease, 3 s.
A call that an owner works on has no such limit."""
PAUSE_S = 0.1
"""Between two attempts to find an owner, in seconds."""
_WAY = re.compile(r"/api/v1/tasks/([^/]+)(/.*)?")
_CLUSTER = re.compile(r"/api/v1/cluster(?:/([^/]+)/drain)?")
"""The cluster itself: its members, and the drain of one."""
_CHANGES = re.compile(r"(?:/rollouts(?:/[^/]+(?:/fork)?)?)?")
"""Paths below a task that may be changed in a cluster: the task, its rollouts, and forks of them."""
_APIS = frozenset({"docker", "e2b"})
"""Endpoints that keep notes of their own on one machine, which do not travel."""


class ClusterPlane(DataPlane):
    """Answers agents' requests, or lets the owners of their tasks answer them.

    Attributes:
        questions: Answers the questions of peers.
    """

    def __init__(self, engine: Engine, behind: AsgiApp, member: Member, secret: bytes) -> None:
        super().__init__(engine, behind)
        self._member = member
        self.questions = PeerQuestions(member, secret, self._known_to_peer, self._answer_peer)
        # Connections that become streams cannot be passed on.
        self.streaming = None

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] not in ("http", "websocket"):
            await super().__call__(scope, receive, send)
            return
        if scope["type"] == "http" and _CLUSTER.fullmatch(scope["path"]):
            await self._operate(scope, receive, send)
            return
        try:
            task, creates = self._task_of(scope)
        except RefusalError as refusal:
            await self._refuse(scope, receive, send, refusal)
            return
        if task is None:
            await super().__call__(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._converse_here(task, scope, receive, send)
        else:
            try:
                body = await self._body(receive)
                if body is not None:
                    await self._answer(task, scope, body, receive, send, creates=creates)
            except RefusalError as refusal:
                await self._refuse(scope, receive, send, refusal)

    # -- which task --------------------------------------------------------------------------------------------------

    def _task_of(self, scope: Scope) -> tuple[str | None, bool]:
        """Return the task that a request names, and whether the request may create it; None for a request without one.

        Raises:
            RefusalError: The request cannot be served by a cluster, or is not authorised.
        """
        path: str = scope["path"]
        agents = path.startswith(("/t/", "/e/", "/ng-rollout/"))
        below = None if agents else _WAY.fullmatch(path)
        if not agents and below is None:
            return None, False
        # A copy: the owner authorises the request too, and must see the token.
        seen: Scope = {"method": "GET", **scope, "headers": list(scope["headers"])}
        try:
            grant = self.engine.access.admit(seen, lambda text: _as_named(seen, text))
            if below is not None:
                return below[1], _require_change(seen, below[2] or "")
            address = self._addressing.address(seen)
        except RefusalError as refusal:
            if refusal.slug == "token" and path.startswith("/e/"):
                raise RefusalError(
                    401,
                    "token",
                    "in a cluster a token alone does not say which member has its rollout. Name the rollout too, with "
                    "the headers X-Forkpoint-Task and X-Forkpoint-Rollout.",
                ) from None
            raise
        if address.endpoint in _APIS:
            raise RefusalError(
                501,
                "not-in-a-cluster",
                f"the endpoint {address.endpoint!r} is not available on a member of a cluster yet. Run it on a proxy "
                "without --cluster.",
            )
        return address.task, not grant.rollout

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the body of a request; None if its client has hung up.

        Raises:
            RefusalError: 413, it is too large.
        """
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
        self, name: str, scope: Scope, body: bytes, receive: Receive, send: Send, *, creates: bool
    ) -> None:
        """Answer a request here or elsewhere.

        Raises:
            RefusalError: 503, no owner could be found or reached for a while.
        """
        member, loop = self._member, asyncio.get_running_loop()
        task = member.ingress.task(name)
        with member.ingress.calling(task, receive) as call:
            trouble_since: float | None = None
            while trouble_since is None or loop.time() - trouble_since < PATIENCE_S:
                if trouble_since is not None:
                    await asyncio.sleep(PAUSE_S)
                    if not await call.waits():
                        return
                trouble_since = trouble_since or loop.time()
                try:
                    owner = await member.locate(name, creates=creates)
                except DatabaseError as error:
                    log.debug("no owner", task=name, error=str(error))
                    continue
                if owner is None:
                    # Nobody owns a task that does not exist.
                    await super().__call__(scope, _replaying(body, receive), send)
                    return
                if isinstance(owner, Owned):
                    if await self._answer_here(owner, call, scope, body, send):
                        return
                    continue
                began = loop.time()
                answer = await self._ask(owner, task, call, scope, body)
                if loop.time() - began > PATIENCE_S:
                    trouble_since = None
                if answer is not None and member.accept(name, answer):
                    await _send_whole(answer.response, send)
                    return
        raise RefusalError(
            503,
            "no-owner",
            f"no member of the cluster can answer for task {name!r} now, or this member cannot reach it. Try again.",
        )

    async def _answer_here(self, owned: Owned, call: WaitingCall, scope: Scope, body: bytes, send: Send) -> bool:
        """Answer a request of an owned task; return False if the task was dropped before the call was taken."""
        origin = Origin(self._member.number, lambda: True, call.waits)
        ORIGIN.set(origin)
        is_over = False

        async def sending(message: AsgiMessage) -> None:
            nonlocal is_over
            if message["type"] == "http.response.start":
                for written in origin.pending:
                    # A failure shows in `is_dropped`.
                    with suppress(RefusalError):
                        await asyncio.shield(written)
                # The own ingress has kept the position: made again, the call would be a step more.
                is_over = owned.is_dropped and not origin.is_accepted
            if not is_over:
                await send(message)

        # A copy: it is given to the application again if the task is dropped meanwhile.
        own: Scope = {**scope, "headers": list(scope["headers"])}
        await super().__call__(own, _replaying(body, call.receive), sending)
        return not is_over

    async def _ask(
        self, owner: Ownership, task: TaskIngress, call: WaitingCall, scope: Scope, body: bytes
    ) -> CallAnswer | None:
        """Ask the owner of a task; None if it did not answer.

        Raises:
            RefusalError: 501 for a stream, 502 for a defect of the owner.
        """
        if _wants_events(scope):
            raise RefusalError(
                501,
                "not-in-a-cluster",
                f"streams of events are served by the owner of a task alone. Member {owner.peer.name!r} owns it; "
                "connect there.",
            )
        question = CallQuestion(
            task.name, owner.view, call.number, task.oldest, scope["method"], scope["raw_path"].decode("latin-1"),
            scope["query_string"].decode("latin-1"),
            [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]],
            scope.get("scheme", "http"), body,
        )  # fmt: skip
        try:
            answer = await self._member.forward(owner, question)
        except PeerFailedError as error:
            raise RefusalError(502, "peer", str(error)) from error
        except (LinkLostError, MessageError) as error:
            log.debug("a call was not answered", owner=owner.peer.name, error=str(error))
            task.owner = None
            return None
        if isinstance(answer, CallAnswer):
            return answer
        if answer.view:
            self._member.adopt(question.task, answer.view)
        task.owner = None
        return None

    def _known_to_peer(self, question: CallQuestion) -> bytes | None:
        """Return the HTTP response to a peer's request that the tree knows, and take its step; None for any other."""
        return self.known(_scope_of(question), question.body)

    async def _answer_peer(self, question: CallQuestion) -> bytes:
        """Return the HTTP response to a request that a peer has passed on."""
        parts: list[bytes] = []

        async def send(message: AsgiMessage) -> None:
            if message["type"] == "http.response.start":
                parts.append(_head(message))
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await super().__call__(_scope_of(question), _replaying(question.body, _never), send)
        return b"".join(parts)

    async def _operate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Show the members of the cluster, or drain one."""
        try:
            refuse_foreign(scope["method"], scope["headers"], tool=False, names=self.engine.names)
            refusal = self._authorise(scope)
            if refusal is not None:
                raise refusal
            scope.get(GRANT, ALL).require_whole()
            value = await self._operation(scope)
        except (RefusalError, DatabaseError) as error:
            refusal = error if isinstance(error, RefusalError) else RefusalError(503, "database", str(error))
            await self._refuse(scope, receive, send, refusal)
            return
        body = orjson.dumps(value)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _operation(self, scope: Scope) -> dict[str, Any]:
        found = _CLUSTER.fullmatch(scope["path"])
        node = None if found is None else found[1]
        if scope["method"] != ("GET" if node is None else "POST"):
            raise RefusalError(405, "method", "GET shows the cluster, and POST drains a member.")
        return await (self._members() if node is None else self._drain(unquote(node)))

    async def _members(self) -> dict[str, Any]:
        """Return the members of the cluster, as the database knows them."""
        own, known = self._member.database.membership, await self._member.database.members()
        return {
            "cluster": own.cluster,
            "members": [
                {"name": peer.name, "number": peer.number, "link": peer.url, "alive": peer.alive, "tasks": tasks}
                for peer, tasks in known
            ],
        }

    async def _drain(self, node: str) -> dict[str, Any]:
        """Let a member hand over its tasks.

        Raises:
            RefusalError: 404 or 409 for a member that is not there or has no other member beside it, 503 for one that
                does not answer.
        """
        alive = [peer for peer, _ in await self._member.database.members() if peer.alive]
        chosen = next((peer for peer in alive if peer.name == node), None)
        if chosen is None:
            raise RefusalError(404, "no-such-member", f"no member named {node!r} is running.")
        if len(alive) < 2:
            raise RefusalError(409, "last-member", f"no other member could take over the tasks of {node!r}.")
        own = chosen.number == self._member.number
        answer = await self._member.drain() if own else await self._member.ask(chosen.number, DrainQuestion())
        if not isinstance(answer, DrainAnswer):
            raise RefusalError(503, "member", f"member {node!r} does not answer. Try again.")
        return {"name": node, "handed": answer.handed, "kept": answer.kept}

    async def _converse_here(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket of a task that this member owns, and refuse any other."""
        try:
            owner = await self._member.locate(name)
        except DatabaseError:
            owner = None
        if isinstance(owner, Owned):
            await super().__call__(scope, receive, send)
            return
        url = "" if owner is None else f" Member {owner.peer.name!r} owns it; connect there."
        await self._refuse(
            scope, receive, send,
            RefusalError(503, "other-member", f"WebSockets are served by the owner of a task alone.{url}"),
        )  # fmt: skip

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, refusal: RefusalError) -> None:
        problem = problem_of(refusal)
        self._count(problem)
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1013 if problem.status == 503 else 1008})
            return
        body = problem.body()
        headers = [*problem.headers(), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": problem.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _as_named(scope: Scope, text: str) -> tuple[str, str] | None:
    """Return the names in a path for what may be a rollout's token: its owner checks it."""
    parts = scope["path"].split("/")
    if text.startswith("fp_") and len(parts) > 4 and parts[1] == "t" and parts[3] == "r":
        return parts[2], parts[4]
    return None


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


async def _never() -> AsgiMessage:
    """Wait for the disconnect of a client that is at another member."""
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


def _head(message: AsgiMessage) -> bytes:
    """Return the head of an HTTP response."""
    lines = [b"HTTP/1.1 %d " % message["status"], *(name + b": " + value for name, value in message.get("headers", ()))]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _send_whole(response: bytes, send: Send) -> None:
    """Send a whole HTTP response. 5 us for ten headers."""
    head, _, body = response.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = [(name.lower(), value) for name, _, value in (line.partition(b": ") for line in lines)]
    await send({"type": "http.response.start", "status": int(first.split(b" ", 2)[1]), "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _decoded(raw_path: bytes) -> str:
    """Return a path as a server decodes it."""
    return unquote(raw_path.decode("ascii", "replace"))


def _wants_events(scope: Scope) -> bool:
    """Return whether a request asks for a stream of events, which has no end."""
    accepted = (value for name, value in scope["headers"] if name == b"accept")
    return scope["method"] == "GET" and any(b"event-stream" in value for value in accepted)


def _require_change(scope: Scope, below: str) -> bool:
    """Check that a request below a task may be served by a cluster; return whether it may create the task.

    Raises:
        RefusalError: 501.
    """
    method = scope["method"]
    if method not in ("GET", "HEAD") and not _CHANGES.fullmatch(below):
        raise RefusalError(501, "not-in-a-cluster", f"{method} {scope['path']} is not available in a cluster yet.")
    if method == "DELETE" and not below:
        raise RefusalError(501, "not-in-a-cluster", "a task cannot be deleted in a cluster yet.")
    return method in ("PUT", "POST")


def _scope_of(question: CallQuestion) -> Scope:
    """Return the ASGI scope of a request that a peer has passed on."""
    path = question.path.encode("latin-1")
    return {
        "type": "http", "http_version": "1.1", "method": question.method, "raw_path": path,
        "path": _decoded(path), "query_string": question.query.encode("latin-1"), "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in question.headers],
        "scheme": question.scheme, "server": None, "client": None, "state": {},
    }  # fmt: skip
