"""Responses on their way to a client while the call still runs: relayed bodies and server-sent events.

The end of a response is sent only after the record is written: a client with all of a response can rely on its record.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from proxy.dialects.base import Response
from proxy.http.asgi import Send
from sandboxes.listener import Headers

HELD_BYTES = 1 << 20
"""A response that announces at most this length is sent in one piece, after it was recorded."""
PATIENCE_S = 30.0
"""A client that accepts nothing for this long counts as disconnected, so that it does not hold a sandbox."""
COMMENT_S = 5.0
"""The interval of comments to a client that waits for events: some give up after ten seconds without a byte."""
COMMENT = b": still at it\n\n"
"""A comment of the event stream format, which clients ignore."""
_EVENTS_HEAD = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"cache-status", b"forkpoint; fwd=miss"),
]


class PatientSender:
    """Sends ASGI messages to a client until it disconnects or accepts nothing for `PATIENCE_S`: then it is `gone`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False  # Whether the head of the response was sent.
        self.gone = False

    async def _pass(self, message: dict[str, Any]) -> None:
        if self.gone:
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._send(message)
        except (TimeoutError, OSError):
            self.lose()

    def lose(self) -> None:
        """Count the client as disconnected."""
        self.gone = True


class ResponseRelay(PatientSender):
    """A listener that relays a response without length, or beyond `HELD_BYTES`, with its head in `client_form`."""

    def __init__(self, send: Send, client_form: Callable[[Response], Response]) -> None:
        super().__init__(send)
        self._client_form = client_form
        self._last: bytes | None = None

    async def head(self, status: int, headers: Headers) -> None:
        """Send the head, if the response is relayed."""
        length = next((value for name, value in headers if name.lower() == "content-length"), None)
        if status in (204, 304) or (length is not None and int(length) <= HELD_BYTES):
            return
        self.started = True
        # Hold back what tells the client that the response is complete: with a length that is the last chunk of the
        # body, without one it is the last chunk of HTTP's own framing.
        self._last = None if length is None else b""
        response = self._client_form(Response(status, headers, b""))
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in response.headers]
        raw.append((b"cache-status", b"forkpoint; fwd=miss"))
        await self._pass({"type": "http.response.start", "status": status, "headers": raw})

    async def data(self, chunk: bytes) -> None:
        """Send a chunk of the body, or hold it back if it may be the last."""
        if not self.started:
            return
        if self._last is not None:
            chunk, self._last = self._last, chunk
        if chunk:
            await self._pass({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self) -> None:
        """Send the end of the response, after it was recorded."""
        await self._pass({"type": "http.response.body", "body": self._last or b"", "more_body": False})


class ServerEvents(PatientSender):
    """Sends a tool server's messages as events (`event_of`: one for this client, or empty), at last the response."""

    def __init__(self, send: Send, event_of: Callable[[bytes], bytes], extra: Headers, *, accepted: bool) -> None:
        super().__init__(send)
        self._event_of, self._accepted = event_of, accepted
        self._extra = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in extra]
        self._cancelled = asyncio.Event()

    async def head(self, status: int, headers: Headers) -> None:
        """Ignore the head: messages have none."""

    async def data(self, chunk: bytes) -> None:
        """Send a message as an event."""
        event = self._event_of(chunk) if self._accepted else b""
        if event:
            await self._write(event)

    async def comment(self) -> None:
        """Send a comment, so that the client does not give up."""
        if self._accepted:
            await self._write(COMMENT)

    async def finish(self, event: bytes) -> None:
        """Send the response as the last event."""
        await self._write(event)
        await self._pass({"type": "http.response.body", "body": b"", "more_body": False})

    def cancel(self) -> None:
        """Note that the client has cancelled the call."""
        self._cancelled.set()

    async def cancelled(self) -> None:
        """Return once the client has cancelled the call."""
        await self._cancelled.wait()

    async def _write(self, event: bytes) -> None:
        if not self.started:
            self.started = True
            await self._pass({"type": "http.response.start", "status": 200, "headers": _EVENTS_HEAD + self._extra})
        await self._pass({"type": "http.response.body", "body": event, "more_body": True})
