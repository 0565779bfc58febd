"""The `http` driver: tool servers that run elsewhere. Its sandbox is a connection: nothing of the state is ours.

What a server's state is nobody here can see or keep. So a call is shared only where its answer is known to come again:
a stateless one, by a rule; or one behind a call that by a rule opens a session afresh, so that the path of calls
can be made again in a session of its own. All else is this rollout's alone and leaves no trace in the tree.

The door to httpx.
"""

import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import urlsplit

import orjson

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.driver import FrozenState
from sandboxes.effects import Effect, StateDigest
from sandboxes.errors import NotFreezableError, SandboxError, ServerError, StateGoneError
from sandboxes.http_message import end_to_end
from sandboxes.json_paths import OUR_NAME, member, renamed
from sandboxes.lean_imports import without
from sandboxes.listener import Headers, Listener
from sandboxes.server_spec import Upstream
from sandboxes.spec import EnvironmentSpec
from sandboxes.tool_clients import server_orders as serving
from sandboxes.tool_clients.server_orders import Spool

with without("pygments"):
    import httpx

VERSION = "http-1"
NO_SESSION = StateDigest(b"\0" * 32, b"\0" * 32)
"""Of a connection over which no session was opened."""
CONNECT_S = 10.0
FAREWELL_S = 5.0
_SAID_BYTES = 2000
_CHUNK = 1 << 18
_LONG_NAME = 8
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=5.0)
_SENT_ANEW = frozenset({"host", "content-length", "expect", "cookie"})


@dataclass(slots=True)
class UpstreamSession:
    """One that a rule's `open` began. name: what the server knows it by; given: whether it is the server's choice."""

    name: str = field(default_factory=lambda: f"fp{secrets.token_hex(10)}")
    given: bool = False
    cookies: dict[str, str] = field(default_factory=dict)


