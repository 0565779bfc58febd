"""HTTP connections: a known call is answered where its bytes arrive, and uvicorn serves everything else.

`HitFirst` is the asyncio protocol of a connection. It reads requests with a parser of its own and owns an unmodified
uvicorn protocol, which it calls as asyncio would. A connection is always in one of five states:

READING   Every request was answered. Bytes are held until they are a request, or the head of one with a large body;
            then
            1. a request of a task that another worker has: the connection goes there. -> GIVEN
               So do, in a cluster, those of 3. and WebSockets: to the owner of their task.
            2. a whole request with a known answer: the response is one write, with no task and no event. -> READING
            3. a request with which a client turns the connection into a stream of bytes (Docker). -> STREAM
            4. an upgrade (WebSocket), or bytes that are not HTTP. -> PASSED
            5. anything else: uvicorn gets the held bytes. -> SERVED
SERVED    uvicorn has requests to read or to answer, and gets each byte as it comes. The parser reads along, because
          only it knows where requests end; `report_responses` counts the answers. When all requests that began have
          ended and were answered, the connection goes back to READING, at a boundary between two requests.
PASSED    uvicorn has the connection for good, and the parser reads no more.
STREAM    The connection belongs to a `Stream`.
GIVEN     The connection belongs to another process or a tunnel, which has got its socket and the unanswered bytes.

Because uvicorn sees only its own requests, its keep-alive timer may fire while hits are answered. `UvicornTransport`
therefore ignores `close` in READING, where only `HitFirst` closes an idle connection.
"""

import asyncio
from collections.abc import Callable
from enum import Enum
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, cast

import httptools
import uvicorn
from typing_extensions import override
from uvicorn.server import ServerState

from proxy.dataplane import closing_responses
from proxy.dataplane.app import DataPlane
from proxy.dataplane.connection_limits import ConnectionLimits, ConnectionWatch, NoLimits, Phase
from proxy.dataplane.handover import Handover, first_scope, give_when_sent
from proxy.dataplane.idle_timer import IdleTimer
from proxy.dataplane.request_reader import RequestReader
from proxy.dataplane.taken_connection import MAX_STREAM_REQUEST_BYTES, Streams, TakenConnection, split_request
from proxy.dataplane.uvicorn_end import UvicornEnd
from proxy.http.asgi import Scope
from proxy.telemetry.histogram import Histogram

if TYPE_CHECKING:
    from proxy.compat.endpoints import Stream

MAX_HELD_BYTES = 64 << 10
"""Limits the bytes of a request that are held until it is complete. uvicorn gets a longer one piece by piece."""


class _State(Enum):
    READING = 0
    SERVED = 1
    PASSED = 2
    STREAM = 3
    GIVEN = 4
    LOGGED = 5  # See `logged_hits`.


def protocol_for(
    data_plane: DataPlane,
    handover: Handover | None = None,
    *,
    is_limited: bool = True,
    kind: "type[HitFirst] | None" = None,
) -> type["HitFirst"]:
    """Return the protocol class of a server of `report_responses(data_plane)`; the handover is for workers."""
    members = {
        "data_plane": data_plane, "known": data_plane.known, "handover": handover,
        "hit_s": data_plane.engine.counts.hit_s,
        "streams": Streams(data_plane), "tunnels": data_plane.tunnels if is_limited else None,
        "limits": ConnectionLimits(data_plane.engine.settings.max_connections) if is_limited else NoLimits(),
    }  # fmt: skip
    return type("HitFirstFor", (kind or HitFirst,), members)


