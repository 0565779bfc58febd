"""One client's stream of Connect messages: sent in order, kept alive, ended once."""

import asyncio
from collections import deque

from proxy.compat.e2b import connect_rpc as connect
from proxy.compat.e2b.connect_rpc import ConnectError
from proxy.compat.e2b.responses import KEEPALIVE, WATCH_BEGUN, WATCH_KEEPALIVE, ProcessEvent, started
from proxy.http.asgi import Send
from proxy.http.streaming import Patient

HELD_BYTES = 1 << 20
"""What waits for a client; whoever produces more waits too."""
FULL_BYTES = 64 << 20
"""A client for which this much waits takes nothing any more."""

MARGIN_S = 0.5
"""A client's clock for a deadline began to run before ours."""

_HEAD = [(b"content-type", connect.STREAM.encode())]


class EventStream(Patient):
    """`serve` sends what others `put`. Events may come before it serves; after its end they are dropped.

    keepalive_s: of silence, before the client is told that all is well; not before its first event.
    deadline_s: what its client allows for all of it. strict: whether it ends then; while a process runs that is ended
    with its time, its own end is waited for. form: of what is told: of a `process`, of one
    with a `terminal`, of a `watch`.
    """

    def __init__(
        self,
        send: Send,
        *,
        keepalive_s: float,
        deadline_s: float | None,
        strict: bool = True,
        form: str = "process",
    ) -> None:
        self.form = form
        super().__init__(send)
        self._keepalive_s, self._strict = keepalive_s, strict
        self._until = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._changed, self._taken = asyncio.Event(), asyncio.Event()
        self._begun = self.over = False
        self.lost = asyncio.Event()

    def begin(self, pid: int) -> None:
        """Tell that its process has started, once."""
        if not self.started:
            self.started = True
            self.put(WATCH_BEGUN if self.form == "watch" else started(pid))

    def put(self, event: ProcessEvent) -> None:
        """Send event after those before it."""
        self._put(connect.envelope(event))

    def end(self, error: ConnectError | None = None) -> None:
        """End the stream, after what was put before."""
        self._put(connect.end(error))
        self.over = True

    def lose(self) -> None:
        """See `Patient.lose`."""
        super().lose()
        self.over = True
        self.lost.set()
        self._changed.set()
        self._taken.set()

    def bind(self) -> None:
        """Be strict from now on."""
        self._strict = True
        self._changed.set()

    @property
    def overdue(self) -> bool:
        """Whether its client waits no longer, or is about to give up."""
        return self._until is not None and asyncio.get_running_loop().time() > self._until - MARGIN_S

    async def room(self) -> None:
        """Wait until the client has taken most of what was put."""
        while self._size > HELD_BYTES and not self.gone:
            self._taken.clear()
            await self._taken.wait()

    async def serve(self) -> None:
        """Send until the end, or until the client is gone."""
        await self._pass({"type": "http.response.start", "status": 200, "headers": _HEAD})
        while not self.gone and (self._waiting or not self.over):
            if not self._waiting:
                await self._quiet()
                continue
            piece = b"".join(self._waiting)
            self._waiting.clear()
            self._size, self._begun = 0, True
            self._taken.set()
            await self._pass({"type": "http.response.body", "body": piece, "more_body": True})
        if not self.gone:
            await self._pass({"type": "http.response.body", "body": b"", "more_body": False})

    async def _quiet(self) -> None:
        """Wait for something to send; when it takes long, find something."""
        now = asyncio.get_running_loop().time()
        until = self._until if self._strict else None
        left = self._keepalive_s if until is None else min(self._keepalive_s, until - now)
        self._changed.clear()
        try:
            async with asyncio.timeout(max(0.0, left)):
                await self._changed.wait()
        except TimeoutError:
            if until is not None and asyncio.get_running_loop().time() >= until:
                self.end(ConnectError("deadline_exceeded", "context deadline exceeded"))
            elif self._begun:
                self.put(WATCH_KEEPALIVE if self.form == "watch" else KEEPALIVE)

    def _put(self, piece: bytes) -> None:
        if self.over:
            return
        self._waiting.append(piece)
        self._size += len(piece)
        if self._size > FULL_BYTES:
            self.lose()
        self._changed.set()
