"""The workers of one proxy among themselves: connections go to the worker that has their task.

Theory of operation. All workers accept connections on one socket. A worker that reads a request of another worker's
task gives the whole connection away: its descriptor, and the bytes that are not answered (`SCM_RIGHTS`). The other
worker goes on as if it had accepted the connection, so hits, streams and upgrades need nothing more, and no call
passes through two processes. If a worker dies, its connections end, as those of a proxy without workers do.

1. `give` looks for the channel to the worker. There is none while the worker starts, or after it died: then the
   connection waits for it, `PATIENCE_S` at most, and gets 503 with `Retry-After`. The call was not executed.
2. Once a connection is sent, this process does nothing more with it. If the worker dies with it, the client sees the
   end of its connection, and not an answer that could be wrong.
3. Views that show all tasks are put together from the workers' parts, see `views`. A worker asks for a part by HTTP,
   over a connection of which it gives one end to the other worker.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self, cast

import structlog

from proxy.dataplane.closing_responses import closing_response
from proxy.http.asgi import Scope
from proxy.http.passed_head import head_of
from proxy.http.problems import problem_of
from proxy.refusals import RefusalError
from proxy.settings import Settings
from proxy.shares import Share
from proxy.storage.data_dir import directory_of
from proxy.workers.routing import Routes
from sandboxes.ipc.channel import Channel, ChannelClosedError, PeerFailedError
from sandboxes.ipc.codec import IpcMessage
from sandboxes.listener import Listener
from sandboxes.task_owner import TaskOwner
from sandboxes.tool_clients.http1 import MalformedResponseError, exchange

log = structlog.get_logger()

PATIENCE_S = 8.0
"""How long a connection waits for a worker that is not there, in seconds, before it gets 503. A start takes a second or
two."""
MAX_WAITING = 1024
"""Most connections that wait for workers. Further ones get 503 at once."""
_PAUSE_S = 0.05
_LINGER_S = 1.0
"""How long the client of a refused connection may still send, in seconds: a reset could overtake the response."""
_SILENCE_S = 1e9
"""Nobody knows how long a response of a worker takes. One that dies ends its connections."""
_PART = "forkpoint.part"
"""The key in the `state` of requests that ask for the part of one worker."""
_LINK = "link"
"""Name of a worker's socket in its data directory, which only this user can enter."""

OF_WORKERS = frozenset({"/metrics", "/readyz"})
"""Paths of what the workers of one machine answer together when they are members of a cluster."""
_CREDENTIALS = struct.Struct("3i")
"""The process, user and group at the other end of a socket (unix(7), SO_PEERCRED)."""


class GivenConnection(IpcMessage, op="given_connection", descriptors=(1, 1)):
    """A connection, sent to another worker; the body is what the client has sent and got no answer to."""

    is_part: bool = False  # Whether its client is a worker, which asks for the receiver's part of a response.


class WorkerAwayError(RefusalError):
    """Another worker does not answer."""

    def __init__(self, number: int) -> None:
        super().__init__(
            503, "worker-away", f"worker {number} of this proxy, which has the task, is not running. Try again."
        )


