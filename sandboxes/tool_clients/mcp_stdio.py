"""MCP over a server's stdin and stdout: one message per line.

The pipes outlive a conversation, which may have left half a line in them when it was cut off. So the first line of a
later one is skipped if it is not JSON.
"""

import os
from collections import deque
from collections.abc import Sequence

import orjson

from sandboxes.linux.descriptors import unread_bytes
from sandboxes.tool_clients.descriptors import read_some, write_all
from sandboxes.tool_clients.http1 import MalformedResponseError
from sandboxes.tool_clients.lines import Lines
from sandboxes.tool_clients.mcp import ID, VERSION, Message, Receive, cancellation, parsed


class StdioTransport:
    """An `McpTransport` that sends lines over two descriptors."""

    revisions = (VERSION,)
    note = ""  # The pipes are the session, so there is nothing to remember.

    def __init__(self, fds: Sequence[int], *, max_bytes: int, fresh: bool) -> None:
        """Take over the pipes to a server's stdin and from its stdout; `max_bytes` limits the whole conversation."""
        # `fresh` says that the process has just started, so nothing can be left in the pipes.

        # A conversation that was cut off may have left the second half of a line in the pipe.
        self._may_be_half = not fresh
        self._write_fd, self._read_fd = fds[0], fds[1]
        self._max_bytes = max_bytes
        self._cut, self._lines = Lines(), deque[bytes]()
        self._received_bytes = 0
        # How many bytes had come before the last line, and up to its end.
        self._began_at = self._ended_at = 0
        for fd in fds:
            os.set_blocking(fd, False)

    def begin(self, revision: str) -> None:
        """Do nothing: there is one revision."""

    def close(self) -> None:
        """Close both descriptors."""
        for fd in (self._write_fd, self._read_fd):
            os.close(fd)

    async def exchange(self, request: Message, receive: Receive, silence_s: float) -> None:
        """Send a request, and pass on lines up to its response."""
        # Responses that came before the request: of a conversation that was cut off, or of a server that answers twice.
        earlier_bytes = self._received_bytes + unread_bytes(self._read_fd)
        await self.send(request, silence_s)
        while True:
            message = await self._next(silence_s)
            stale = "method" not in message and (message.get("id") != ID or self._began_at < earlier_bytes)
            if not stale and await receive(message):
                return

    async def cancel(self, silence_s: float) -> None:
        """Send the notification that cancels the request under way."""
        await self.send(cancellation(), silence_s)

    async def send(self, message: Message, silence_s: float) -> None:
        """Send a message as a line."""
        # A server that does not read its stdin fills the pipe; the wait is then limited like any silence.
        await write_all(self._write_fd, orjson.dumps(message) + b"\n", silence_s)

    async def _next(self, silence_s: float) -> Message:
        while True:
            while self._lines:
                line = self._lines.popleft()
                self._began_at, self._ended_at = self._ended_at, self._ended_at + len(line) + 1
                message = _parse(line) if line.strip() else None
                # Only the first line can be half; every later one begins after a line end.
                half, self._may_be_half = self._may_be_half, False
                if message is not None:
                    return message
                # A blank line carries no message, at the start or later.
                if half or not line.strip():
                    continue
                raise MalformedResponseError(f"it sends a line that is not JSON-RPC: {line[:80]!r}")
            # Counted as bytes arrive, so a line without an end is limited as well.
            if self._received_bytes > self._max_bytes:
                raise MalformedResponseError(f"it sends more than {self._max_bytes} bytes for one request")
            data = await read_some(self._read_fd, silence_s)
            if not data:
                # An empty read means that every process with the other end has closed it or ended.
                raise MalformedResponseError("it closed its stdout without a response")
            self._lines += self._cut.feed(data)
            self._received_bytes += len(data)


def _parse(line: bytes) -> Message | None:
    try:
        message = parsed(line)
    except orjson.JSONDecodeError:
        return None
    return message if isinstance(message, dict) else None
