"""HTTP on a connection: uvicorn's own protocol, but a call that the tree knows is answered where it was read.

A hit needs no task, no event and no second write; they cost more than finding the answer does. Whatever is not a plain
complete request with a known answer takes uvicorn's ordinary way. Docker's clients take some connections over for
streams both ways, which are a `StreamConnection` from then on. All this leans on names of uvicorn's protocol
class, so pyproject.toml bounds its version, and tests hold them.
"""

import asyncio
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from proxy.compat.docker.stream import StreamConnection
from proxy.dataplane.app import DataPlane
from proxy.telemetry.histogram import Histogram

if TYPE_CHECKING:
    from proxy.http.asgi import Scope

MAX_ASKED_BYTES = 32 << 10
"""Of a request that takes its connection over; a longer one is none."""
_Begun = tuple[RequestResponseCycle, Any]


def protocol_for(data_plane: DataPlane) -> type[HttpToolsProtocol]:
    """Return the protocol class of a server whose application is data_plane."""
    return type("HitFirstFor", (HitFirst,), {"data_plane": data_plane, "hit_s": data_plane.engine.counts.hit_s})


class Joining:
    """A transport that sends an answer's head together with what is written next, or with nothing, a moment later.

    A packet less for each answer: 40 us of the machine's, and as much of its client's.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head: bytes | None = None
        self._begun = False

    def write(self, data: bytes) -> None:
        if not self._begun:
            self._begun, self._head = True, data
            self._loop.call_soon(self._flush)
            return
        head, self._head = self._head, None
        self._transport.write(data if head is None else head + data)

    def _flush(self) -> None:
        if self._head is not None:
            self.write(b"")

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class HitFirst(HttpToolsProtocol):
    """One connection. See the module."""

    data_plane: ClassVar[DataPlane]
    hit_s: ClassVar[Histogram]
    _parsing = False
    _begun: _Begun | None = None
    _held: _Begun | None = None
    _wire: StreamConnection | None = None
    _beyond: bytearray | None = None
    _data = b""

    def data_received(self, data: bytes) -> None:
        if self._wire is not None:
            self._wire.feed(data)
            return
        if self._beyond is not None:
            self._beyond += data
            self._take_over_when_whole()
            return
        self._parsing, self._data = True, data
        try:
            super().data_received(data)
        finally:
            self._parsing, self._data = False, b""
            begun, self._begun = self._begun, None
            if begun is not None and not self._answered(begun[0]):
                super()._start_asgi_task(*begun)

    def on_headers_complete(self) -> None:
        if not self.url.startswith(b"/"):
            # A whole URL, as a forward proxy is sent: this is none, and reaches no host that a request names.
            raise ValueError("the target is not a path")
        if self.parser.get_http_version() not in ("1.1", "1.0"):
            # A line without a version is 0.9's, in which nobody can be told that anything went wrong.
            raise ValueError("the version is not HTTP/1.1 or 1.0")
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.transport = cast("asyncio.Transport", Joining(cycle.transport, self.loop))
        if self.data_plane.may_stream(cast("Scope", cycle.scope)) and not cycle.waiting_for_100_continue:
            self._held = cycle, app
            self._take_over_when_whole()
        # uvicorn starts when it has the headers; the body is mostly in the same bytes, so wait for their end.
        elif self._parsing and self._begun is None:
            self._begun = cycle, app
        else:
            super()._start_asgi_task(cycle, app)

    def _answered(self, cycle: RequestResponseCycle) -> bool:
        plain = not cycle.more_body and cycle.keep_alive and not cycle.waiting_for_100_continue
        if not plain or self.flow.write_paused or self.transport.is_closing():
            return False
        began = perf_counter()
        answer = self.data_plane.known(cast("Scope", cycle.scope), cycle.body)
        if answer is None:
            return False
        cycle.response_started = cycle.response_complete = True
        self.transport.write(answer)
        cycle.on_response()
        self.hit_s.observe(perf_counter() - began)
        return True

    # -- connections that become streams -----------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self._held is not None and len(self._held[0].body) > MAX_ASKED_BYTES:
            held, self._held = self._held, None
            super()._start_asgi_task(*held)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._get_upgrade() is None:
            self._take_over_when_whole()

    def _unsupported_upgrade_warning(self) -> None:
        # Called where the parser has met the end of HTTP, and says where that is: for it an upgrade has no body.
        met = sys.exception()
        if self._held is None or met is None:
            super()._unsupported_upgrade_warning()
            return
        self._held[0].keep_alive = False
        self._beyond = bytearray(self._data[met.args[0] :])
        self._take_over_when_whole()

    def _take_over_when_whole(self) -> None:
        if self._held is None or (
            self._beyond is None and (self._held[0].more_body or self._get_upgrade() is not None)
        ):
            return
        cycle, app = self._held
        if self._beyond is not None:
            length = _length(self.headers)
            if len(self._beyond) < length:
                return
            cycle.body, cycle.more_body = self._beyond[:length], False
            self._beyond = self._beyond[length:]
        self._held = None
        body, docker = bytes(cycle.body), self.data_plane.docker
        if not docker.takes_connection(cycle.scope, body):
            super()._start_asgi_task(cycle, app)
            return
        self.flow.resume_reading()
        self._wire = wire = StreamConnection(
            self.transport.write, self.flow.drain, self._hold, self.transport.close,
            upgrade=self._get_upgrade() is not None, padded=docker.needs_padding(cycle.scope),
        )  # fmt: skip
        if self._beyond:
            wire.feed(bytes(self._beyond))
        if not docker.stream_known(cycle.scope, body, wire):
            task = self.loop.create_task(docker.stream(cycle.scope, body, wire))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)

    def _hold(self, on: bool) -> None:
        (self.flow.pause_reading if on else self.flow.resume_reading)()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        if self._wire is None:
            return super().eof_received()
        # It sends no more, and goes on listening.
        self._wire.end_input()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._wire is not None:
            self._wire.lose()
        super().connection_lost(exc)


def _length(headers: list[tuple[bytes, bytes]]) -> int:
    """Return how long a body is said to be; what is said is a number, for the parser has read it, and not too large."""
    told = next((value for name, value in headers if name == b"content-length"), b"0")
    return min(int(told), MAX_ASKED_BYTES)
