"""The workers of one proxy among themselves: connections go to the worker that has their task.

Theory of operation. All workers accept connections on one socket. A worker that reads a request of another worker's
task gives the whole connection away: its descriptor, and the bytes that are not answered (`SCM_RIGHTS`). The other
worker goes on as if it had accepted the connection, so hits, streams and upgrades need nothing more, and no call
passes through two processes. If a worker dies, its connections end, as those of a proxy without workers do.

1. `give` looks for the channel to the worker. There is none while the worker starts, or after it died: then the
   connection waits for it, `PATIENCE_S` at most, and gets 503 with `Retry-After`. The call was not executed.
2. Once a connection is sent, this process does nothing more with it. If the worker dies with it, the client sees the
   end of its connection, and not an answer that could be wrong.
3. Views that show all tasks are put together from the workers' parts (`begin`), see `views`.
"""

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import structlog

from proxy.http.asgi import Scope
from proxy.http.problems import problem_of
from proxy.refusals import RefusalError
from proxy.workers.messages import GivenConnection, Piece, PieceRequest, ViewAnswer, ViewRequest
from proxy.workers.routing import Routes
from proxy.workers.streams import OwnPart, PartCutError, SiblingPart
from sandboxes.ipc.channel import Channel, ChannelClosedError, PeerFailedError
from sandboxes.task_owner import TaskOwner

log = structlog.get_logger()

PATIENCE_S = 8.0
"""How long a connection waits for a worker that is not there, in seconds, before it gets 503. A start takes a second or
two."""
MAX_WAITING = 1024
"""Most connections that wait for workers. Further ones get 503 at once."""
_PAUSE_S = 0.05
_LINGER_S = 1.0
"""How long the client of a refused connection may still send, in seconds: a reset could overtake the response."""
_LINK = "link"
"""Name of a worker's socket in its data directory, which only this user can enter."""

_CREDENTIALS = struct.Struct("3i")
"""The process, user and group at the other end of a socket (unix(7), SO_PEERCRED)."""

Respond = Callable[[ViewRequest], Awaitable[OwnPart]]
"""Begins this worker's part of a view."""


class WorkerAwayError(RefusalError):
    """Another worker does not answer."""

    def __init__(self, number: int) -> None:
        super().__init__(
            503, "worker-away", f"worker {number} of this proxy, which has the task, is not running. Try again."
        )


class Siblings:
    """This worker's links to the others. Implements `proxy.dataplane.hit_protocol.Handover`."""

    def __init__(self, routes: Routes, directories: Sequence[Path]) -> None:
        self.routes, self._directories = routes, directories
        self._channels: dict[int, Channel] = {}
        self._connecting: dict[int, asyncio.Lock] = {}
        self._tasks, self._listener = TaskOwner(), cast("socket.socket | None", None)
        self._waiting, self._is_closing = 0, False

    @property
    def own(self) -> int:
        """Number of this worker."""
        return self.routes.share.number

    async def numbers(self, scope: Scope) -> list[int]:  # noqa: ARG002 - see `Others`
        """Return the numbers of all workers."""
        return list(range(self.routes.share.of))

    def is_part(self, scope: Scope) -> bool:  # noqa: ARG002 - see `Others`
        """Return False: requests of other workers do not come by HTTP."""
        return False

    # -- to other workers --------------------------------------------------------------------------------------------

    def elsewhere(self, scope: Scope) -> int | None:
        """Return the number of the worker that must answer a request; None for this one. 0.4 us."""
        number = self.routes.worker_of(scope)
        return None if number == self.routes.share.number else number

    def give(self, process: int, connection: socket.socket, held: bytes) -> None:
        """Give a connection to another worker, with the bytes that are not answered."""
        self._tasks.spawn("connection for another worker", self._give(process, connection, held))

    async def begin(self, number: int, request: ViewRequest) -> SiblingPart:
        """Let a worker begin its part of a view; the caller closes it. Raises WorkerAwayError: it does not answer."""
        # A channel of its own: answers come in order, and a connection must not wait for a long list.
        channel = await self._connect(number)
        try:
            return SiblingPart(channel, (await channel.ask(request)).message)
        except (ChannelClosedError, PeerFailedError) as error:
            channel.close()
            raise WorkerAwayError(number) from error
        except BaseException:
            channel.close()
            raise

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

    def open(self, make_protocol: Callable[[], asyncio.Protocol], respond: Respond) -> None:
        """Take connections and questions of other workers from now on. Raises OSError."""
        directory = self._directories[self.routes.share.number]
        with contextlib.suppress(FileNotFoundError):
            # A killed worker leaves its socket.
            if stat.S_ISSOCK((directory / _LINK).lstat().st_mode):
                (directory / _LINK).unlink()
        listener = self._listener = socket.socket(socket.AF_UNIX)
        with _short(directory) as folder:
            listener.bind(f"{folder}/{_LINK}")
        listener.listen(1024)
        listener.setblocking(False)
        accept = partial(self._accept, listener, make_protocol, respond)
        asyncio.get_running_loop().add_reader(listener.fileno(), accept)

    async def aclose(self) -> None:
        """Take nothing more, and give nothing more away. What waits for a worker gets 503."""
        self._is_closing = True
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            with contextlib.suppress(OSError):
                (self._directories[self.routes.share.number] / _LINK).unlink()
        for channel in self._channels.values():
            channel.close()
        self._tasks.cancel()
        await self._tasks.wait()

    def _accept(self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol], respond: Respond) -> None:
        try:
            end, _ = listener.accept()
        except OSError:
            return
        # The mode of the data directory keeps other users out, unless it is a volume that belongs to one of them.
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
            end.close()
            return
        self._tasks.spawn("another worker", self._serve(Channel(end), make_protocol, respond))

    async def _serve(self, channel: Channel, make_protocol: Callable[[], asyncio.Protocol], respond: Respond) -> None:
        part: OwnPart | None = None
        try:
            while True:
                envelope = await channel.next(GivenConnection, ViewRequest, PieceRequest)
                match envelope.message:
                    case GivenConnection():
                        await _adopt(envelope.fds[0], envelope.body, make_protocol)
                    case PieceRequest() if part is not None:
                        await channel.post(Piece(), body=await part.next())
                    case ViewRequest() as request:
                        part = await respond(request)
                        await channel.post(ViewAnswer(part.status, part.headers))
        except (ChannelClosedError, PeerFailedError):
            pass
        except PartCutError as error:
            # The other worker notices the end of the channel.
            log.warning("a view for another worker failed", error=str(error), cause=str(error.__cause__))
        finally:
            channel.close()
            if part is not None:
                await part.aclose()


async def _adopt(descriptor: int, held: bytes, make_protocol: Callable[[], asyncio.Protocol]) -> None:
    """Serve a connection that another worker has given away."""
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
    problem = problem_of(refusal)
    body = problem.body()
    headers = [*problem.headers(), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            await loop.sock_sendall(connection, b"HTTP/1.1 503 Service Unavailable\r\n" + lines + b"\r\n" + body)
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