class HttpDriver:
    """See `sandboxes.driver.Driver`."""

    name = "http"

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self._transport: httpx.AsyncHTTPTransport | None = None
        self._live: set[HttpSandbox] = set()
        self._ids = itertools.count(1)

    async def open(self) -> None:
        """See `Driver.open`. Long answers lie here while they come; what is left of them has no name."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        # As a transport, it keeps no cookies, follows nobody, and adds nothing to what it is given.
        self._transport = httpx.AsyncHTTPTransport(limits=_LIMITS)

    async def identity(self, spec: EnvironmentSpec) -> str:  # noqa: ARG002 - what it names is nobody's to look at
        """See `Driver.identity`."""
        return VERSION

    async def start(self, spec: EnvironmentSpec) -> "HttpSandbox":
        """See `Driver.start`. Nothing is sent yet."""
        if self._transport is None:
            raise SandboxError("the http driver is closed")
        sandbox = HttpSandbox(f"http-{next(self._ids)}", spec, self._transport, self.data_dir, self._live.discard)
        self._live.add(sandbox)
        return sandbox

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> "HttpSandbox":
        """See `Driver.restore`. The one state that can be kept is that before any session."""
        if frozen.state != NO_SESSION:
            raise StateGoneError("a session with a server elsewhere cannot be kept")
        return await self.start(spec)

    async def collect(self, keep: Iterable[str]) -> int:  # noqa: ARG002 - there are no parts
        """See `Driver.collect`."""
        return 0

    async def aclose(self) -> None:
        """See `Driver.aclose`."""
        for sandbox in list(self._live):
            await sandbox.close()
        if self._transport is not None:
            await self._transport.aclose()
            self._transport = None


class HttpSandbox:
    """See `sandboxes.driver.Sandbox`."""

    def __init__(
        self,
        name: str,
        spec: EnvironmentSpec,
        transport: httpx.AsyncHTTPTransport,
        folder: Path,
        closed: "Callable[[HttpSandbox], None]",
    ) -> None:
        self.id, self.alive = name, True
        self._spec, self._transport, self._folder, self._closed = spec, transport, folder, closed
        self._sessions: dict[str, UpstreamSession] = {}

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        """See `Sandbox.execute`; listener hears the answer while it comes.

        Raises:
            ServerError: the server failed, says that it did, or was not to be reached.
        """
        if not self.alive:
            raise SandboxError(f"connection {self.id} was closed")
        server = self._spec.upstreams.get(call.endpoint)
        if server is None:
            return _refusal(404, f"this task has no endpoint {call.endpoint!r}")
        opens = call.arguments.get("session") == "opens" and server.mode == "replay"
        session = UpstreamSession() if opens else self._sessions.get(call.endpoint)
        if session is None and server.mode == "replay" and not _alone(call) and call.arguments.get("session"):
            return _refusal(409, "no session was opened: begin with the request that its rules call `open`")
        start = time.perf_counter()
        result, whole = await self._ask(server, call, session, listener)
        seconds = time.perf_counter() - start
        if session is None or server.mode == "pass":
            shared = whole and server.mode == "replay" and _alone(call) and not serving.volatile(call)
            return Execution(result, Effect.NONE, seconds, self._state(), shareable=shared)
        if opens:
            left = self._sessions.pop(call.endpoint, None)
            self._sessions[call.endpoint] = session
            if left is not None:
                await self._part(server, left)
        effect = Effect.NONE if serving.reads(call) else Effect.UNKNOWN
        return Execution(result, effect, seconds, None, shareable=whole and not serving.volatile(call))

    def _state(self) -> StateDigest | None:
        return None if self._sessions else NO_SESSION

    async def freeze(self) -> FrozenState:
        """See `Sandbox.freeze`."""
        if self._sessions:
            raise NotFreezableError(
                "a session with a server elsewhere cannot be kept: its calls are made again instead"
            )
        return FrozenState("http", "files", {}, 0, NO_SESSION)

    async def close(self) -> None:
        """See `Sandbox.close`. Sessions are told that they are over, where the spec says how."""
        if not self.alive:
            return
        self.alive = False
        for endpoint, session in self._sessions.items():
            await self._part(self._spec.upstreams[endpoint], session)
        self._closed(self)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _ask(
        self, server: Upstream, call: ToolCall, session: UpstreamSession | None, listener: Listener | None
    ) -> tuple[ToolResult, bool]:
        """Send call; return what came, and whether all of it was kept."""
        body = call.body if session is None else _named(call.body, call, OUR_NAME, session.name)
        content, length = _content(call, body)
        headers = [*_headers(call, session), *length]
        request = _request(server, call.arguments["method"], call.arguments["target"], headers, content)
        silence_s = server.timeout_s or self._spec.limits.timeout_s
        request.extensions["timeout"] = {"connect": CONNECT_S, "read": silence_s, "write": silence_s, "pool": CONNECT_S}
        spool = Spool(call, listener, most=server.answer_bytes, folder=self._folder)
        try:
            response = await self._transport.handle_async_request(request)
            try:
                await self._hear(response, server, spool)
            finally:
                await response.aclose()
            result = spool.result()
        except httpx.TimeoutException as error:
            raise self._failed(f"{server.upstream} says nothing for too long", silent=True) from error
        except (httpx.TransportError, OSError) as error:
            raise self._failed(f"{server.upstream} cannot be asked: {error or type(error).__name__}") from error
        except BaseException:
            # Nobody knows what a request that was cancelled did.
            self.alive = self.alive and not self._sessions
            raise
        finally:
            spool.close()
        return (result if session is None else _learnt(result, call, session)), spool.whole

    async def _hear(self, response: httpx.Response, server: Upstream, spool: Spool) -> None:
        status = response.status_code
        if status == 429 or status >= 500 or status in server.lost:
            said = bytearray()
            async for chunk in response.aiter_raw():
                said += chunk[: _SAID_BYTES - len(said)]
            what = f"{server.upstream} answered {status}: {said.decode(errors='replace')}"
            raise self._failed(what, status=0 if status in server.lost else status)
        await spool.head(status, _told(response))
        async for chunk in response.aiter_raw():
            await spool.data(chunk)

    def _failed(self, text: str, *, silent: bool = False, status: int = 0) -> ServerError:
        # How far a session's call came is not known; without sessions there is nothing to go wrong.
        self.alive = self.alive and not self._sessions
        return ServerError(text, silent=silent, status=status)

    async def _part(self, server: Upstream, session: UpstreamSession) -> None:
        if server.farewell is None:
            return
        told = server.farewell
        body = b"" if told.body is None else orjson.dumps(told.body).replace(b"{session}", session.name.encode())
        headers = [("content-type", "application/json"), *_cookie(session.cookies)]
        request = _request(server, told.method, told.path.replace("{session}", session.name), headers, body)
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), FAREWELL_S)
        try:
            response = await self._transport.handle_async_request(request)
            await response.aclose()
        except (httpx.HTTPError, OSError):
            # It is the server's own business now.
            return


def _request(
    server: Upstream, method: str, target: str, headers: Iterable[tuple[str, str]], body: bytes | AsyncIterator[bytes]
) -> httpx.Request:
    """Return a request to server: where it goes is the spec's word, target is only what is asked for there."""
    place = urlsplit(server.upstream)
    line = (place.path.rstrip("/") + target).encode("latin-1")
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    url = f"{place.scheme}://{place.netloc}"
    return httpx.Request(method, url, headers=raw, content=body, extensions={"target": line})