class Siblings:
    """This worker's links to the others. Implements `Handover` and `OtherProxies` of `proxy.dataplane`."""

    def __init__(
        self,
        share: Share,
        directories: Sequence[Path],
        paths: frozenset[str] | None = None,
        is_serving: Callable[[], None] = lambda: None,
    ) -> None:
        """Link a worker by its share of the tasks. `is_serving` is called when it answers requests."""
        self.routes, self.share, self._directories, self.paths = Routes(share), share, directories, paths
        self.is_serving = is_serving
        self._channels: dict[int, Channel] = {}
        self._connecting: dict[int, asyncio.Lock] = {}
        self._tasks, self._listener = TaskOwner(), cast("socket.socket | None", None)
        self._waiting, self._is_closing = 0, False

    @classmethod
    def among(cls, settings: Settings, number: int, is_serving: Callable[[], None]) -> Self:
        """Return the links of a worker of the proxy that the settings describe; nothing is connected yet."""
        directories = [directory_of(settings.data, each) for each in range(settings.workers)]
        paths = None if settings.cluster is None else OF_WORKERS
        return cls(Share(number, settings.workers), directories, paths, is_serving)

    async def numbers(self, scope: Scope) -> list[int]:  # noqa: ARG002 - see `OtherProxies`
        """See `OtherProxies.numbers`."""
        return list(range(self.share.of))

    def answers(self, scope: Scope) -> bool:
        """See `OtherProxies.answers`."""
        return _PART not in scope.get("state", {}) and (self.paths is None or scope["path"] in self.paths)

    # -- to other workers --------------------------------------------------------------------------------------------

    def elsewhere(self, scope: Scope) -> int | None:
        """Return the number of the worker that must answer a request; None for this one. 0.4 us."""
        number = self.routes.worker_of(scope)
        return None if number == self.share.number else number

    def give(self, process: int, connection: socket.socket, held: bytes) -> None:
        """Give a connection to another worker, with the bytes that are not answered."""
        self._tasks.spawn("connection for another worker", self._give(process, connection, held))

    async def request(self, number: int, scope: Scope, listener: Listener) -> None:
        """See `OtherProxies.request`: the worker is given one end of a new connection."""
        own, given = socket.socketpair()
        try:
            await (await self._channel(number)).post(GivenConnection(is_part=True), [given.fileno()])
        except BaseException:
            own.close()
            raise
        finally:
            given.close()
        try:
            await exchange(own, head_of(scope, 0), b"", listener, silence_s=_SILENCE_S)
        except (OSError, MalformedResponseError) as error:
            raise WorkerAwayError(number) from error

    async def _give(self, number: int, connection: socket.socket, held: bytes) -> None:
        with connection:
            try:
                channel = await self._channel(number)
            except RefusalError as refusal:
                await _refuse(connection, refusal)
                return
            # If the worker dies from here on, it may have executed the call.
            await channel.post(GivenConnection(), [connection.fileno()], body=held)

    async def _channel(self, number: int) -> Channel:
        channel = self._channels.get(number)
        if channel is not None and channel.lost is None:
            return channel
        if self._waiting >= MAX_WAITING:
            raise WorkerAwayError(number)
        self._waiting += 1
        try:
            async with self._connecting.setdefault(number, asyncio.Lock()):
                channel = self._channels.get(number)
                if channel is None or channel.lost is not None:
                    channel = self._channels[number] = await self._connect(number)
                return channel
        finally:
            self._waiting -= 1

    async def _connect(self, number: int) -> Channel:
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_S
        while not self._is_closing:
            end = socket.socket(socket.AF_UNIX)
            end.setblocking(False)
            try:
                with _short(self._directories[number]) as folder:
                    # A socket of the file system connects at once, or not at all.
                    end.connect(f"{folder}/{_LINK}")
                return Channel(end)
            except OSError:
                end.close()
            if loop.time() > until:
                break
            await asyncio.sleep(_PAUSE_S)
        raise WorkerAwayError(number)

    # -- from other workers ------------------------------------------------------------------------------------------

    def open(self, make_client: Callable[[], asyncio.Protocol], make_peer: Callable[..., asyncio.Protocol]) -> None:
        """Take connections of other workers: `make_client` makes a `HitFirst`, `make_peer` takes its state."""
        self._make_client, self._make_part = make_client, partial(make_peer, **{_PART: True})
        directory = self._directories[self.share.number]
        # A killed worker leaves its socket.
        (directory / _LINK).unlink(missing_ok=True)
        listener = self._listener = socket.socket(socket.AF_UNIX)
        with _short(directory) as folder:
            listener.bind(f"{folder}/{_LINK}")
        listener.listen(1024)
        listener.setblocking(False)
        accept = partial(self._accept, listener)
        asyncio.get_running_loop().add_reader(listener.fileno(), accept)

    async def aclose(self) -> None:
        """Take nothing more, and give nothing more away. What waits for a worker gets 503."""
        self._is_closing = True
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            with contextlib.suppress(OSError):
                (self._directories[self.share.number] / _LINK).unlink()
        for channel in self._channels.values():
            channel.close()
        await self._tasks.end()

    def _accept(self, listener: socket.socket) -> None:
        try:
            end, _ = listener.accept()
        except OSError:
            return
        # The mode of the data directory keeps other users out, unless it is a volume that belongs to one of them.
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
            end.close()
            return
        self._tasks.spawn("another worker", self._serve(Channel(end)))

    async def _serve(self, channel: Channel) -> None:
        try:
            while True:
                given = await channel.next(GivenConnection)
                await _adopt(given.fds[0], given.body, self._make_part if given.message.is_part else self._make_client)
        except (ChannelClosedError, PeerFailedError):
            pass
        finally:
            channel.close()


async def _adopt(descriptor: int, held: bytes, make_protocol: Callable[[], asyncio.Protocol]) -> None:
    connection = socket.socket(fileno=descriptor)

    def made() -> asyncio.Protocol:
        protocol = make_protocol()
        # Read before anything else of the connection.
        protocol.received_before = held  # type: ignore[attr-defined]
        return protocol

    try:
        await asyncio.get_running_loop().connect_accepted_socket(made, connection)
    except OSError as error:
        # Its client may have gone.
        log.debug("a given connection cannot be served", error=str(error))
        connection.close()


async def _refuse(connection: socket.socket, refusal: RefusalError) -> None:
    """Answer a connection that its worker cannot have, and close it."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            await loop.sock_sendall(connection, closing_response(problem_of(refusal)))
            connection.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(connection, 1 << 16):
                pass


@contextmanager
def _short(directory: Path) -> Iterator[str]:
    """Yield a short path of a directory: an address of a Unix socket has 107 bytes at most."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
