"""The sandbox of the `http` driver: sends calls to servers elsewhere, each rollout in sessions of its own.

A call is one of three kinds, by its endpoint's mode and rules:

1. Stateless: its response depends on the call alone. It is shared, and no session is needed.
2. In a session: it follows a call that opened one. It counts as a change of unknown effect, unless a rule says that it
   only reads, and a replay of the whole path reaches the same state.
3. Anything else, and every call in mode `pass`: it is sent, and its result is this rollout's alone.

A request that was cancelled or failed may have changed the session, so the sandbox is dead then. Without sessions there
is nothing to lose, and the sandbox lives on.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import orjson

from sandboxes.calls import Execution, ToolCall, ToolResult
from sandboxes.driver import FrozenState
from sandboxes.effects import Effect, StateDigest
from sandboxes.errors import NotFreezableError, SandboxError, ServerError
from sandboxes.http_message import InvalidRequestError, end_to_end
from sandboxes.listener import Headers, Listener
from sandboxes.server_spec import Upstream
from sandboxes.sources import has_dot_segments
from sandboxes.spec import EnvironmentSpec
from sandboxes.tool_clients import server_orders
from sandboxes.tool_clients.elsewhere import send
from sandboxes.tool_clients.http1 import MalformedResponseError
from sandboxes.tool_clients.server_orders import Spool
from sandboxes.upstream.session import UpstreamSession, cookie_header, parse_cookies

NO_SESSION = StateDigest(b"\0" * 32, b"\0" * 32)
"""The state of a sandbox without sessions."""
FAREWELL_S = 5.0
"""Longest time for a farewell. No call waits for its response, but the close of a sandbox does."""
_ERROR_BYTES = 2000
"""How much of a server's error response is quoted."""
_CHUNK_BYTES = 1 << 18
_REPLACED_HEADERS = frozenset({"host", "content-length", "expect", "cookie"})
"""Headers of the client that are not passed on, because the request to the server has its own."""


class HttpSandbox:
    """One rollout's sessions with the servers of a spec; see `sandboxes.driver.ServingSandbox`."""

    def __init__(self, name: str, spec: EnvironmentSpec, folder: Path, closed: "Callable[[HttpSandbox], None]") -> None:
        self.id, self.alive = name, True
        self._spec, self._folder, self._closed = spec, folder, closed
        self._sessions: dict[str, UpstreamSession] = {}

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        """Send a call to its server; the listener receives the response while it arrives."""
        if not self.alive:
            raise SandboxError(f"connection {self.id} was closed")
        server = self._spec.upstreams.get(call.endpoint)
        if server is None:
            return _refusal(404, f"this task has no endpoint {call.endpoint!r}")
        if self._spec.confined and has_dot_segments(call.arguments["target"]):
            # The allowed prefix of a confined spec holds for what the server makes of the target.
            return _refusal(400, "the target has dot segments, which this task's upstream does not take")
        opens = call.arguments.get("session") == "opens" and server.mode == "replay"
        session = UpstreamSession() if opens else self._sessions.get(call.endpoint)
        if session is None and server.mode == "replay" and not _is_stateless(call) and call.arguments.get("session"):
            return _refusal(409, "no session is open. Begin with the request that the endpoint's rules call `open`.")
        start = time.perf_counter()
        result, complete = await self._send(server, call, session, listener)
        seconds = time.perf_counter() - start
        volatile = server_orders.volatile(call)
        if session is None or server.mode == "pass":
            shared = complete and server.mode == "replay" and _is_stateless(call) and not volatile
            state = None if self._sessions else NO_SESSION
            return Execution(result, Effect.NONE, seconds, state, shareable=shared)
        if opens:
            previous = self._sessions.pop(call.endpoint, None)
            self._sessions[call.endpoint] = session
            if previous is not None:
                await self._say_farewell(server, previous)
        effect = Effect.NONE if server_orders.reads(call) else Effect.UNKNOWN
        return Execution(result, effect, seconds, None, shareable=complete and not volatile)

    async def freeze(self) -> FrozenState:
        """Freeze the state without sessions. Raises NotFreezableError if a session is open."""
        if self._sessions:
            raise NotFreezableError(
                "a session with a server elsewhere cannot be frozen. Its calls are replayed instead."
            )
        return FrozenState("http", "files", {}, 0, NO_SESSION)

    async def close(self) -> None:
        """Close all sessions, with a farewell if the spec has one."""
        if not self.alive:
            return
        self.alive = False
        for endpoint, session in self._sessions.items():
            await self._say_farewell(self._spec.upstreams[endpoint], session)
        self._closed(self)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _send(
        self, server: Upstream, call: ToolCall, session: UpstreamSession | None, listener: Listener | None
    ) -> tuple[ToolResult, bool]:
        body = call.body if session is None else session.outgoing(call.body, call)
        content, length = _content(call, body)
        silence_s = server.timeout_s or self._spec.limits.timeout_s
        spool = Spool(call, listener, max_bytes=server.answer_bytes, folder=self._folder, rest_s=silence_s)
        answer = _Answer(server, spool)
        method, target, headers = call.arguments["method"], call.arguments["target"], _headers(call, session)
        try:
            with contextlib.suppress(_EnoughError):
                await send(server.upstream, method, target, headers, content, length, answer, silence_s=silence_s)
            self._require_answer(server, answer)
            result = spool.result()
        except TimeoutError as error:
            raise self._failed(f"{server.upstream} sent nothing for too long", silent=True) from error
        except (MalformedResponseError, InvalidRequestError, OSError) as error:
            raise self._failed(f"{server.upstream} cannot be reached: {error or type(error).__name__}") from error
        except BaseException:
            self.alive = self.alive and not self._sessions
            raise
        finally:
            spool.close()
        return (result if session is None else session.incoming(result, call)), spool.whole

    def _require_answer(self, server: Upstream, answer: "_Answer") -> None:
        if answer.failed:
            text = f"{server.upstream} answered {answer.failed}: {answer.quoted.decode(errors='replace')}"
            raise self._failed(text, status=0 if answer.failed in server.lost else answer.failed)

    def _failed(self, text: str, *, silent: bool = False, status: int = 0) -> ServerError:
        self.alive = self.alive and not self._sessions
        return ServerError(text, silent=silent, status=status)

    async def _say_farewell(self, server: Upstream, session: UpstreamSession) -> None:
        if server.farewell is None:
            return
        farewell = server.farewell
        body = b"" if farewell.body is None else orjson.dumps(farewell.body)
        body = body.replace(b"{session}", session.name.encode())
        headers = [("content-type", "application/json"), *cookie_header(session.cookies)]
        path = farewell.path.replace("{session}", session.name)
        # The server ends abandoned sessions itself, or it is gone.
        with contextlib.suppress(_EnoughError, MalformedResponseError, InvalidRequestError, OSError):
            await send(
                server.upstream, farewell.method, path, headers, body, len(body), _Unheard(), silence_s=FAREWELL_S
            )


