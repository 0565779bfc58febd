"""The outlet of one sandbox: it accepts the connections of the sandbox's programs, and serves each by the rules.

The listening socket was made in the sandbox's network namespace, to which it belongs for ever. So connections come from
that one sandbox, which still has no interface but its loopback.
"""

import asyncio
import contextlib
import socket
from collections import deque
from dataclasses import replace
from typing import BinaryIO

from sandboxes.calls import EgressExchange, EgressOutcome
from sandboxes.egress.dialing import Dialer, FailedError
from sandboxes.egress.fair_slots import Requester
from sandboxes.egress.fetching import HostFetcher
from sandboxes.egress.incoming import ProgramConnection, ProgramRequest
from sandboxes.egress.messages import ExchangesTaken
from sandboxes.egress.recordings import RecordedResponse
from sandboxes.egress.targets import RefusedError, Target, forwarded, target_of
from sandboxes.task_owner import TaskOwner, start

_CONNECTIONS = 32
"""Connections of one sandbox that are served at once; further ones wait in the queue of its listening socket. Package
managers open some ten. The limit keeps the sandboxes of a large proxy from using up this process's descriptors."""
_EXCHANGES = 100
"""Requests that are remembered until the proxy takes them, after each call. Of more, only the number is kept."""
_URL_CHARACTERS = 1000
"""How much of a URL an event shows."""
_CHUNK_BYTES = 1 << 16
_BODILESS = frozenset({204, 304})
"""Statuses whose responses have no body (RFC 9110, 6.4.1)."""
_CONNECTION_S = 3600.0
"""Longest life of a connection, which is the longest download through a tunnel. The value is an estimate."""
_TUNNEL_SILENCE_S = 120.0
"""Longest time in which no byte passes through a tunnel. The value is an estimate."""
_TUNNEL_BYTES = 4 << 30
"""Most bytes that pass through a tunnel in each direction; as much as the disk of a sandbox has by default."""


