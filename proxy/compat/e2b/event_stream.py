"""One client's stream of Connect messages: sent in order, kept alive, ended once.

Producers call `put` and `end`, which never block. `serve` runs in the request's own task and does all sending, so a
client that reads slowly delays only the producers that wait for it with `wait_for_space`.
"""

import asyncio
from collections import deque
from typing import Literal

from typing_extensions import override

from proxy.compat.e2b import connect_rpc as connect
from proxy.compat.e2b.connect_rpc import ConnectError
from proxy.compat.e2b.responses import KEEPALIVE, WATCH_KEEPALIVE, WATCH_STARTED, ProcessEvent, started
from proxy.http.asgi import Send
from proxy.http.streaming import PatientSender

MAX_WAITING_BYTES = 1 << 20
"""Largest amount of unsent events before `wait_for_space` blocks. Producers thus run at the client's speed."""
MAX_UNSENT_BYTES = 64 << 20
"""Largest amount of unsent events in memory. A client that falls this far behind is treated as disconnected."""
DEADLINE_MARGIN_S = 0.5
"""How much earlier than ours a client's deadline may pass: its clock started before the request arrived here."""

StreamForm = Literal["process", "terminal", "watch"]
_HEAD = [(b"content-type", connect.STREAM.encode())]


class EventStream(PatientSender):
    """A response that is a stream of events. Events may be put before `serve` runs, and are dropped after the end."""

    def __init__(
        self,
        send: Send,
        *,
        keepalive_s: float,
        deadline_s: float | None,
        strict: bool = True,
        form: StreamForm = "process",
    ) -> None:
        """Create a stream. After `keepalive_s` of silence a keepalive is sent, but none before the first event.

        A strict stream ends after `deadline_s`, the client's limit for the response. It is not strict while a process
        runs: the sandbox kills the process at its own limit, and the stream ends with it.
        """
        super().__init__(send)
        self.form: StreamForm = form  # Which kind of events the stream carries.
        self.closed = False  # No event is accepted any more: the stream was ended, or its client has gone.
        self.lost = asyncio.Event()  # Set when the client has gone.
        self._keepalive_s, self._strict = keepalive_s, strict
        self._deadline = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._changed, self._sent = asyncio.Event(), asyncio.Event()
        self._has_sent = False

    def begin(self, pid: int) -> None:
        """Send the start event, once."""
        if not self.started:
            self.started = True
            self.put(WATCH_STARTED if self.form == "watch" else started(pid))

    def put(self, event: ProcessEvent) -> None:
        """Queue an event."""
        self._put(connect.envelope(event))

    def end(self, error: ConnectError | None = None) -> None:
        """End the stream after the queued events, with an error if there is one."""
        self._put(connect.end(error))
        self.closed = True

    @override
    def lose(self) -> None:
        super().lose()
        self.closed = True
        self.lost.set()
        # Wake `serve` and the producers: nothing that they wait for will happen.
        self._changed.set()
        self._sent.set()

    def enforce_deadline(self) -> None:
        """End the stream at its deadline from now on."""
        # `serve` computes its timeout again when it is woken.
        self._strict = True
        self._changed.set()

    @property
    def overdue(self) -> bool:
        """Whether the client's deadline has passed, or is about to."""
        return self._deadline is not None and asyncio.get_running_loop().time() > self._deadline - DEADLINE_MARGIN_S

    async def wait_for_space(self) -> None:
        """Wait until at most `MAX_WAITING_BYTES` are unsent."""
        while self._unsent_bytes > MAX_WAITING_BYTES and not self.gone:
            self._sent.clear()
            await self._sent.wait()

    async def serve(self) -> None:
        """Send events until the stream ends or the client has gone."""
        await self._pass({"type": "http.response.start", "status": 200, "headers": _HEAD})
        while not self.gone and (self._unsent or not self.closed):
            if not self._unsent:
                await self._wait_for_event()
                continue
            # Everything queued goes out in one write: a busy process makes many small events.
            piece = b"".join(self._unsent)
            self._unsent.clear()
            # Producers may queue the next events while this piece is being sent.
            self._unsent_bytes, self._has_sent = 0, True
            self._sent.set()
            await self._pass({"type": "http.response.body", "body": piece, "more_body": True})
        if not self.gone:
            await self._pass({"type": "http.response.body", "body": b"", "more_body": False})

    async def _wait_for_event(self) -> None:
        """Wait for an event. Put a keepalive after too long a silence, and the end when the deadline passes."""
        clock = asyncio.get_running_loop().time
        deadline = self._deadline if self._strict else None
        pause_s = self._keepalive_s if deadline is None else min(self._keepalive_s, deadline - clock())
        # Cleared before waiting, with no await in between: a `put` since the check sets it again.
        self._changed.clear()
        try:
            async with asyncio.timeout(max(0.0, pause_s)):
                await self._changed.wait()
        except TimeoutError:
            if deadline is not None and clock() >= deadline:
                self.end(ConnectError("deadline_exceeded", "context deadline exceeded"))
            elif self._has_sent:
                self.put(WATCH_KEEPALIVE if self.form == "watch" else KEEPALIVE)

    def _put(self, piece: bytes) -> None:
        # A late event after the end is dropped: Connect allows nothing after the last envelope.
        if self.closed:
            return
        self._unsent.append(piece)
        self._unsent_bytes += len(piece)
        # Only a producer that ignores `wait_for_space` gets here: polls, which must not wait for one client.
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self.lose()
        self._changed.set()
