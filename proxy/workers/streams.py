"""Responses of all workers that are too long for memory: read from each in pieces, and joined while they are sent.

Theory of operation:

1. Each worker answers the request by its own application. A piece is read only when the joined response needs it, so a
   worker holds one piece of its part, and the joining worker one of each part.
2. The head of the joined response is sent when all workers have begun theirs. A worker that refuses is the response.
3. A part is complete only if its application says so. A worker that dies before is an error, which cuts the client's
   connection off: the client never takes a part of the response for all of it.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Protocol, Self

import orjson

from proxy.http.asgi import AsgiApp, AsgiMessage, Scope
from proxy.transfer.format import FORMAT, Writer
from proxy.transfer.trajectories import HEAD_END, SENT_BYTES
from proxy.workers.messages import PieceRequest, ViewAnswer, ViewRequest
from sandboxes.ipc.channel import Channel, ChannelClosedError, PeerFailedError
from sandboxes.task_owner import start


class PartCutError(Exception):
    """A worker's part of a response has ended before it was complete."""


class ResponsePart(Protocol):
    """A worker's response."""

    status: int
    headers: list[list[str]]  # Names and values.

    async def next(self) -> bytes:
        """Return the next piece; empty after the last one. Raises PartCutError: the rest will not come."""
        ...

    async def aclose(self) -> None:
        """Read nothing more."""
        ...


class OwnPart:
    """The response of this process's application. Implements `ResponsePart`."""

    status: int
    headers: list[list[str]]

    def __init__(self, application: AsgiApp, scope: Scope) -> None:
        # One message waits at most, so the application makes the next piece while the last one is sent.
        self._messages: asyncio.Queue[AsgiMessage] = asyncio.Queue(1)
        self._is_read = self._is_complete = False
        self._running = start(self._run(application, scope))

    @classmethod
    async def begun(cls, application: AsgiApp, request: ViewRequest) -> Self:
        """Answer a request without a body; return the response once its head is known. Raises PartCutError."""
        part = cls(application, _scope(request))
        try:
            head = await part._message()
        except BaseException:
            await part.aclose()
            raise
        part.status = head["status"]
        part.headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in head.get("headers", ())]
        return part

    async def next(self) -> bytes:
        """Return the next piece; empty after the last one. Raises PartCutError: the application failed."""
        while not self._is_complete:
            message = await self._message()
            self._is_complete = not message.get("more_body")
            if message.get("body"):
                return bytes(message["body"])
        return b""

    async def aclose(self) -> None:
        """End the application's work."""
        self._running.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._running

    async def _run(self, application: AsgiApp, scope: Scope) -> None:
        await application(scope, self._receive, self._messages.put)

    async def _receive(self) -> AsgiMessage:
        if self._is_read:
            # The client of the joined response hangs up by `aclose`.
            await asyncio.Event().wait()
        self._is_read = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _message(self) -> AsgiMessage:
        waiting = start(self._messages.get())
        try:
            await asyncio.wait({waiting, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()
        # The application has ended, perhaps with a message that nobody has taken yet.
        if not self._messages.empty():
            return self._messages.get_nowait()
        error = None if self._running.cancelled() else self._running.exception()
        raise PartCutError("the application ended before its response was complete") from error


class SiblingPart:
    """The response of another worker. Implements `ResponsePart`."""

    def __init__(self, channel: Channel, answer: ViewAnswer) -> None:
        self._channel, self.status, self.headers = channel, answer.status, answer.headers

    async def next(self) -> bytes:
        """Return the next piece; empty after the last one. Raises PartCutError."""
        try:
            return (await self._channel.ask(PieceRequest())).body
        except (ChannelClosedError, PeerFailedError) as error:
            raise PartCutError(f"another worker has not sent all of its part: {error}") from error

    async def aclose(self) -> None:
        """Close the channel."""
        self._channel.close()


def _scope(request: ViewRequest) -> Scope:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method, "scheme": "http",
        "path": request.path, "raw_path": request.path.encode(), "query_string": request.query.encode("latin-1"),
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers],
        "server": ("worker", None), "client": ("127.0.0.1", 0), "root_path": "",
    }  # fmt: skip


async def whole(part: ResponsePart) -> bytes:
    """Return the body of a short response. Raises PartCutError: it is not complete."""
    pieces = list[bytes]()
    while piece := await part.next():
        pieces.append(piece)
    return b"".join(pieces)


async def joined_backup(parts: Sequence[ResponsePart]) -> AsyncIterator[bytes]:
    """Yield a bundle of the workers' backups, each of which is a unit; `proxy.transfer.backup` restores it."""
    writer = Writer()
    manifest = {"backup": True, "forkpoint": version("forkpoint"), "format": FORMAT, "workers": len(parts)}
    yield writer.json("manifest", manifest)
    for number, part in enumerate(parts):
        yield writer.json("part", {"name": f"worker-{number}"})
        while piece := await part.next():
            # Two digests of each piece.
            yield await asyncio.to_thread(writer.part, "chunk", piece)
    yield writer.seal()


async def joined_trajectories(parts: Sequence[ResponsePart]) -> AsyncIterator[bytes]:
    """Yield the lines of all workers, in the order in which the rollouts were created. It holds a piece of each."""
    readers, waiting, pending = [_LineReader(part) for part in parts], list[tuple[float, int]](), bytearray()
    for number, reader in enumerate(readers):
        if (created_at := await reader.begin_line()) is not None:
            heapq.heappush(waiting, (created_at, number))
    while waiting:
        _, number = heapq.heappop(waiting)
        async for piece in readers[number].rest_of_line():
            pending += piece
            if len(pending) >= SENT_BYTES:
                yield bytes(pending)
                pending.clear()
        if (created_at := await readers[number].begin_line()) is not None:
            heapq.heappush(waiting, (created_at, number))
    yield bytes(pending)


class _LineReader:
    """Reads a worker's trajectories line by line, without holding a line."""

    def __init__(self, part: ResponsePart) -> None:
        self._part, self._held, self._at = part, b"", 0

    async def begin_line(self) -> float | None:
        """Return when the rollout of the next line was created; None after the last line. Raises PartCutError."""
        # Quotes inside of texts are escaped, so the head ends at the first place that looks like its end.
        while (end := self._held.find(HEAD_END, self._at)) < 0:
            rest = self._held[self._at :]
            if not await self._read() and not rest:
                return None
            self._held = rest + self._held
        return float(orjson.loads(self._held[self._at : end] + b"}")["created_at"])

    async def rest_of_line(self) -> AsyncIterator[bytes]:
        """Yield the line whose head was read, up to its end. Raises PartCutError: the part ends before the line."""
        while (end := self._held.find(b"\n", self._at) + 1) == 0:
            yield self._held[self._at :]
            await self._read()
        yield self._held[self._at : end]
        self._at = end

    async def _read(self) -> bool:
        """Hold the next piece instead of the last one; return False after the last one."""
        is_between = self._at == len(self._held)
        self._held, self._at = await self._part.next(), 0
        if not self._held and not is_between:
            raise PartCutError("the trajectories of a worker end in the middle of a line")
        return bool(self._held)
