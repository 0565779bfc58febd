"""MCP over HTTP: each message is a POST on a connection of its own, in either revision of the protocol.

Theory of operation. The response to a POST is JSON, or a stream of server-sent events that ends with the JSON-RPC
response. In the older revision a server may also use a stream of its own, opened by a GET. Tool calls listen there too,
because a server that asks its client something there would otherwise wait for ever. The revision and the session's id
are kept with the server's process as a note, so a restored process has its own. Silence is measured between messages,
not bytes.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import orjson

from sandboxes.http_message import request_head
from sandboxes.listener import Headers, Listener
from sandboxes.task_owner import start
from sandboxes.tool_clients.http1 import MalformedResponseError, exchange
from sandboxes.tool_clients.lines import Lines
from sandboxes.tool_clients.mcp import HELLO, MODERN, VERSION, Message, Receive, SessionLostError, cancellation, parsed

Connect = Callable[[], Awaitable[socket.socket]]
"""Opens another connection to the server."""
_SESSION = "mcp-session-id"
_SIDE_STREAM_S = 5.0
"""How long a server may take to open the session's own stream before its call is made without that stream."""
_META: Message = {
    f"io.modelcontextprotocol/{name}": value
    for name, value in (("protocolVersion", MODERN), ("clientInfo", HELLO["clientInfo"]), ("clientCapabilities", {}))
}
"""What the newer revision wants in `_meta` of every request, in place of a handshake."""
_ENVELOPE = frozenset({"resultType", "ttlMs", "cacheScope"})
"""Members of a result that belong to the newer revision's transport and not to the tool."""


class _ResponseComplete(Exception):  # noqa: N818 - it ends an exchange early and is no error
    """The response has arrived, so the rest of the stream is not read."""


