"""An answer on its way to a client as server-sent events: what is said while it is made, then the answer itself."""

import asyncio
from collections.abc import Callable

from proxy.http.asgi import Send
from proxy.http.streaming import Patient
from sandboxes.listener import Headers

COMMENT_S = 5.0
"""A client that hears nothing for so long is sent a comment: some wait for no more than ten seconds for any byte."""
COMMENT = b": still at it\n\n"
_HEAD = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"cache-status", b"forkpoint; fwd=miss"),
]


class EventStream(Patient):
    """See `Listener`: each piece of data is one thing that is said. Nothing is sent before there is something to say.

    form: makes an event of what is said, for this client; empty for what it does not want. speaks: whether the client
    takes events at all. It may cancel all the same.
    """

    def __init__(self, send: Send, form: Callable[[bytes], bytes], extra: Headers, *, speaks: bool) -> None:
        super().__init__(send)
        self._form, self._speaks = form, speaks
        self._extra = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in extra]
        self._cancelled = asyncio.Event()

    async def head(self, status: int, headers: Headers) -> None:
        """See `Listener`. What is said has no head."""

    async def data(self, chunk: bytes) -> None:
        """See `Listener`."""
        event = self._form(chunk) if self._speaks else b""
        if event:
            await self._write(event)

    async def comment(self) -> None:
        """Tell the client that it is not forgotten."""
        if self._speaks:
            await self._write(COMMENT)

    async def finish(self, event: bytes) -> None:
        """Send the answer, and the end."""
        await self._write(event)
        await self._pass({"type": "http.response.body", "body": b"", "more_body": False})

    def cancel(self) -> None:
        """Note that the client wants no answer any more."""
        self._cancelled.set()

    async def cancelled(self) -> None:
        """See `Cancellable`."""
        await self._cancelled.wait()

    async def _write(self, event: bytes) -> None:
        if not self.started:
            self.started = True
            await self._pass({"type": "http.response.start", "status": 200, "headers": _HEAD + self._extra})
        await self._pass({"type": "http.response.body", "body": event, "more_body": True})
