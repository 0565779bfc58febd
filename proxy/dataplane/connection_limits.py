"""Bounds of connections that no token protects yet: their number, and how long a client may take.

Nothing here runs for a hit: every `SWEEP_S` one timer looks at all connections, and notes in a connection's
`ConnectionWatch` since when it has been in the same phase:

    HEAD    It is in the middle of a request's head: closed with 408 after `HEAD_S`.
    BODY    It is in the middle of a request's body: closed when it is slower than `BODY_BYTES_PER_S` after `BODY_S`.
            Time in which this side did not read does not count.
    UNUSED  It has not sent a byte yet: closed after `UNUSED_S`. Between requests, `HitFirst` has a timer of its own.
    BUSY    A request is being answered: no limit, because tools may take hours. But a client that does not read its
            response for `UNREAD_S` is cut off.

If there are too many connections, the oldest that are in none of their requests make room for new ones.
"""

import asyncio
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Protocol

import structlog

log = structlog.get_logger()

SWEEP_S = 5.0
"""Interval of the look at all connections, and so the precision of the limits below."""
HEAD_S = 30.0
"""Longest time from the first byte of a request to the end of its head. nginx's default is 60 s."""
BODY_S, BODY_BYTES_PER_S = 60.0, 16 << 10
"""How long a body may take without regard to its length, and the slowest average rate beyond that."""
UNUSED_S = 120.0
"""How long a new connection may send nothing."""
UNREAD_S = 60.0
"""How long a client may leave its response unread. Nothing less than one byte in that time is too slow."""
_WARN_EVERY_S = 60.0
_ROOM = 256
"""How many connections are closed when there are too many: as many new ones come before the next search."""
_AT_ONCE = 512
"""How many connections are looked at in one turn of the event loop."""
_SPARE_DESCRIPTORS = 512
"""Descriptors that connections never get: sandboxes, the store and snapshots need them."""


class Phase(Enum):
    """What a connection's client has to do next; see the module."""

    HEAD = 0
    BODY = 1
    UNUSED = 2
    BUSY = 3


@dataclass(slots=True)
class ConnectionWatch:
    """What the last look at a connection noted."""

    phase: tuple[Phase, int] = (Phase.UNUSED, 0)  # The phase, with the number of its request.
    since_s: float = 0.0  # When the phase began, by the loop's clock.
    received_bytes: int = 0  # How much of all bodies had been received then.
    unread_bytes: int = 0  # How much of the responses is not sent yet.
    unread_since_s: float = 0.0  # Since when that has not become less.


class WatchedConnection(Protocol):
    """A connection as the limits see it."""

    watch: ConnectionWatch  # What the last look noted.

    def phase(self) -> tuple[Phase, int]:
        """Return the phase, and the number of the request that it belongs to."""
        ...

    def received_bytes(self) -> int:
        """Return how many bytes of bodies were received."""
        ...

    def is_held_up(self) -> bool:
        """Return whether this side does not read at the moment."""
        ...

    def unread_bytes(self) -> int:
        """Return how many bytes wait for the client to read; 0 for a stream, whose client may take its time."""
        ...

    def is_closed(self) -> bool:
        """Return whether the connection is closed."""
        ...

    def time_out(self) -> None:
        """Close the connection, with 408 if nothing of a response was sent."""
        ...

    def abort(self) -> None:
        """Close the connection at once, whatever is unsent."""
        ...


class NoLimits:
    """For connections of proxies that this one trusts, whose clients have limits there."""

    def admit(self, connection: WatchedConnection, loop: asyncio.AbstractEventLoop) -> bool:  # noqa: ARG002
        """Return True: there is room."""
        return True

    def discard(self, connection: WatchedConnection) -> None:
        """Do nothing."""


