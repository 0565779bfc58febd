"""Connections that become streams."""

# Theory of operation. Docker's clients run `exec start` and `attach` over a connection that leaves HTTP ("hijacking" in
# Docker's API reference): after the head of the response, the client's bytes are stdin and ours are output.
#
# 1. `proxy.dataplane.hit_protocol` gives the connection away and from then on calls `feed`, `end_input` and `lose`.
# 2. A service reads the whole stdin with `input`, because stdin is part of a call's key, and opens the stream.
# 3. Output reaches the client through an `OutputSink` (see `output`), and `close` ends the stream.
#
# A client can die without closing its side. While a stream is open, `_probe` writes empty frames: the kernel of the
# client's machine then resets the connection, and `lose` is called.

import asyncio
from collections.abc import Awaitable, Callable

from proxy.refusals import RefusalError
from sandboxes.listener import Headers
from sandboxes.process_output import ERR, OUT, frame
from sandboxes.task_owner import TaskOwner

WRITE_TIMEOUT_S = 30.0
"""How long a client may accept no bytes. After that it is treated as disconnected."""
STDIN_TIMEOUT_S = 30.0
"""How long stdin may be silent before it ends. A longer silence means a person at a terminal, which is refused."""
MAX_BUFFERED_BYTES = 1 << 20
"""Unread bytes of stdin at which reading from the connection pauses."""
PROBE_S = 1.0
"""Interval of the empty frames that reveal a dead client, whose stdin has usually ended before. A background process is
detached this late."""
HEAD_PAUSE_S = 0.02
"""Delay between head and output for clients that lose what arrives with the head; two packets then stay apart."""
PADDED_HEAD_BYTES = 8192
"""Size of the head for Docker's Python SDK, which loses what its buffer of this size contains after the head. A head
that fills the buffer leaves no room for output, which follows `HEAD_PAUSE_S` later."""
_UPGRADED = "HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
_RAW, _FRAMES = "application/vnd.docker.raw-stream", "application/vnd.docker.multiplexed-stream"


class StreamConnection:
    """A connection that has left HTTP. It is `gone` if it is lost, or its client accepts no more bytes."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        drain: Callable[[], Awaitable[None]],
        hold: Callable[[bool], None],
        end: Callable[[], None],
        *,
        upgrade: bool,
        padded: bool,
    ) -> None:
        """Take a connection over (see `StreamTransport`). A `padded` client loses what arrives with the head."""
        self._write, self._drain, self._hold, self._end = write, drain, hold, end
        self._upgrade, self._padded, self._opened_at = upgrade, padded, 0.0
        self._input, self._input_ended, self._input_changed = bytearray(), False, asyncio.Event()
        self._lost = asyncio.Event()
        self._tasks = TaskOwner()
        self.opened = self.gone = False  # The head of the response was sent.
        self.tty = False  # The stream is a terminal's: it has no frames.

    # -- called by the connection ------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Take bytes that the client sent."""
        self._input += data
        # TCP's flow control then slows the client down, so a large stdin does not fill memory.
        if len(self._input) > MAX_BUFFERED_BYTES:
            self._hold(True)
        self._input_changed.set()

    def end_input(self) -> None:
        """Note that the client closed its side: stdin has ended."""
        self._input_ended = True
        self._input_changed.set()

    def lose(self) -> None:
        """Note that the connection is lost."""
        # Ending stdin wakes `input`; `gone` makes every later write a no-op.
        self.gone = self._input_ended = True
        self._lost.set()
        self._input_changed.set()
        self._tasks.cancel()

    # -- called by services ------------------------------------------------------------------------------------------

    def open(self, *, tty: bool, headers: Headers = ()) -> None:
        """Send the head of the response, once. Everything sent after it belongs to the stream."""
        if self.opened or self.gone:
            return
        # Marked before the write: from here on errors are reported in the stream, not as HTTP.
        self.opened, self._opened_at, self.tty = True, asyncio.get_running_loop().time(), tty
        self._write(self._head(tty=tty, headers=headers))
        if not tty:
            # A terminal's stream has no frames, so every byte of a probe would be visible.
            self._tasks.spawn("probe Docker stream", self._probe())

    def answer(self, data: bytes, *, tty: bool, headers: Headers) -> None:
        """Send a whole stream at once and close the connection. Needs no await, so that a hit is one write."""
        self.opened, head = True, self._head(tty=tty, headers=headers)
        if self._padded:
            self._write(head)
            # The caller does not await, so a timer sends the rest.
            asyncio.get_running_loop().call_later(HEAD_PAUSE_S, self._finish, data)
        else:
            self._finish(head + data)

    def _finish(self, data: bytes) -> None:
        if not self.gone:
            self._write(data)
        self.close()

    def _head(self, *, tty: bool, headers: Headers) -> bytes:
        status = _UPGRADED if self._upgrade else "HTTP/1.1 200 OK\r\n"
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        head = f"{status}Content-Type: {_RAW if tty else _FRAMES}\r\n{lines}"
        if self._padded:
            # "X-Padding: ", the end of its line and the empty line are 15 bytes.
            head += f"X-Padding: {'-' * (PADDED_HEAD_BYTES - len(head) - 15)}\r\n"
        return f"{head}\r\n".encode("latin-1")

    def refuse(self, response: bytes) -> None:
        """Send a whole HTTP response in place of a stream."""
        if not self.gone:
            self.opened = True
            self._write(response)

    async def send_error(self, text: str) -> None:
        """Send a line of stderr."""
        # On a terminal a line ends with both characters.
        await self.send(f"{text}\r\n".encode() if self.tty else frame(ERR, f"{text}\n".encode()))

    async def send(self, data: bytes) -> None:
        """Send bytes of the stream, and wait until the client accepts more."""
        if self.gone or not data:
            return
        if self._padded:
            # Only the first piece really waits: later the time is in the past.
            await asyncio.sleep(self._opened_at + HEAD_PAUSE_S - asyncio.get_running_loop().time())
        self._write(data)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._drain()
        # The client is stuck. Its process must not wait for it, so the output is dropped from now on.
        except TimeoutError:
            self.gone = True

    async def input(self, max_bytes: int) -> bytes:
        """Return the whole stdin. Raises RefusalError: 413 if it is larger than max_bytes; 400 if it does not end."""
        data = bytearray()
        while not self._input_ended or self._input:
            # Reading resumes at once, because the bytes have left the buffer.
            data += self._input
            self._input.clear()
            self._hold(False)
            if len(data) > max_bytes:
                raise RefusalError(
                    413, "body", f"stdin is larger than max_body_bytes, {max_bytes}. Send less, or raise the setting."
                )
            if self._input_ended:
                break
            self._input_changed.clear()
            try:
                async with asyncio.timeout(STDIN_TIMEOUT_S):
                    await self._input_changed.wait()
            except TimeoutError:
                raise RefusalError(
                    400, "stdin", f"stdin did not end, and was silent for {STDIN_TIMEOUT_S:g} s. Forkpoint runs a "
                    "command when it has the whole stdin. Leave -i out, or close stdin.",
                ) from None  # fmt: skip
        return bytes(data)

    async def disconnected(self) -> None:
        """Return once the connection is lost."""
        await self._lost.wait()

    def close(self) -> None:
        """Send the queued bytes, then close the connection."""
        self._tasks.cancel()
        # A lost connection is closed already.
        if not self.gone:
            self._end()

    async def _probe(self) -> None:
        while not self.gone:
            await asyncio.sleep(PROBE_S)
            if not self.gone:
                # A frame of length 0 is output of nothing: clients skip it.
                self._write(frame(OUT, b""))
