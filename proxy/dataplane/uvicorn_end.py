"""uvicorn behind a connection that `hit_protocol` shares with it: its protocol, and what that writes to."""

import asyncio
from typing import Any, Protocol, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from proxy.dataplane import closing_responses
from proxy.dataplane.response_reports import CONNECTION


class SharedConnection(Protocol):
    """What uvicorn's transport needs of `HitFirst`."""

    @property
    def is_idle(self) -> bool:
        """Whether uvicorn has nothing to do, so that its keep-alive timer, which sees no hits, closes nothing."""
        ...

    def hand_over(self) -> None:
        """Give the connection to uvicorn for good."""
        ...


class UvicornTransport:
    """The transport that uvicorn's protocol of a connection writes to.

    It sends a response's head together with what is written next in the same turn of the event loop: a packet less.
    """

    def __init__(
        self, connection: SharedConnection, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Stand between uvicorn's protocol and the transport of a connection, which says whether uvicorn has it now."""
        self._connection, self._transport, self._loop = connection, transport, loop
        self._head: bytes | None = None
        self._is_head_due = True

    def write(self, data: bytes) -> None:
        """Write data, after a head that is held. A connection that its client has closed takes nothing more."""
        if self._transport.is_closing():
            # uvicorn learns of it in a later turn of the event loop.
            self._head = None
            return
        # The first write after `begin_response` is uvicorn's head. The flush is for a body that comes later, as
        # from a slow tool.
        if self._is_head_due:
            self._is_head_due, self._head = False, data
            self._loop.call_soon(self.flush)
            return
        head, self._head = self._head, None
        self._transport.write(data if head is None else head + data)

    def flush(self) -> None:
        """Write a head that is held."""
        if self._head is not None:
            self.write(b"")

    def begin_response(self) -> None:
        """Write what is held, and hold the next head."""
        self.flush()
        self._is_head_due = True

    def close(self) -> None:
        """Close the connection, unless uvicorn has nothing to do on it."""
        # A response that is complete for uvicorn may have its head still held.
        self.flush()
        if not self._connection.is_idle:
            self._transport.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Let a WebSocket protocol have the connection."""
        # The WebSocket's protocol has pings of its own; the idle timer of this one must not close its connection.
        self._connection.hand_over()
        self._transport.set_protocol(protocol)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the real transport's."""
        return getattr(self._transport, name)


class _Complete(list[tuple[bytes, bytes]]):
    """Headers that take no more."""

    def append(self, _trailer: tuple[bytes, bytes]) -> None:
        """Leave a trailer out. The scope has another list."""


class HeadersOnly(HttpToolsProtocol):
    """uvicorn's protocol, which would add trailers to the headers of a request that the application may be reading.

    A trailer is no header (RFC 9110, 6.5). It could otherwise name a rollout or show a token behind the back of a
    reverse proxy that checks headers, and `RequestReader` would give the same request another meaning.
    """

    def on_headers_complete(self) -> None:
        """Begin to handle the request."""
        super().on_headers_complete()
        self.headers = _Complete(self.headers)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's signature
        """Answer what is no request as `HitFirst` does."""
        self.transport.write(closing_responses.INVALID)
        self.transport.close()


class UvicornEnd:
    """A uvicorn protocol, which is made when uvicorn gets the first request of a connection."""

    def __init__(
        self,
        connection: SharedConnection,
        transport: asyncio.Transport,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        """Stand behind a connection, which the application finds in the `state` of its scopes."""
        self._transport = UvicornTransport(connection, transport, asyncio.get_running_loop())
        self._config, self._server_state = config, server_state
        self._app_state, self._connection = app_state, connection
        self._protocol: HeadersOnly | None = None

    def begin(self, held: bytes, *, is_writable: bool) -> bool:
        """Give uvicorn a connection with its unanswered bytes; return whether it has begun to handle a request."""
        if self._protocol is None:
            # The scope's `state` is the only thing that uvicorn passes from a connection to its application.
            state = {**self._app_state, CONNECTION: self._connection}
            self._protocol = HeadersOnly(self._config, self._server_state, state)
            self._protocol.connection_made(cast("asyncio.Transport", self._transport))
            # asyncio reports a full buffer once, before this protocol existed, so it has to learn of it here.
            if not is_writable:
                self._protocol.pause_writing()
        # uvicorn begins a cycle, and with it a task, for each request that it takes.
        before = self._protocol.cycle
        self._protocol.data_received(held)
        # The same cycle means that uvicorn has answered the bytes itself, with an error.
        return self._protocol.cycle is not before

    def feed(self, data: bytes) -> None:
        """Give uvicorn what has come on a connection that it has."""
        assert self._protocol is not None
        self._protocol.data_received(data)

    @property
    def is_held_up(self) -> bool:
        """Whether uvicorn does not read, because the application has not taken what is there."""
        return self._protocol is not None and self._protocol.flow is not None and self._protocol.flow.read_paused

    def begin_response(self) -> None:
        """See `UvicornTransport.begin_response`."""
        self._transport.begin_response()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol.pause_writing`."""
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol.resume_writing`."""
        if self._protocol is not None:
            self._protocol.resume_writing()

    def lose(self, exc: Exception | None) -> None:
        """Note that the connection is lost."""
        if self._protocol is not None:
            self._protocol.connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection once its requests are answered."""
        if self._protocol is not None:
            self._protocol.shutdown()
