"""A tool server's answer on its way to a client while it comes: streams, and what is too large to be held."""

import asyncio
from collections.abc import Callable
from typing import Any

from proxy.dialects.base import Response
from proxy.http.asgi import Send
from sandboxes.listener import Headers

HELD_BYTES = 1 << 20
"""An answer that is announced as no longer than this is sent when it is recorded, in one piece."""
PATIENCE_S = 30.0
"""A client that takes nothing for so long is one that went away."""


class Patient:
    """Sends to a client for as long as it takes what it is sent; once it is `gone`, nothing more."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = self.gone = False

    async def _pass(self, message: dict[str, Any]) -> None:
        if self.gone:
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._send(message)
        except (TimeoutError, OSError):
            self.lose()

    def lose(self) -> None:
        """Note that the client went away."""
        self.gone = True


class Passing(Patient):
    """See `Listener`. What ends an answer is sent by `finish` alone: whoever has all of it can rely on its record.

    place: brings an answer's head into its client's form.
    """

    def __init__(self, send: Send, place: Callable[[Response], Response]) -> None:
        super().__init__(send)
        self._place = place
        self._held: bytes | None = None

    async def head(self, status: int, headers: Headers) -> None:
        length = next((value for name, value in headers if name.lower() == "content-length"), None)
        if status in (204, 304) or (length is not None and int(length) <= HELD_BYTES):
            return
        self.started = True
        # Without a length it is the last chunk that ends the answer, with one the last byte.
        self._held = None if length is None else b""
        told = self._place(Response(status, headers, b""))
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in told.headers]
        raw.append((b"cache-status", b"forkpoint; fwd=miss"))
        await self._pass({"type": "http.response.start", "status": status, "headers": raw})

    async def data(self, chunk: bytes) -> None:
        if not self.started:
            return
        if self._held is not None:
            chunk, self._held = self._held, chunk
        if chunk:
            await self._pass({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self) -> None:
        """Send the end, now that the answer is recorded."""
        await self._pass({"type": "http.response.body", "body": self._held or b"", "more_body": False})
