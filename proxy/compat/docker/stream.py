"""A connection that a client of Docker has taken out of HTTP: its input until it closes that side, then our output.

`proxy.protocol` feeds it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from proxy.refusals import RefusalError
from sandboxes.listener import Headers
from sandboxes.process_output import ERR, OUT, Frames, ending, frame, frames

PATIENCE_S = 30.0
"""A client that takes nothing for so long is one that went away."""
SILENCE_S = 30.0
"""Input that comes to no end, and from which nothing more comes for so long, is somebody at a terminal."""
HELD_BYTES = 1 << 20
PROBE_S = 1.0
"""How often an empty frame is sent: a client that was killed is silent, but its machine refuses what comes then.

Its input had mostly ended before, so no end of that can tell.
"""
PAUSE_S = 0.02
HEAD_BYTES = 8192
"""Docker's Python SDK reads what follows the head past the buffer that it has read the head with: what came with the
head is lost to it. Its head fills that buffer, so that no more is read, and what follows comes a little later.
"""
_UPGRADED = "HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
_RAW, _FRAMES = "application/vnd.docker.raw-stream", "application/vnd.docker.multiplexed-stream"


class HijackedConnection:
    """One such connection. upgrade: its client asked for one; older ones take the answer's body instead.

    write, drain, hold, end: of the transport; drain returns once the client takes more, hold stops and resumes reading.
    hasty: whether its client loses what comes with the head.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        drain: Callable[[], Awaitable[None]],
        hold: Callable[[bool], None],
        end: Callable[[], None],
        *,
        upgrade: bool,
        hasty: bool,
    ) -> None:
        self._write, self._drain, self._hold, self._end = write, drain, hold, end
        self._upgrade, self._hasty, self._opened_at = upgrade, hasty, 0.0
        self._input, self._ended, self._more = bytearray(), False, asyncio.Event()
        self._lost = asyncio.Event()
        self._probing: asyncio.Task[None] | None = None
        self.opened = self.gone = False

    # -- from the connection -----------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Take what the client sent."""
        self._input += data
        if len(self._input) > HELD_BYTES:
            self._hold(True)
        self._more.set()

    def ended(self) -> None:
        """Note that the client sends no more."""
        self._ended = True
        self._more.set()

    def lost(self) -> None:
        """Note that the connection is gone."""
        self.gone = self._ended = True
        self._lost.set()
        self._more.set()
        self._stop_probing()

    # -- for who answers ---------------------------------------------------------------------------------------------

    def open(self, *, tty: bool, headers: Headers = ()) -> None:
        """Send the head of the answer, once. From then on all is the stream's."""
        if self.opened or self.gone:
            return
        self.opened, self._opened_at = True, asyncio.get_running_loop().time()
        self._write(self._head(tty=tty, headers=headers))
        if not tty:
            # A terminal's stream has no frames, and nothing that would be nothing.
            self._probing = asyncio.get_running_loop().create_task(self._probe())

    def answer(self, data: bytes, *, tty: bool, headers: Headers) -> None:
        """Send a whole stream at once, and end the connection."""
        self.opened, head = True, self._head(tty=tty, headers=headers)
        if self._hasty:
            self._write(head)
            asyncio.get_running_loop().call_later(PAUSE_S, self._finish, data)
        else:
            self._finish(head + data)

    def _finish(self, data: bytes) -> None:
        if not self.gone:
            self._write(data)
        self.close()

    def _head(self, *, tty: bool, headers: Headers) -> bytes:
        first = _UPGRADED if self._upgrade else "HTTP/1.1 200 OK\r\n"
        told = "".join(f"{name}: {value}\r\n" for name, value in headers)
        head = f"{first}Content-Type: {_RAW if tty else _FRAMES}\r\n{told}"
        if self._hasty:
            # The name, its colon and the two ends of lines are 14 bytes.
            head += f"X-Padding: {'-' * (HEAD_BYTES - len(head) - 15)}\r\n"
        return f"{head}\r\n".encode("latin-1")

    def refuse(self, response: bytes) -> None:
        """Send an answer that opens no stream."""
        if not self.gone:
            self.opened = True
            self._write(response)

    async def send(self, data: bytes) -> None:
        """Send what is the stream's, and wait while the client takes nothing."""
        if self.gone or not data:
            return
        if self._hasty:
            await asyncio.sleep(self._opened_at + PAUSE_S - asyncio.get_running_loop().time())
        self._write(data)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._drain()
        except TimeoutError:
            self.gone = True

    async def input(self, most: int) -> bytes:
        """Return all that the client sends until it closes its side.

        Raises:
            Refused: it is more than most bytes, or comes to no end.
        """
        data = bytearray()
        while not self._ended or self._input:
            data += self._input
            self._input.clear()
            self._hold(False)
            if len(data) > most:
                raise RefusalError(413, "body", f"stdin is larger than max_body_bytes, {most}. Send less, or raise it.")
            if self._ended:
                break
            self._more.clear()
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._more.wait()
            except TimeoutError:
                raise RefusalError(
                    400,
                    "stdin",
                    f"stdin did not end, and nothing came for {SILENCE_S:g} s: Forkpoint runs a command when it has "
                    "all of its input. Leave -i out, or close stdin.",
                ) from None
        return bytes(data)

    async def disconnected(self) -> None:
        """Return once the connection is gone."""
        await self._lost.wait()

    def close(self) -> None:
        """Send what is not sent yet, then end the connection."""
        self._stop_probing()
        if not self.gone:
            self._end()

    async def _probe(self) -> None:
        while not self.gone:
            await asyncio.sleep(PROBE_S)
            if not self.gone:
                self._write(frame(OUT, b""))

    def _stop_probing(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None


class Sink:
    """Where a process's output goes for one client. streams: those that it wants. heard: whether it has had some."""

    def __init__(
        self, send: Callable[[bytes], Awaitable[None]], streams: frozenset[int], *, tty: bool, heard: bool = False
    ) -> None:
        self._send, self._streams, self._tty, self.heard = send, streams, tty, heard

    async def take(self, kind: int, data: bytes) -> None:
        """Pass on what came on one stream."""
        self.heard = True
        if kind in self._streams:
            await self._send(data if self._tty else frame(kind, data))

    async def take_all(self, body: bytes) -> None:
        """Pass on a whole recorded answer."""
        await self._send(shown(body, self._streams, tty=self._tty))


class Audience:
    """The clients attached to one process. When the client disconnects or `detach` is called, it continues by itself.

    gone: returns when the client has. begun: called when the process runs.
    """

    def __init__(
        self, sinks: list[Sink], begun: Callable[[], None], gone: Callable[[], Awaitable[None]] | None
    ) -> None:
        self.sinks, self._begun, self._gone = sinks, begun, gone
        self._released = asyncio.Event()
        self.kept = Frames()

    async def head(self, status: int, headers: Headers) -> None:  # noqa: ARG002 - of a process they say nothing
        """See `Listener.head`."""
        self._begun()

    async def data(self, chunk: bytes) -> None:
        """See `Listener.data`."""
        for kind, data in frames(chunk):
            self.kept.add(kind, data)
            for sink in list(self.sinks):
                await sink.take(kind, data)

    @property
    def begun(self) -> bool:
        """Whether anything came yet."""
        return self.kept.size > 0

    async def detached(self) -> None:
        """Return once the client has disconnected or `detach` was called."""
        waiting: set[asyncio.Future[Any]] = {asyncio.ensure_future(self._released.wait())}
        if self._gone is not None:
            waiting.add(asyncio.ensure_future(self._gone()))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    def detach(self) -> None:
        """Let the process continue in the background."""
        self._released.set()


def shown(body: bytes, streams: frozenset[int], *, tty: bool) -> bytes:
    """Return a recorded answer as a client that wants streams reads it (pure)."""
    told = b"".join(data if tty else frame(kind, data) for kind, data in frames(body) if kind in streams)
    if not ending(body).timed_out:
        return told
    note = b"\n[forkpoint: killed: it ran for longer than the task's limits.timeout_s]\n"
    return told + (note if tty else frame(ERR, note))
