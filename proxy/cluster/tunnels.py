"""Connections that become streams of bytes, WebSockets and Docker's, between an agent and the owner of its task.

Theory of operation:

1. `HitFirst` gives the whole connection, with the bytes that are not answered, once its request asks for a stream.
2. The owner is found as for a call. The bytes go there as they came, with the header of a request that is passed on. So
   they arrive at a server of the same kind, on a connection of a peer that is marked as an agent's (`Tunnelled`): the
   agent may send further requests on it, and they must count as its own. If this member is the owner, that connection
   is a pair of sockets of its own.
3. An owner that does not have the task answers 421, and the next one is found. Until an owner has answered, nothing
   more is read of the agent.
4. Then the bytes of both ends are copied. A slow reader holds up the writer.
5. A killed process leaves an end that looks like that of a whole stream. So an end counts only if the owner lives.
   Otherwise the agent's connection is reset: an agent never takes a part of a stream for all of it.
"""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import structlog

from proxy.cluster.forwarding import Forwarder
from proxy.cluster.link.passing import TUNNEL, PeerConnection, PeerLostError, Tunnelled
from proxy.cluster.member import Member
from proxy.cluster.named_task import NamedTask
from proxy.cluster.owned import Owned
from proxy.cluster.postgres.database import Ownership
from proxy.dataplane import closing_responses
from proxy.dataplane.handover import first_scope
from proxy.dataplane.taken_connection import reset
from proxy.http.asgi import AsgiMessage, Scope
from proxy.http.passed_head import PASSED
from proxy.refusals import RefusalError
from sandboxes.task_owner import TaskOwner, start
from sandboxes.tool_clients.http1 import ReaderConnection

log = structlog.get_logger()

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Tunnels:
    """Brings connections to the owners of their tasks. Implements `proxy.dataplane.handover.Handover`."""

    make_peer: Callable[..., asyncio.Protocol]

    def __init__(self, member: Member, forwarder: Forwarder, find: Callable[[Scope], NamedTask | None]) -> None:
        """Bring the connections of a member's agents. `find` returns the task of a request, or raises RefusalError."""
        self._member, self._forwarder, self._find = member, forwarder, find
        self.most = 1  # Most connections at once.
        self._tasks = TaskOwner()

    def elsewhere(self, scope: Scope) -> int | None:
        """Return whether a request names a task, as the number of the only end; None if it does not."""
        return 0 if scope["path"].startswith(("/t/", "/e/", "/ng-rollout/", "/api/v1/tasks/")) else None

    def give(self, process: int, connection: socket.socket, held: bytes) -> None:  # noqa: ARG002 - the only end
        """Bring a connection to the owner of its task."""
        if len(self._tasks) < self.most:
            self._tasks.spawn("tunnel", self._carry(connection, held))
            return
        with connection:
            connection.send(closing_responses.CROWDED)

    async def aclose(self) -> None:
        """End all connections, which have no end for their agents."""
        await self._tasks.end()

    async def _carry(self, connection: socket.socket, held: bytes) -> None:
        scope = first_scope(held, "http")
        assert scope is not None
        reader, writer = await asyncio.open_connection(sock=connection)
        agent = _Agent(connection, reader, writer)
        try:
            try:
                if await self._bring(scope, agent, held):
                    return
            except RefusalError as refusal:
                log.debug("a stream is refused", reason=str(refusal))
            # Without an owner, this member's server refuses it in the form of its endpoint.
            async with self._own_end({}) as end:
                await _join(agent, end, held)
        except (OSError, PeerLostError) as error:
            log.debug("a stream has ended", error=str(error))
        finally:
            agent.leave()

    async def _bring(self, scope: Scope, agent: "_Agent", held: bytes) -> bool:
        """Bring a connection to the owner of its task; return False if it has none. Raises RefusalError."""
        named = self._find(scope)
        if named is None:
            return False
        task = self._member.ingress.task(named.name)

        async def here(owned: Owned) -> bool:
            return await join(owned.view, self._own_end({TUNNEL: Tunnelled(self._member.hello)}))

        async def away(owner: Ownership) -> bool:
            peer = owner.peer
            is_joined = await join(owner.view, self._member.passing.connection(peer))
            if is_joined and agent.is_whole:
                agent.is_whole = await self._member.passing.lives(peer)
            return is_joined

        async def join(view: int, opening: AbstractAsyncContextManager[PeerConnection]) -> bool:
            passed = task.passed(call, view, scope)
            line, newline, rest = held.partition(b"\n")
            request = b"%b%b%b: %b\r\n%b" % (line, newline, PASSED, passed.pack(), rest)
            try:
                async with opening as end:
                    return await _join(agent, end, request, partial(self._member.ingress.became_stream, task, call))
            except PeerLostError as error:
                log.debug("a stream was not taken", error=str(error))
                task.owner = None
                return False

        with self._member.ingress.calling(task, agent.hung_up) as call:
            return await self._forwarder.route(task, call, here, away, creates=named.creates)

    @asynccontextmanager
    async def _own_end(self, state: dict[str, object]) -> AsyncIterator[PeerConnection]:
        own, given = socket.socketpair()
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self.make_peer(**state), given)
        end = PeerConnection(*await asyncio.open_connection(sock=own))
        try:
            yield end
        finally:
            end.abort()


class _Agent(ReaderConnection):
    def __init__(self, connection: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self._connection = connection
        self.is_whole = False  # Whether the stream has come to its end.

    async def hung_up(self) -> AsgiMessage:
        """Return the disconnect of an agent whose bytes are not read yet."""
        # Two rounds of the event loop read it, see `ingress.LOOK_S`.
        await asyncio.sleep(0.001)
        if not self._reader.at_eof():
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        """Close the connection, behind what was sent if the stream is whole, and else with an error."""
        if self.is_whole:
            self._writer.close()
        else:
            reset(self._writer.transport)


async def _join(agent: _Agent, owner: PeerConnection, request: bytes, begun: Callable[[], None] = lambda: None) -> bool:
    """Copy the bytes of both ends; return False if the owner does not have the task. Raises PeerLostError."""
    try:
        await owner.send(request)
        head = b""
        while (status := _STATUS.match(head)) is None:
            if not (piece := await owner.receive()):
                raise PeerLostError("the owner of a stream has not answered")
            head += piece
    except OSError as error:
        raise PeerLostError(f"the owner of a stream has not answered: {error}") from error
    if status[1] == b"421":
        return False
    begun()
    sending = start(_send(agent, owner))
    try:
        await agent.send(head)
        while piece := await owner.receive():
            await agent.send(piece)
        agent.is_whole = True
    except OSError as error:
        log.debug("a stream was cut off", error=str(error))
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    return True


async def _send(agent: _Agent, owner: PeerConnection) -> None:
    """Send what an agent sends to its end. If the agent is lost, so is the stream."""
    try:
        while piece := await agent.receive():
            await owner.send(piece)
        owner.end()
    except OSError:
        owner.abort()