class _EnoughError(Exception):
    """Enough of a failed response has come."""


class _Answer(Listener):
    """Passes a response on, or quotes it if it is a failure of the moment: that must not be recorded for everybody."""

    def __init__(self, server: Upstream, spool: Spool) -> None:
        self._server, self._spool = server, spool
        # The status of such a failure, and the begin of its body.
        self.failed, self.quoted = 0, b""

    async def head(self, status: int, headers: Headers) -> None:
        if status == 429 or status >= 500 or status in self._server.lost:
            self.failed = status
        else:
            await self._spool.head(status, headers)

    async def data(self, chunk: bytes) -> None:
        if not self.failed:
            await self._spool.data(chunk)
            return
        self.quoted = (self.quoted + chunk)[:_ERROR_BYTES]
        if len(self.quoted) == _ERROR_BYTES:
            raise _EnoughError


class _Unheard(Listener):
    async def head(self, status: int, headers: Headers) -> None:  # noqa: ARG002 - the protocol has them
        raise _EnoughError

    async def data(self, chunk: bytes) -> None:  # noqa: ARG002 - the protocol has it
        raise _EnoughError


def _content(call: ToolCall, body: bytes) -> tuple[bytes | AsyncIterator[bytes], int]:
    if "upload" not in call.arguments:
        return body, len(body)
    path = Path(call.arguments["upload"])
    return _read_chunks(path), path.stat().st_size


async def _read_chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _headers(call: ToolCall, session: UpstreamSession | None) -> list[tuple[str, str]]:
    headers = [(name, value) for name, value in call.arguments["headers"]]
    cookies = parse_cookies(value for name, value in headers if name.lower() == "cookie")
    session_cookies = session.cookies if session else {}
    return [*end_to_end(headers, without=_REPLACED_HEADERS), *cookie_header({**cookies, **session_cookies})]


def _is_stateless(call: ToolCall) -> bool:
    return bool(call.arguments.get("stateless")) or (
        call.arguments.get("effect") == "read" and not call.arguments.get("session")
    )


def _refusal(status: int, detail: str) -> Execution:
    problem = {"type": "urn:forkpoint:no-session", "title": "No such session", "status": status, "detail": detail}
    result = ToolResult(status, "application/problem+json", orjson.dumps(problem))
    return Execution(result, Effect.NONE, 0.0, None, shareable=False)
