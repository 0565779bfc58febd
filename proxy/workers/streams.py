"""Responses of all workers that are too long for memory: read from each in pieces, and joined while they are sent.

Theory of operation:

1. Each worker answers the request by its own application. A piece is read only when the joined response needs it, so a
   worker holds one piece of its part, and the joining worker one of each part.
2. The head of the joined response is sent when all workers have begun theirs. A worker that refuses is the response.
3. A part is complete only if it ends as HTTP says. A worker that dies before is an error, which cuts the client's
   connection off: the client never takes a part of the response for all of it.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Self

import orjson

from proxy.refusals import RefusalError
from proxy.transfer.format import FORMAT, Writer
from proxy.transfer.trajectories import HEAD_END, SENT_BYTES
from sandboxes.listener import Headers, Listener
from sandboxes.task_owner import start


class PartCutError(RefusalError):
    """A worker's part of a response has ended before it was complete."""

    def __init__(self, why: str) -> None:
        super().__init__(503, "part", f"{why}. Try again.")


class ResponsePart:
    """The response of one process, read while it arrives. Implements `Listener`."""

    def __init__(self, request: Callable[[Listener], Awaitable[None]]) -> None:
        """Send a request, which passes its response to a listener, and fails if that has no end."""
        self.status, self.headers = 0, dict[str, str]()  # By names in lower case.
        # One piece waits at most, so the next one is made while the last one is sent.
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(1)
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running = start(self._run(request))

    @classmethod
    async def begun(cls, request: Callable[[Listener], Awaitable[None]]) -> Self:
        """Return the response to a request once its head is known. Raises RefusalError."""
        part = cls(request)
        try:
            await part._begun
        except BaseException:
            await part.aclose()
            raise
        return part

    async def head(self, status: int, headers: Headers) -> None:
        """Take the head."""
        self.status, self.headers = status, {name.lower(): value for name, value in headers}
        self._begun.set_result(None)

    async def data(self, chunk: bytes) -> None:
        """Take the next piece."""
        await self._pieces.put(chunk)

    async def next(self) -> bytes:
        """Return the next piece; empty after the last one. Raises PartCutError: the rest will not come."""
        waiting = start(self._pieces.get())
        try:
            await asyncio.wait({waiting, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()
        # The response has ended, perhaps with a piece that nobody has taken yet.
        if not self._pieces.empty():
            return self._pieces.get_nowait()
        error = self._running.exception()
        if error is not None:
            raise PartCutError(f"a part of a response has no end: {error}") from error
        return b""

    async def aclose(self) -> None:
        """Read nothing more."""
        self._running.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._running

    async def _run(self, request: Callable[[Listener], Awaitable[None]]) -> None:
        try:
            await request(self)
        except Exception as error:
            if self._begun.done():
                raise
            self._begun.set_exception(error)


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