def _content(call: ToolCall, body: bytes) -> tuple[bytes | AsyncIterator[bytes], list[tuple[str, str]]]:
    """Return what call uploads, and the header that tells its length where httpx cannot see it."""
    if "upload" not in call.arguments:
        return body, []
    path = Path(call.arguments["upload"])
    return _chunks(path), [("content-length", str(path.stat().st_size))]


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _headers(call: ToolCall, session: UpstreamSession | None) -> list[tuple[str, str]]:
    sent = [(name, value) for name, value in call.arguments["headers"]]
    kept = end_to_end(sent, without=_SENT_ANEW)
    cookies = _cookies(value for name, value in sent if name.lower() == "cookie")
    return [*kept, *_cookie({**cookies, **(session.cookies if session else {})})]


def _cookie(cookies: Mapping[str, str]) -> list[tuple[str, str]]:
    return [("cookie", "; ".join(f"{name}={value}" for name, value in cookies.items()))] if cookies else []


def _cookies(headers: Iterable[str]) -> dict[str, str]:
    found = {}
    for header in headers:
        for pair in header.split(";"):
            name, equals, value = pair.strip().partition("=")
            if equals:
                found[name] = value
    return found


def _told(response: httpx.Response) -> Headers:
    return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers.raw)


def _learnt(result: ToolResult, call: ToolCall, session: UpstreamSession) -> ToolResult:
    """Note what an answer says of its session; return it with our name in the place of the session's."""
    for name, value in result.headers:
        if name.lower() == "set-cookie":
            session.cookies |= _set(value)
    if call.arguments.get("names") and call.arguments.get("session") == "opens":
        told = member(_json(result.body), call.arguments["names"].removeprefix("body:"))
        if isinstance(told, str | int) and not isinstance(told, bool):
            session.name, session.given = str(told), True
    # Names that we give are found wherever they stand; a short one of the server's may stand there by chance.
    whole = session.given and len(session.name) < _LONG_NAME
    body = _named(result.body, call, session.name, OUR_NAME, whole=whole)
    if body is result.body:
        return result
    length = str(len(body))
    headers = tuple((name, length if name.lower() == "content-length" else value) for name, value in result.headers)
    return ToolResult(result.status, result.media_type, body, headers)


def _set(header: str) -> dict[str, str]:
    try:
        return {name: morsel.coded_value for name, morsel in SimpleCookie(header).items()}
    except CookieError:
        return {}


def _named(body: bytes, call: ToolCall, before: str, after: str, *, whole: bool = False) -> bytes:
    """Return a JSON body with after for before where the dialect says that the name stands."""
    paths = call.arguments.get("bind", ())
    value = _json(body) if paths else None
    if not isinstance(value, dict):
        return body
    said = renamed(value, paths, before, after, whole=whole)
    return body if said == value else orjson.dumps(said)


def _json(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _alone(call: ToolCall) -> bool:
    """Whether a rule says that call's answer hangs on nothing but the call."""
    return bool(call.arguments.get("stateless")) or (
        call.arguments.get("effect") == "read" and not call.arguments.get("session")
    )


def _refusal(status: int, detail: str) -> Execution:
    told = {"type": "urn:forkpoint:no-session", "title": "Nobody to ask", "status": status, "detail": detail}
    result = ToolResult(status, "application/problem+json", orjson.dumps(told))
    return Execution(result, Effect.NONE, 0.0, None, shareable=False)