class HitFirst(asyncio.Protocol):
    """One connection. The server makes it with the arguments that it gives to uvicorn's own protocol classes."""

    data_plane: ClassVar[DataPlane]
    known: Callable[[Scope, bytes], bytes | None]
    hit_s: ClassVar[Histogram]
    streams: ClassVar[Streams]
    limits: ClassVar[ConnectionLimits | NoLimits]
    handover: ClassVar[Handover | None]
    tunnels: ClassVar[Handover | None]

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], **_: object
    ) -> None:
        self._config, self._server_state, self._app_state = config, server_state, app_state
        self._loop = asyncio.get_running_loop()
        self._state, self._reader = _State.READING, RequestReader()
        self._held = b""
        self._answered, self._began = 0, 0.0
        self._idle = IdleTimer(self.expire, config.timeout_keep_alive, self._loop)
        self._writable = asyncio.Event()
        # Starts writable: asyncio reports only the changes of a transport's buffer.
        self._writable.set()
        self._body_at: int | None = None
        self._stream: Stream | None = None
        self.expected: object | None = None
        self.watch = ConnectionWatch()
        self.received_before = b""

    # -- called by the event loop ------------------------------------------------------------------------------------

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._uvicorn = UvicornEnd(self, self._transport, self._config, self._server_state, self._app_state)
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        if not self.limits.admit(self, self._loop):
            self._transport.write(closing_responses.CROWDED)
            self._transport.close()
            return
        # The server calls `shutdown` of what it finds here, and waits until it is gone.
        self._server_state.connections.add(cast("Any", self))
        if self.received_before:
            # From another process, which has read it of this connection.
            self.data_received(self.received_before)

    @override
    def data_received(self, data: bytes) -> None:
        if self._state is _State.READING:
            # One packet mostly holds one request, so the common case keeps the received bytes without a copy.
            self._held = self._held + data if self._held else data
            self._read(data)
        elif self._state is _State.STREAM:
            assert self._stream is not None
            self._stream.feed(data)
        else:
            # The reader counts first: if a response ends within uvicorn's call, the requests in these bytes must be
            # counted.
            if self._state is _State.SERVED and not self._read_along(data):
                return
            self._uvicorn.feed(data)

    @override
    def eof_received(self) -> bool:
        if self._stream is not None:
            # The client has closed its stdin and still reads the output.
            self._stream.end_input()
            # True keeps the transport open for writing (`asyncio.Protocol.eof_received`).
            return True
        return False

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self.limits.discard(self)
        # A stream may wait in `_drain`, and nothing will drain a lost connection.
        self._writable.set()
        if self._stream is not None:
            self._stream.lose()
        self._uvicorn.lose(exc)

    @override
    def pause_writing(self) -> None:
        self._writable.clear()
        self._uvicorn.pause_writing()

    @override
    def resume_writing(self) -> None:
        self._writable.set()
        self._uvicorn.resume_writing()

    # -- called by the server, by `report_responses` and by `UvicornTransport` ---------------------------------------

    def shutdown(self) -> None:
        """Close a connection on which no request is unanswered. uvicorn's protocol closes it after the response."""
        # In SERVED, uvicorn's own protocol is in the server's set as well. A STREAM ends through its task.
        if self._state is _State.READING:
            self._transport.close()

    def response_ended(self) -> None:
        """Note that uvicorn has written the end of a response."""
        self._uvicorn.begin_response()
        self._answered += 1
        self._idle.restart()
        # All three are equal only between two requests: none half read, none half answered, none pipelined behind.
        if self._state is _State.SERVED and self._reader.begun == self._reader.ended == self._answered:
            self._state, self._reader.keeps_body = _State.READING, True

    def release(self, expected: object | None) -> None:
        """Note that a request was handled, or never will be; see `ReportedConnection`."""
        if expected is not None:
            self.data_plane.handled(expected)

    @property
    def is_idle(self) -> bool:
        """Whether uvicorn has nothing to do on this connection, so that a `close` of its comes from a timer."""
        return self._state is _State.READING

    def hand_over(self) -> None:
        """Leave the connection to the WebSocket protocol that takes this one's position."""
        self._state = _State.PASSED
        self._leave()

    # -- called by `ConnectionLimits` --------------------------------------------------------------------------------

    def phase(self) -> tuple[Phase, int]:
        """Return what the client has to do next, and the number of its request; -1 between two requests."""
        reader = self._reader
        if self._state is _State.READING and not self._held:
            return (Phase.BUSY, -1) if reader.ended else (Phase.UNUSED, 0)
        if self._state is _State.READING and self._body_at is not None:
            # For the parser, a request that asks for an upgrade ends with its head.
            return Phase.BODY, reader.begun
        if self._state in {_State.PASSED, _State.STREAM} or reader.begun == reader.ended:
            return Phase.BUSY, reader.ended
        return (Phase.BODY if reader.has_head else Phase.HEAD), reader.begun

    def received_bytes(self) -> int:
        """Return how many bytes of bodies were received."""
        return self._reader.received_bytes

    def is_held_up(self) -> bool:
        """Return whether uvicorn does not read, because the application has not taken what is there."""
        return self._uvicorn.is_held_up

    def unread_bytes(self) -> int:
        """Return how many bytes wait for the client to read; 0 for a stream, whose client may take its time."""
        return 0 if self._state is _State.STREAM else self._transport.get_write_buffer_size()

    def is_closed(self) -> bool:
        """Return whether the connection is closed."""
        return self._transport.is_closing()

    def time_out(self) -> None:
        """Close the connection. A client that has only begun its first request gets the reason."""
        if self._state is _State.READING and self._held:
            self._transport.write(closing_responses.TOO_SLOW)
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, whatever is unsent."""
        self._transport.abort()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> None:
        """Read the last of the held bytes, and decide which part answers once there is enough to decide on."""
        reader = self._reader
        # After an upgrade the parser takes no more bytes; what follows its head only collects in the held bytes.
        if self._body_at is None and not self._parse(data):
            return
        # A head that is not complete has no scope: its last header may still be cut in half.
        scope = reader.scope(self._scheme) if reader.has_head else None
        unanswered = reader.begun - self._answered
        if unanswered == 0:
            # Only the blank lines that clients may send between requests (RFC 9112, 2.2).
            self._held = b""
        elif self.handover is not None and (process := self._elsewhere(self.handover, scope, unanswered)) is not None:
            self._give(self.handover, process)
        # A stream takes the connection over, so it must be the only request on it.
        elif scope is not None and unanswered == 1 and self.streams.may_open(scope, reader):
            self._stream_when_whole(scope)
        elif self._body_at is not None:
            self._serve_upgrade(scope if unanswered == 1 else None)
        elif unanswered == 1 and reader.ended == reader.begun:
            if scope is None or not self._answer(scope):
                # uvicorn makes a task of the request. Until that runs, a hit on another connection must not overtake.
                # The tree does not know the call, or the client needs more than one write. uvicorn gets the very
                # bytes that arrived.
                self._serve_request(None if scope is None else self.data_plane.expect(scope))
        elif unanswered > 1 or len(self._held) > MAX_HELD_BYTES or (reader.has_head and not self._body_follows):
            # Several requests at once (pipelining) need answers in their order, which uvicorn keeps; a large body may
            # come too slowly to hold. Many clients send a small one in a packet of its own, right behind the head.
            self._serve(_State.SERVED)

    @property
    def _body_follows(self) -> bool:
        """Whether the client sends a small body, without waiting for a `100 Continue`."""
        return not self._reader.expects_continue and 0 < self._reader.content_length <= MAX_HELD_BYTES

    def _serve_upgrade(self, scope: Scope | None) -> None:
        """Give uvicorn a request that asks for another protocol than Docker's streams."""
        if self._reader.wants_websocket:
            tunnels = self.tunnels
            if scope is not None and tunnels is not None and (end := tunnels.elsewhere(scope)) is not None:
                self._give(tunnels, end)
                return
            # The parser cannot follow what comes after the handshake.
            self._serve(_State.PASSED)
        elif self._reader.content_length or self._reader.begun - self._answered > 1:
            # No parser reads a body behind an upgrade.
            self._refuse()
        else:
            # A server may ignore an upgrade (RFC 9110, 7.8), as curl's to HTTP/2.
            self._held = self._reader.without_upgrade(b"")
            self._serve(_State.SERVED)

    def _parse(self, data: bytes) -> bool:
        """Parse the last of the held bytes; return whether they are HTTP. If not, the connection is done with here."""
        try:
            self._reader.feed(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The offset counts within the last piece, but the body is cut from all held bytes.
            self._body_at = len(self._held) - len(data) + upgrade.args[0]
        except httptools.HttpParserError:
            # Bytes that break a rule of ours may be valid for uvicorn, so it must not see them.
            if self._reader.is_refused:
                self._refuse()
            else:
                self._serve(_State.PASSED)
            return False
        return True

    def _answer(self, scope: Scope) -> bool:
        reader = self._reader
        # A client that does not read gets no more: uvicorn waits until it does.
        if not reader.is_plain or not self._writable.is_set() or self._transport.is_closing():
            # `known` has no await, so no other request of the rollout can come between this check and the write.
            return False
        self._began = perf_counter()
        response = self.known(scope, reader.body)
        if response is None:
            return False
        self._write(response)
        return True

    def _write(self, response: bytes) -> None:
        self._held = b""
        self._transport.write(response)
        self._server_state.total_requests += 1
        self._answered += 1
        self._idle.restart()
        self.hit_s.observe(perf_counter() - self._began)

    def _serve_request(self, expected: object | None) -> None:
        self.expected = expected
        if not self._serve(_State.SERVED):
            # uvicorn refuses the request by itself, so no task reports that it was handled.
            self.release(expected)
            self.expected = None

    def _serve(self, state: _State) -> bool:
        # The state changes before uvicorn sees the bytes: it may close the connection while it reads them, and `close`
        # is ignored in READING.
        held, self._held, self._state = self._held, b"", state
        # uvicorn collects the body itself now; keeping it here too would hold each upload twice.
        self._body_at, self._reader.keeps_body, self._reader.body = None, False, b""
        return self._uvicorn.begin(held, is_writable=self._writable.is_set())

    def _read_along(self, data: bytes) -> bool:
        """Follow where requests begin and end; return whether uvicorn may have the bytes."""
        try:
            self._reader.feed(data)
        except httptools.HttpParserUpgrade:
            if not self._reader.wants_websocket:
                self._refuse()
                return False
            # From its head on, the bytes are no longer HTTP.
            self._state = _State.PASSED
        except httptools.HttpParserError:
            if self._reader.is_refused:
                self._refuse()
                return False
            # uvicorn's parser meets the same error and answers it.
            self._state = _State.PASSED
        return True

    def _refuse(self) -> None:
        self._state = _State.PASSED
        too_large = self._reader.is_too_large
        self._transport.write(closing_responses.TOO_LARGE if too_large else closing_responses.INVALID)
        self._transport.close()

    # -- connections that other processes answer ---------------------------------------------------------------------

    def _elsewhere(self, handover: Handover, scope: Scope | None, unanswered: int) -> int | None:
        """Return the process that answers the first of the held requests; None for this one, or an incomplete head."""
        first = scope if unanswered == 1 else first_scope(self._held, self._scheme)
        return None if first is None or self._transport.is_closing() else handover.elsewhere(first)

    def _give(self, handover: Handover, process: int) -> None:
        held, self._held, self._state = self._held, b"", _State.GIVEN
        give_when_sent(handover, process, self._transport, held)

    # -- the end of a connection -------------------------------------------------------------------------------------

    def expire(self) -> bool:
        """Close the connection if it is between two requests; see `IdleConnection`."""
        # Held bytes are half a request. Its client is slow but not idle.
        if self.is_idle and not self._held:
            self._transport.close()
            return False
        return self._state in {_State.READING, _State.SERVED}

    def _leave(self) -> None:
        # Without this, a shutdown would wait for a connection that no longer exists.
        self._server_state.connections.discard(cast("Any", self))
        self._idle.cancel()

    # -- connections that become streams -----------------------------------------------------------------------------

    def _stream_when_whole(self, scope: Scope) -> None:
        """Turn the connection into a stream once the request's body has come."""
        split = split_request(self._reader, self._held, self._body_at)
        if split is None:
            # The rest of the body is on its way: the next `data_received` comes here again.
            if self._body_at is None and len(self._held) > MAX_STREAM_REQUEST_BYTES:
                self._serve(_State.SERVED)
            return
        body, rest = split
        # It says whose connection it is.
        scope["state"] = self._app_state
        upgrade = self._body_at is not None
        if not self.streams.takes_connection(scope, body):
            # No parser reads a body behind an upgrade. The rewritten request also closes the connection, because
            # the reader stopped at the upgrade.
            self._held = self._reader.without_upgrade(body) if upgrade else self._held
            self._serve(_State.SERVED)
            return
        if self.tunnels is not None:
            self._give(self.tunnels, 0)
            return
        self._held, self._state = b"", _State.STREAM
        taken = TakenConnection(self._transport, self._writable)
        self._stream = self.streams.open(scope, body, rest, taken, self._server_state.tasks, upgrade=upgrade)
