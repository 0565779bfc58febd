"""Finds the owner of a call's task, and asks it, until one has answered."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from proxy.cluster.ingress import TaskIngress, WaitingCall
from proxy.cluster.link.passing import ELSEWHERE, PeerLostError, in_chunks
from proxy.cluster.member import Member
from proxy.cluster.owned import Owned
from proxy.cluster.postgres.connection import DatabaseError
from proxy.cluster.postgres.database import Ownership
from proxy.http.asgi import AsgiMessage, Receive, Scope, Send
from proxy.http.passed_head import PASSED, head_of
from proxy.refusals import RefusalError
from sandboxes.http_message import end_to_end
from sandboxes.listener import Headers
from sandboxes.task_owner import start

log = structlog.get_logger()

PATIENCE_S = 8.0
"""How long a request waits for an owner that can answer, in seconds, before it gets 503. A takeover takes a lease, 3 s.
A call that an owner works on has no such limit."""
MAX_WHOLE_BYTES = 16 << 20
"""Size from which a response with a length is a stream too. It is larger than answers of tools, which must be whole, so
that an ingress can have them again after its connection broke."""
PAUSE_S = 0.1
"""Between two attempts to find an owner, in seconds."""


class Forwarder:
    """Brings the calls of this member's agents to their owners."""

    def __init__(self, member: Member) -> None:
        self._member = member

    async def route(
        self,
        task: TaskIngress,
        call: WaitingCall,
        here: Callable[[Owned], Awaitable[bool]],
        away: Callable[[Ownership], Awaitable[bool]],
        *,
        creates: bool,
    ) -> bool:
        """Let the owner of a task answer a call, by `here` or `away`; return False if the task has no owner.

        Both return whether they did. A call whose agent has hung up counts as answered. `creates` says whether to own
        a task that never had an owner. Raises RefusalError: 503, no owner could be found or reached for a while.
        """
        member, loop = self._member, asyncio.get_running_loop()
        trouble_since: float | None = None
        while trouble_since is None or loop.time() - trouble_since < PATIENCE_S:
            if trouble_since is not None:
                await asyncio.sleep(PAUSE_S)
                if not await call.waits():
                    return True
            trouble_since = trouble_since or loop.time()
            try:
                owner = await member.locate(task.name, creates=creates)
            except DatabaseError as error:
                log.debug("no owner", task=task.name, error=str(error))
                continue
            if owner is None:
                return False
            began, call.is_asked = loop.time(), True
            if await (here(owner) if isinstance(owner, Owned) else away(owner)):
                return True
            if loop.time() - began > PATIENCE_S:
                trouble_since = None
        raise RefusalError(
            503, "no-owner",
            f"no member of the cluster can answer for task {task.name!r} now, or this member cannot reach it. Try "
            "again.",
        )  # fmt: skip

    async def pass_on(
        self,
        owner: Ownership,
        task: TaskIngress,
        call: WaitingCall,
        scope: Scope,
        body: bytes | AsyncIterator[bytes],
        receive: Receive,
        relay: "Relay",
    ) -> bool:
        """Let the owner of a task answer a request; return whether it did."""
        passed = task.passed(call, owner.view, scope)

        async def watch() -> None:
            """Give up a stream whose agent has left. Calls go on."""
            await relay.begun.wait()
            self._member.ingress.became_stream(task, call)
            while (await receive())["type"] != "http.disconnect":
                pass
            passing.cancel()

        def give_up() -> None:
            passing.cancel()

        length, sent = (len(body), body) if isinstance(body, bytes) else (None, in_chunks(body, give_up))
        head = head_of(scope, length, [(PASSED, passed.pack())])
        passing = start(self._member.passing.request(owner.peer, head, sent, relay))
        watching = start(watch())
        try:
            await asyncio.wait({passing})
        finally:
            passing.cancel()
            watching.cancel()
            await asyncio.gather(passing, watching, return_exceptions=True)
        if passing.cancelled():
            return True
        error = passing.exception()
        if error is not None and not isinstance(error, PeerLostError):
            raise error
        if error is None and not relay.is_elsewhere:
            await relay.end()
            return True
        if relay.begun.is_set():
            return True
        log.debug("a call was not answered", owner=owner.peer.name, error=str(error))
        task.owner = None
        return False


class Relay:
    """A response of a peer, on its way to an agent: whole if it has a length, else a stream. Implements `Listener`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_elsewhere = False  # Whether the peer does not have the task.
        self.begun = asyncio.Event()  # Whether the agent has got a part of a stream.
        self._start: AsgiMessage = {}
        self._parts: list[bytes] = []

    async def head(self, status: int, headers: Headers) -> None:
        """Take the head of the response."""
        named = dict(headers)
        if ELSEWHERE in named:
            self.is_elsewhere = True
            return
        length = named.get("content-length")
        if length is None or int(length) > MAX_WHOLE_BYTES:
            self.begun.set()
        kept = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in end_to_end(headers)]
        self._start = {"type": "http.response.start", "status": status, "headers": kept}
        if self.begun.is_set():
            await self._send(self._start)

    async def data(self, chunk: bytes) -> None:
        """Take the next bytes of the body."""
        if self.begun.is_set():
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        else:
            self._parts.append(chunk)

    async def end(self) -> None:
        """Note that the response is whole. Without it, the server cuts the agent's connection off."""
        if not self.begun.is_set():
            await self._send(self._start)
        await self._send({"type": "http.response.body", "body": b"".join(self._parts)})