class ConnectionLimits:
    """The connections of one server."""

    def __init__(self, max_connections: int) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Some descriptors are left for sandboxes, files and the database, whatever the setting says.
        self.limit = max(16, min(max_connections, soft * 3 // 4 - _SPARE_DESCRIPTORS))
        # A dictionary keeps the order in which connections came.
        self._live: dict[WatchedConnection, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._warned_at_s = float("-inf")

    def admit(self, connection: WatchedConnection, loop: asyncio.AbstractEventLoop) -> bool:
        """Count a new connection; return False if there is no room for it."""
        # The sweep runs only while there are connections.
        if self._timer is None:
            self._timer = loop.call_later(SWEEP_S, self._sweep, loop)
        if len(self._live) >= self.limit and not self._make_room(loop.time()):
            return False
        # Both clocks begin now: a connection that never sends a byte is in its first phase from here on.
        connection.watch.since_s = connection.watch.unread_since_s = loop.time()
        self._live[connection] = None
        return True

    def discard(self, connection: WatchedConnection) -> None:
        """Forget a connection that is closed."""
        self._live.pop(connection, None)

    def _make_room(self, now_s: float) -> bool:
        if now_s - self._warned_at_s > _WARN_EVERY_S:
            self._warned_at_s = now_s
            log.warning(
                "all connections are in use: idle ones are closed. Raise max_connections or the limit of open files, "
                "or find out which client opens so many",
                connections=len(self._live),
            )
        # First those that never completed a request.
        for phases, most in (((Phase.UNUSED,), _ROOM), ((Phase.HEAD,), _ROOM), ((Phase.BUSY,), _ROOM // 16)):
            chosen = (each for each in self._live if each.is_closed() or self._is_in(each, phases))
            # Several at once: to find the first takes a look at all that are busy.
            victims = list(islice(chosen, most))
            for connection in victims:
                connection.abort()
                self.discard(connection)
            if victims:
                return True
        return False

    @staticmethod
    def _is_in(connection: WatchedConnection, phases: tuple[Phase, ...]) -> bool:
        phase, number = connection.phase()
        # A busy connection may be closed only between two requests.
        return phase in phases and (phase is not Phase.BUSY or number == -1)

    def _sweep(self, loop: asyncio.AbstractEventLoop, rest: Iterator[WatchedConnection] | None = None) -> None:
        """Look at some connections; the event loop serves others before the next ones."""
        some = list(islice(rest or (), _AT_ONCE))
        for connection in some:
            if connection.is_closed():
                self.discard(connection)
            else:
                self._look(connection, loop.time())
        # More may follow in this sweep. Without any left, the next sweep looks at those that are live then.
        if some:
            self._timer = loop.call_later(0, self._sweep, loop, rest)
        elif self._live:
            self._timer = loop.call_later(SWEEP_S, self._sweep, loop, iter(list(self._live)))
        else:
            self._timer = None

    def _look(self, connection: WatchedConnection, now_s: float) -> None:
        watch, phase = connection.watch, connection.phase()
        if phase != watch.phase:
            watch.phase, watch.since_s, watch.received_bytes = phase, now_s, connection.received_bytes()
        elif connection.is_held_up():
            # This side does not read, so the client is not to blame for the time since the last sweep.
            watch.since_s += SWEEP_S
        unread_bytes = connection.unread_bytes()
        # Any byte that the client has taken counts as reading.
        if not unread_bytes or unread_bytes < watch.unread_bytes:
            watch.unread_since_s = now_s
        watch.unread_bytes = unread_bytes
        elapsed_s = now_s - watch.since_s
        received_bytes = connection.received_bytes() - watch.received_bytes
        # `abort` and not `close`, which would wait until the client takes what is unsent.
        if now_s - watch.unread_since_s > UNREAD_S:
            connection.abort()
        elif (
            (phase[0] is Phase.HEAD and elapsed_s > HEAD_S)
            or (phase[0] is Phase.BODY and elapsed_s > BODY_S + received_bytes / BODY_BYTES_PER_S)
            or (phase[0] is Phase.UNUSED and elapsed_s > UNUSED_S)
        ):
            connection.time_out()