class Outlet:
    """Serves the connections of one sandbox."""

    def __init__(
        self,
        listener: socket.socket,
        hosts: tuple[str, ...],
        requester: Requester,
        fetcher: HostFetcher,
        dialer: Dialer,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._hosts, self._requester = listener, hosts, requester
        self._fetcher, self._dialer = fetcher, dialer
        self._room = asyncio.Semaphore(_CONNECTIONS)
        self._tasks = TaskOwner()
        self._exchanges: deque[EgressExchange] = deque(maxlen=_EXCHANGES)
        self._lost, self._live = 0, False

    async def serve(self) -> None:
        """Accept connections until this task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:
                # No descriptor is left for now: others must be closed first.
                self._room.release()
                await asyncio.sleep(0.1)
                continue
            self._tasks.spawn("egress connection", self._serve_one(connection))

    async def close(self) -> None:
        """End all connections and close the listening socket."""
        await self._tasks.end()
        self._listener.close()

    def take(self) -> ExchangesTaken:
        """Return what happened since the last time."""
        taken = ExchangesTaken([replace(exchange) for exchange in self._exchanges], self._lost, self._live)
        self._exchanges.clear()
        self._lost, self._live = 0, False
        return taken

    async def _serve_one(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        incoming = ProgramConnection(connection)
        try:
            with connection, contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CONNECTION_S):
                    await self._answer(incoming, EgressExchange("", "", "failed", 0, 0))
                    await incoming.finish()
        finally:
            self._room.release()

    def _note(
        self, exchange: EgressExchange, outcome: EgressOutcome, status: int, detail: str = "", size_bytes: int = 0
    ) -> None:
        """Note a request before its first byte is answered: the call that gets it may end right after that."""
        # What comes in is not repeatable unless it was recorded before, or follows from the rules alone.
        exchange.outcome, exchange.status, exchange.size_bytes = outcome, status, size_bytes
        exchange.detail = detail[:_URL_CHARACTERS]
        self._live |= outcome not in ("repeated", "refused")
        if len(self._exchanges) == _EXCHANGES:
            self._lost += 1
        self._exchanges.append(exchange)

    async def _answer(self, incoming: ProgramConnection, exchange: EgressExchange) -> None:
        try:
            request = await incoming.request()
            exchange.method, exchange.url = request.method[:20], request.target[:_URL_CHARACTERS]
            target = target_of(request.method, request.target, self._hosts)
            exchange.url = target.url[:_URL_CHARACTERS]
            if request.method == "CONNECT":
                await self._tunnel(incoming, target, exchange)
                return
            response, outcome = await self._fetch(request, target)
        except (RefusedError, FailedError) as error:
            self._note(exchange, "refused" if isinstance(error, RefusedError) else "failed", error.status, str(error))
            await incoming.refuse(error.status, str(error))
            return
        with response.body:
            has_body = request.method != "HEAD" and response.status not in _BODILESS
            self._note(exchange, outcome, response.status, size_bytes=response.length)
            await incoming.respond(response.status, response.headers, response.length if has_body else None)
            await self._send_body(incoming, response.body, response.length if has_body else 0, outcome)

    async def _fetch(self, request: ProgramRequest, target: Target) -> tuple[RecordedResponse, EgressOutcome]:
        try:
            return await self._fetcher.fetch(self._requester, request.method, target, forwarded(request.headers))
        except OSError as error:
            # This machine has no room, or no descriptor. The program must not take that for its own connection's end.
            raise FailedError(f"the response could not be kept: {error.strerror}") from error

    async def _send_body(
        self, incoming: ProgramConnection, body: BinaryIO, length: int, outcome: EgressOutcome
    ) -> None:
        while length > 0 and (chunk := body.read(min(_CHUNK_BYTES, length))):
            length -= len(chunk)
            # Again for each piece, because another call may be running by now.
            self._live |= outcome != "repeated"
            await incoming.data(chunk)

    async def _tunnel(self, incoming: ProgramConnection, target: Target, exchange: EgressExchange) -> None:
        with await self._dialer.dial(self._requester, target.host, target.port) as outside:
            self._note(exchange, "live", 200)
            early = await incoming.accept_tunnel()
            moved_at = [asyncio.get_running_loop().time()]
            pumps = [
                start(self._pump(incoming.connection, outside, moved_at, None, early)),
                start(self._pump(outside, incoming.connection, moved_at, exchange)),
            ]
            try:
                await asyncio.gather(*pumps)
            finally:
                # The other one must not use a descriptor that is closed here.
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        moved_at: list[float],
        inwards: EgressExchange | None,
        chunk: bytes = b"",
    ) -> None:
        """Pass on bytes in one direction until they end, beginning with a chunk that came already."""
        # `moved_at` is one list for both directions. `inwards` counts the bytes that a program receives.
        loop, room = asyncio.get_running_loop(), _TUNNEL_BYTES
        await _send(sink, chunk)
        while room > 0:
            try:
                async with asyncio.timeout(_TUNNEL_SILENCE_S):
                    chunk = await loop.sock_recv(source, _CHUNK_BYTES)
            except TimeoutError:
                if loop.time() - moved_at[0] >= _TUNNEL_SILENCE_S:
                    raise ConnectionAbortedError("no byte passed through the tunnel") from None
                continue
            if not chunk:
                with contextlib.suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)
                return
            moved_at[0] = loop.time()
            room -= len(chunk)
            if inwards is not None:
                self._live = True
                inwards.size_bytes += len(chunk)
            await _send(sink, chunk)
        raise ConnectionAbortedError("too many bytes passed through the tunnel")


async def _send(sink: socket.socket, chunk: bytes) -> None:
    async with asyncio.timeout(_TUNNEL_SILENCE_S):
        await asyncio.get_running_loop().sock_sendall(sink, chunk)