class HttpTransport:
    """An `McpTransport` that sends POST requests to one URL."""

    revisions = (VERSION, MODERN)

    def __init__(self, url: str, first: socket.socket, connect: Connect, note: str, *, max_bytes: int) -> None:
        """Take over a connection, for the first request; `connect` opens each further one."""
        # `note` is the note of the last conversation with this process, empty if there was none.
        parts = urlsplit(url)
        self._host, self._target = parts.netloc, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        # The supervisor connected when it made the server ready; using that connection saves a round trip.
        self._first: socket.socket | None = first
        self._connect, self.max_bytes = connect, max_bytes
        self._connecting = asyncio.Lock()
        self._patience: asyncio.Timeout | None = None
        # The name "wire" is on disk, in the notes of frozen processes.
        saved = orjson.loads(note) if note else {}
        self._revision, self._session = saved.get("wire", ""), saved.get("session", "")

    @property
    def has_session(self) -> bool:
        """Whether the server has given the session an id."""
        return bool(self._session)

    @property
    def note(self) -> str:
        """The revision and the id of the session, as JSON."""
        return orjson.dumps({"wire": self._revision, "session": self._session}).decode()

    def begin(self, revision: str) -> None:
        """Speak this revision from now on, in a new session."""
        # A session belongs to a revision; the id of an old one would be refused.
        self._revision, self._session = revision, ""

    def begin_session(self, session: str) -> None:
        """Note the id that the server gave the session."""
        self._session = session

    def close(self) -> None:
        """Close the first connection if no request used it."""
        if self._first is not None:
            self._first.close()

    def be_patient(self, silence_s: float | None) -> None:
        """Restart the wait for the next message. None ends the limit: the caller limits the rest."""
        if self._patience is not None:
            self._patience.reschedule(None if silence_s is None else asyncio.get_running_loop().time() + silence_s)
            if silence_s is None:
                self._patience = None

    async def exchange(self, request: Message, receive: Receive, silence_s: float) -> None:
        """POST a request, and pass on the messages of its response and of the session's own stream."""
        if self._revision == MODERN:
            params = request["params"]
            request = {**request, "params": {**params, "_meta": {**params.get("_meta", {}), **_META}}}
        reader = _ResponseReader(self, receive, silence_s)
        listens_aside = request["method"] == "tools/call" and self._revision != MODERN
        # Opened before the request: what the server sends at once would be lost otherwise.
        aside = await self._open_side_stream(receive, silence_s) if listens_aside else None
        try:
            async with asyncio.timeout(silence_s) as self._patience:
                await self._post(request, reader, silence_s)
                await reader.end()
        finally:
            # No message can restart the limit any more; a later one belongs to another exchange.
            self._patience = None
            if aside is not None:
                # The side stream never ends by itself. Its connection is closed by the cancellation.
                aside.cancel()
                await asyncio.gather(aside, return_exceptions=True)
        if not reader.complete:
            raise MalformedResponseError("its stream ended without a response")

    async def send(self, message: Message, silence_s: float) -> None:
        """POST a message and ignore the response."""
        await self._post(message, _Ignored(), silence_s)

    async def cancel(self, silence_s: float) -> None:
        """Cancel the request under way. The newer revision cancels by closing the connection and sends no response."""
        if self._revision == MODERN:
            raise MalformedResponseError("its client cancelled the call")
        await self.send(cancellation(), silence_s)
        # From here `Conversation.request` limits the wait, to `CANCEL_S`.
        self.be_patient(None)

    async def _open_side_stream(self, receive: Receive, silence_s: float) -> "asyncio.Task[None]":
        """Open the session's own stream and return the task that reads it; a server may have none."""
        opened = asyncio.Event()
        headers = [("accept", "text/event-stream"), ("mcp-protocol-version", self._revision)]
        # A server that keeps no session sends no id, and gets none.
        headers += [(_SESSION, self._session)] if self._session else []
        head = request_head("GET", self._target, headers, self._host, 0)
        reader = _SideStreamReader(self, receive, silence_s, opened)
        reading = start(self._exchange(head, b"", reader, silence_s))
        waiting = start(opened.wait())
        # Servers without such a stream answer 405 at once; a silent one must not hold the call up.
        await asyncio.wait({reading, waiting}, timeout=_SIDE_STREAM_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        # The reader goes on: the stream may still open later.
        return reading

    async def _post(self, message: Message, listener: Listener, silence_s: float) -> None:
        body = orjson.dumps(message)
        headers = [("content-type", "application/json"), ("accept", "application/json, text/event-stream")]
        method = message.get("method")
        if method != "initialize":
            # The version is negotiated by `initialize`, so it cannot be named before.
            headers.append(("mcp-protocol-version", self._revision))
        if self._session:
            headers.append((_SESSION, self._session))
        if self._revision == MODERN and method is not None:
            headers.append(("mcp-method", method))
            name = message["params"].get("name") or message["params"].get("uri")
            # A header takes printable ASCII only; the body has the name in any case.
            headers += [("mcp-name", name)] if isinstance(name, str) and name.isascii() and name.isprintable() else []
        head = request_head("POST", self._target, headers, self._host, len(body))
        await self._exchange(head, body, listener, silence_s)

    async def _exchange(self, head: bytes, body: bytes, listener: Listener, silence_s: float) -> None:
        # Only the first request uses it: each request has a connection of its own.
        connection, self._first = self._first, None
        if connection is None:
            # The sandbox opens one connection at a time.
            async with self._connecting:
                connection = await self._connect()
        # The exchange has closed the connection by then, so the server sees that the rest is not wanted.
        with contextlib.suppress(_ResponseComplete):
            await exchange(connection, head, body, listener, silence_s=silence_s)


class _Ignored(Listener):
    async def head(self, status: int, headers: Headers) -> None: ...

    async def data(self, chunk: bytes) -> None: ...


class _ResponseReader(Listener):
    def __init__(self, transport: HttpTransport, receive: Receive, silence_s: float) -> None:
        self.complete = False  # The JSON-RPC response has arrived.
        self._transport, self._receive, self._silence_s = transport, receive, silence_s
        self._is_stream, self._size, self._body = False, 0, bytearray()
        self._lines, self._event = Lines(), list[bytes]()

    async def head(self, status: int, headers: Headers) -> None:
        by_name = {name.lower(): value for name, value in headers}
        self._is_stream = by_name.get("content-type", "").startswith("text/event-stream")
        # The id comes with the response to `initialize` and is sent with every request after it.
        if _SESSION in by_name:
            self._transport.begin_session(by_name[_SESSION])
        # The server was started anew by something else than a call, or ends sessions.
        if status == 404 and self._transport.has_session:
            raise SessionLostError("it has lost its session")
        # An HTTP error without JSON-RPC: a server that is none.
        if not self._is_stream and not by_name.get("content-type", "").startswith("application/json"):
            raise MalformedResponseError(f"its response has status {status} and is not JSON-RPC")

    async def data(self, chunk: bytes) -> None:
        self._size += len(chunk)
        # Counted over the whole response, events included, because all of it may become part of the record.
        if self._size > self._transport.max_bytes:
            raise MalformedResponseError(f"it sends more than {self._transport.max_bytes} bytes for one request")
        if not self._is_stream:
            self._body += chunk
            return
        # Events end with a blank line (WHATWG HTML, 9.2.5), and lines with LF or CRLF. Fields other than `data` (ids,
        # names, retries) belong to resuming, which is not used.
        for line in self._lines.feed(chunk):
            if line.startswith(b"data:"):
                self._event.append(line[5:].strip())
            elif line in {b"", b"\r"}:
                event, self._event = self._event, []
                await self._handle_event(b"\n".join(event))

    async def end(self) -> None:
        """Handle a body that is no stream: it is whole now."""
        if self._body and not self.complete:
            with contextlib.suppress(_ResponseComplete):
                await self._handle_event(bytes(self._body))

    async def _handle_event(self, data: bytes) -> None:
        if data:
            try:
                message = parsed(data)
            except orjson.JSONDecodeError:
                raise MalformedResponseError(f"it sends an event that is not JSON-RPC: {data[:80]!r}") from None
            await self._handle(message)

    async def _handle(self, message: Any) -> None:
        # Any message shows that the server works, so the wait for the next one begins.
        self._transport.be_patient(self._silence_s)
        if not isinstance(message, dict) or not {"method", "result", "error"} & message.keys():
            raise MalformedResponseError(f"it sends what is not JSON-RPC: {orjson.dumps(message)[:80]!r}")
        # After the response nothing more is read: a server may keep the stream open for ever.
        if await self._receive(_without_envelope(message)):
            self.complete = True
            raise _ResponseComplete


class _SideStreamReader(_ResponseReader):
    """Reads the session's own stream, of which only reverse requests matter: notifications there belong to no call."""

    def __init__(self, transport: HttpTransport, receive: Receive, silence_s: float, opened: asyncio.Event) -> None:
        super().__init__(transport, receive, silence_s)
        self._opened = opened

    async def head(self, status: int, headers: Headers) -> None:
        # No such stream, which is allowed: the call goes on without it.
        if status != 200:
            raise _ResponseComplete
        await super().head(status, headers)
        # Only now may the request go out: the server has its stream for reverse requests.
        self._opened.set()

    async def _handle(self, message: Any) -> None:
        if isinstance(message, dict) and "method" in message and "id" in message:
            await super()._handle(message)


def _without_envelope(message: Message) -> Message:
    """Return a response of the newer revision as the older one words it; a request for more input is an error."""
    result = message.get("result")
    if not isinstance(result, dict) or "resultType" not in result:
        return message
    # Another type asks for input in the middle of a call, as reverse requests do in the older revision.
    if result["resultType"] != "complete":
        return {"error": {"code": -32600, "message": "it asks its client for input, which is not supported here"}}
    return {"result": {name: value for name, value in result.items() if name not in _ENVELOPE}}
