"""MCP over HTTP to a server inside a sandbox, either wire: each message is a POST on a connection of its own.

What a client must remember between calls (the wire, the session's id) is kept with the server's process, as a note: who
restores the process finds the note with it.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import orjson

from sandboxes.http_message import request_head
from sandboxes.listener import Cancellable, Headers, Listener
from sandboxes.tool_clients.http1 import MalformedResponseError, exchange
from sandboxes.tool_clients.mcp_stdio import CANCEL_S, HELLO, ID, MODERN, REFUSED, VERSION, Heard, cancelled

Connect = Callable[[], Awaitable[socket.socket]]
_SESSION = "mcp-session-id"
_ASIDE_S = 5.0
"""How long a server may take to open a session's own stream before its call is made without."""
_OURS = {
    f"io.modelcontextprotocol/{name}": value
    for name, value in (("protocolVersion", MODERN), ("clientInfo", HELLO["clientInfo"]), ("clientCapabilities", {}))
}


class _Answered(Exception):  # noqa: N818 - how a conversation ends
    """The response has come; what the server may still have to say on this connection is of no use."""


class Posts:
    """One conversation. first: a connection to the server; connect: gives another. note: what the last one left."""

    def __init__(self, url: str, first: socket.socket, connect: Connect, note: str, *, most: int) -> None:
        self._first: socket.socket | None = first
        parts = urlsplit(url)
        self._host, self._target = parts.netloc, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._connect, self.most = connect, most
        self._connecting = asyncio.Lock()
        self.patience: asyncio.Timeout | None = None
        told = orjson.loads(note) if note else {}
        self._wire, self._session = told.get("wire", ""), told.get("session", "")

    @property
    def note(self) -> str:
        """What the next conversation has to know."""
        return orjson.dumps({"wire": self._wire, "session": self._session}).decode()

    def close(self) -> None:
        """Let go of what was not used."""
        if self._first is not None:
            self._first.close()

    async def shake_hands(self, *, silence_s: float) -> None:
        """Find out which wire the server speaks, and begin a session on the older one.

        Raises:
            Garbage: it speaks neither. TimeoutError: it says nothing. OSError: it hung up.
        """
        self._wire, self._session = VERSION, ""
        heard = await self.ask("initialize", dict(HELLO), silence_s=silence_s)
        if "result" in heard.answer:
            await self._tell({"jsonrpc": "2.0", "method": "notifications/initialized"}, silence_s)
            return
        self._wire, self._session = MODERN, ""
        found = await self.ask("server/discover", {}, silence_s=silence_s)
        if "result" not in found.answer:
            raise MalformedResponseError(f"it refuses to be initialised: {heard.answer.get('error')}")

    async def ask(
        self, method: str, params: dict[str, Any], *, silence_s: float, listener: Listener | None = None
    ) -> Heard:
        """See `Line.ask`."""
        heard = Heard()
        message = {"jsonrpc": "2.0", "id": ID, "method": method, "params": self._params(params)}
        aside = await self._listen_aside(heard, silence_s) if method == "tools/call" else None
        hearing = asyncio.ensure_future(self._post(message, _Hearing(self, heard, listener, silence_s), silence_s))
        cancelling = asyncio.ensure_future(listener.cancelled()) if isinstance(listener, Cancellable) else None
        try:
            awaited: set[asyncio.Future[Any]] = {hearing} if cancelling is None else {hearing, cancelling}
            # A server's pings are no sign that it works: only messages count.
            async with asyncio.timeout(silence_s) as self.patience:
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            self.patience = None
            if not hearing.done():
                await self._cancel(hearing, heard, silence_s)
            await hearing
        finally:
            self.patience = None
            tasks = [task for task in (hearing, cancelling, aside) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not heard.answer:
            raise MalformedResponseError("its stream ended without an answer")
        return heard

    async def _listen_aside(self, heard: Heard, silence_s: float) -> "asyncio.Future[None] | None":
        """Hear what the server asks of its client on the stream that is no call's, so that it is refused there too."""
        if self._wire == MODERN:
            return None
        opened = asyncio.Event()
        headers = [("accept", "text/event-stream"), ("mcp-protocol-version", self._wire)]
        headers += [(_SESSION, self._session)] if self._session else []
        head = request_head("GET", self._target, headers, self._host, 0)
        listening = asyncio.ensure_future(self._exchange(head, b"", _Aside(self, heard, silence_s, opened), silence_s))
        waiting = asyncio.ensure_future(opened.wait())
        await asyncio.wait({listening, waiting}, timeout=_ASIDE_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return listening

    async def _cancel(self, hearing: "asyncio.Future[None]", heard: Heard, silence_s: float) -> None:
        heard.cancelled = True
        if self._wire == MODERN:
            # There the closed stream says so, and nobody can say when the server has heard it.
            hearing.cancel()
            raise MalformedResponseError("its client cancelled the call")
        await self._tell(cancelled(), silence_s)
        async with asyncio.timeout(CANCEL_S):
            await asyncio.wait([hearing])

    async def refuse(self, message: dict[str, Any], silence_s: float) -> None:
        """Answer a server's request, which has no client that could."""
        reply: dict[str, Any] = {"result": {}}
        if message["method"] != "ping":
            reply = {"error": {"code": -32600, "message": REFUSED.get(message["method"], "Not supported")}}
        await self._tell({"jsonrpc": "2.0", "id": message["id"], **reply}, silence_s)

    def began(self, session: str) -> None:
        """Note the session that the server named."""
        self._session = session

    def _params(self, params: dict[str, Any]) -> dict[str, Any]:
        if self._wire != MODERN:
            return params
        return {**params, "_meta": {**params.get("_meta", {}), **_OURS}}

    async def _tell(self, message: dict[str, Any], silence_s: float) -> None:
        await self._post(message, _Deaf(), silence_s)

    async def _post(self, message: dict[str, Any], listener: Listener, silence_s: float) -> None:
        body = orjson.dumps(message)
        headers = [("content-type", "application/json"), ("accept", "application/json, text/event-stream")]
        if message.get("method") != "initialize":
            headers.append(("mcp-protocol-version", self._wire))
        if self._session:
            headers.append((_SESSION, self._session))
        if self._wire == MODERN:
            headers.append(("mcp-method", message["method"]))
            name = message["params"].get("name") or message["params"].get("uri")
            headers += [("mcp-name", name)] if isinstance(name, str) and name.isascii() and name.isprintable() else []
        head = request_head("POST", self._target, headers, self._host, len(body))
        await self._exchange(head, body, listener, silence_s)

    async def _exchange(self, head: bytes, body: bytes, listener: Listener, silence_s: float) -> None:
        connection, self._first = self._first, None
        if connection is None:
            # One is asked for at a time.
            async with self._connecting:
                connection = await self._connect()
        with contextlib.suppress(_Answered):
            await exchange(connection, head, body, listener, silence_s=silence_s)


class _Deaf(Listener):
    async def head(self, status: int, headers: Headers) -> None: ...

    async def data(self, chunk: bytes) -> None: ...


class _Hearing(Listener):
    """Hears one answer: a JSON-RPC response, or a stream of events that ends in one."""

    def __init__(self, posts: Posts, heard: Heard, listener: Listener | None, silence_s: float) -> None:
        self._posts, self._heard, self._listener, self._silence_s = posts, heard, listener, silence_s
        self._streams, self._size, self._buffer = False, 0, b""

    async def head(self, status: int, headers: Headers) -> None:
        named = {name.lower(): value for name, value in headers}
        self._streams = named.get("content-type", "").startswith("text/event-stream")
        if _SESSION in named:
            self._posts.began(named[_SESSION])
        if not self._streams and not named.get("content-type", "").startswith("application/json"):
            raise MalformedResponseError(f"it answers with status {status}, and no JSON-RPC")

    async def data(self, chunk: bytes) -> None:
        self._buffer += chunk
        self._size += len(chunk)
        if self._size > self._posts.most:
            raise MalformedResponseError(f"it says more than {self._posts.most} bytes to one request")
        if self._streams:
            *events, self._buffer = self._buffer.replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                await self._event(event)
            return
        try:
            message = orjson.loads(self._buffer)
        except orjson.JSONDecodeError:
            # Half of it; where the rest does not come, nobody has answered.
            return
        await self._message(message)

    async def _event(self, event: bytes) -> None:
        data = b"\n".join(line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if data:
            try:
                await self._message(orjson.loads(data))
            except orjson.JSONDecodeError:
                raise MalformedResponseError(f"it says what is no JSON-RPC: {data[:80]!r}") from None

    async def _message(self, message: Any) -> None:
        if self._posts.patience is not None:
            self._posts.patience.reschedule(asyncio.get_running_loop().time() + self._silence_s)
        if not isinstance(message, dict) or not {"method", "result", "error"} & message.keys():
            raise MalformedResponseError(f"it says what is no JSON-RPC: {orjson.dumps(message)[:80]!r}")
        if "method" not in message:
            self._heard.answer = _plain({kind: message[kind] for kind in ("result", "error") if kind in message})
            raise _Answered
        if "id" in message:
            self._heard.asked = self._heard.asked or message["method"] != "ping"
            await self._posts.refuse(message, self._silence_s)
            return
        note = {"method": message["method"], "params": message.get("params", {})}
        self._heard.notifications.append(note)
        if self._listener is not None:
            await self._listener.data(orjson.dumps(note))


class _Aside(_Hearing):
    """Hears the stream of a session that is no call's. opened: set when the server listens; some have none."""

    def __init__(self, posts: Posts, heard: Heard, silence_s: float, opened: asyncio.Event) -> None:
        super().__init__(posts, heard, None, silence_s)
        self._opened = opened

    async def head(self, status: int, headers: Headers) -> None:
        if status != 200:
            raise _Answered
        await super().head(status, headers)
        self._opened.set()

    async def _message(self, message: Any) -> None:
        # What it tells there belongs to no call.
        if isinstance(message, dict) and "method" in message and "id" in message:
            await super()._message(message)


def _plain(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without what is of the wire alone; one that asks for more input is an error."""
    result = answer.get("result")
    if not isinstance(result, dict) or "resultType" not in result:
        return answer
    if result["resultType"] != "complete":
        return {"error": {"code": -32600, "message": "it asks its client for input, which is not supported here"}}
    return {"result": {name: value for name, value in result.items() if name not in _OF_THE_WIRE}}


_OF_THE_WIRE = frozenset({"resultType", "ttlMs", "cacheScope"})
