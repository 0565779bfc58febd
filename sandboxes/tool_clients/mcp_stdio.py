"""MCP over a server's stdin and stdout: JSON-RPC, a message a line, one request at a time.

The handshake is made once for each process, right after its start; a restored process has it behind it.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from sandboxes.listener import Cancellable, Listener
from sandboxes.tool_clients.http1 import MalformedResponseError

VERSION, MODERN = "2025-11-25", "2026-07-28"
ID = 1
"""Of every request: only one is under way. A server must not tell by it what came before."""
PAGED = frozenset({"tools/list", "resources/list", "resources/templates/list", "prompts/list"})
MAX_PAGES = 1000
"""Of one list."""
PROGRESS_TOKEN = "forkpoint"  # noqa: S105 - it names a request
"""Progress is asked for always, so that who wants it later finds it in the record."""
_CHUNK = 1 << 16
REFUSED = {
    "sampling/createMessage": "Sampling not supported",
    "elicitation/create": "Elicitation not supported",
    "roots/list": "List roots not supported",
}
"""What a client that does not offer these says, in the official SDK's words."""
HELLO = {
    "protocolVersion": VERSION,
    "capabilities": {},
    "clientInfo": {"name": "forkpoint", "version": "1"},
}


@dataclass(slots=True)
class Heard:
    """What a server said to a request. answer: its result or error, as members of a JSON-RPC response.

    asked: whether it wanted something of its client meanwhile (sampling, elicitation), on which the answer may hang.
    cancelled: whether it was told that nobody wants the answer any more.
    """

    answer: dict[str, Any] = field(default_factory=dict)
    notifications: list[dict[str, Any]] = field(default_factory=list)
    asked: bool = False
    cancelled: bool = False
    pages: int = 1

    def with_page(self, heard: "Heard") -> "Heard":
        """Return this with another page of the same list behind it; where that is an error, the error."""
        if "result" not in heard.answer:
            return heard
        before, more = self.answer["result"], heard.answer["result"]
        result = {name: value + more.get(name, []) for name, value in before.items() if isinstance(value, list)}
        return Heard({"result": result}, self.notifications + heard.notifications, pages=self.pages + 1)

    @property
    def shareable(self) -> bool:
        """Whether others may be told the same."""
        return not (self.asked or self.cancelled)


CANCEL_S = 5.0
"""How long a server that was told to cancel may take to answer, whatever it says then. Some give no answer any more."""


def cancelled() -> dict[str, Any]:
    """Return what tells a server that nobody wants its answer any more."""
    return {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": ID}}


class StdioConversation:
    """One conversation over descriptors to a server's stdin and stdout, closed by `close`. most: bytes in all."""

    def __init__(self, fds: Sequence[int], *, most: int, fresh: bool) -> None:
        # The first line may be the end of what was said, unasked, when the last conversation ended.
        self._may_be_half = not fresh
        self._write_fd, self._read_fd = fds[0], fds[1]
        self._most = most
        self._buffer = bytearray()
        self._heard = 0
        for fd in fds:
            os.set_blocking(fd, False)

    note = ""
    """Nothing has to be known from call to call: the pipes are the session."""

    def close(self) -> None:
        for fd in (self._write_fd, self._read_fd):
            os.close(fd)

    async def shake_hands(self, *, silence_s: float) -> dict[str, Any]:
        """Make the handshake; return what the server says of itself.

        Raises:
            Garbage: it says no JSON-RPC, or refuses. TimeoutError: nothing. OSError: it hung up.
        """
        heard = await self.ask("initialize", HELLO, silence_s=silence_s)
        if "result" not in heard.answer:
            raise MalformedResponseError(f"it refuses to be initialised: {heard.answer.get('error')}")
        await self._send({"jsonrpc": "2.0", "method": "notifications/initialized"}, silence_s)
        return dict(heard.answer["result"])

    async def ask(
        self, method: str, params: dict[str, Any], *, silence_s: float, listener: Listener | None = None
    ) -> Heard:
        """Send a request and hear all that is said until its response. listener: hears notifications, as they come.

        Raises:
            Garbage: what is said is no JSON-RPC, or too much. OSError: the server hung up.
            TimeoutError: nothing for silence_s, or for `CANCEL_S` after it was told to cancel.
        """
        await self._send({"jsonrpc": "2.0", "id": ID, "method": method, "params": params}, silence_s)
        heard = Heard()
        hearing = asyncio.ensure_future(self._hear(heard, silence_s, listener))
        cancelling = asyncio.ensure_future(listener.cancelled()) if isinstance(listener, Cancellable) else None
        try:
            awaited: set[asyncio.Future[None]] = {hearing} if cancelling is None else {hearing, cancelling}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not hearing.done():
                heard.cancelled = True
                await self._send(cancelled(), silence_s)
                async with asyncio.timeout(CANCEL_S):
                    await hearing
            await hearing
            return heard
        finally:
            for task in (hearing, cancelling):
                if task is not None:
                    task.cancel()
            await asyncio.gather(hearing, return_exceptions=True)

    async def _hear(self, heard: Heard, silence_s: float, listener: Listener | None) -> None:
        while True:
            message = await self._next(silence_s)
            if "method" not in message:
                if message.get("id") == ID:
                    heard.answer = {kind: message[kind] for kind in ("result", "error") if kind in message}
                    return
            elif "id" in message:
                ping = message["method"] == "ping"
                heard.asked = heard.asked or not ping
                refusal = REFUSED.get(message["method"], "Not supported")
                reply = {"result": {}} if ping else {"error": {"code": -32600, "message": refusal}}
                await self._send({"jsonrpc": "2.0", "id": message["id"], **reply}, silence_s)
            else:
                note = {"method": message["method"], "params": message.get("params", {})}
                heard.notifications.append(note)
                if listener is not None:
                    await listener.data(orjson.dumps(note))

    async def _send(self, message: dict[str, Any], silence_s: float) -> None:
        view = memoryview(orjson.dumps(message) + b"\n")
        while view:
            try:
                view = view[os.write(self._write_fd, view) :]
            except BlockingIOError:
                await _ready(self._write_fd, silence_s, writing=True)

    async def _next(self, silence_s: float) -> dict[str, Any]:
        while True:
            line, found, rest = self._buffer.partition(b"\n")
            if found:
                self._buffer = rest
                message = _message(bytes(line)) if line.strip() else None
                half, self._may_be_half = self._may_be_half, False
                if message is not None:
                    return message
                if half or not line.strip():
                    continue
                raise MalformedResponseError(f"it says what is no JSON-RPC: {bytes(line[:80])!r}")
            if self._heard > self._most:
                raise MalformedResponseError(f"it says more than {self._most} bytes to one request")
            try:
                data = os.read(self._read_fd, _CHUNK)
            except BlockingIOError:
                await _ready(self._read_fd, silence_s, writing=False)
                continue
            if not data:
                raise MalformedResponseError("it hung up without an answer")
            self._buffer += data
            self._heard += len(data)


def _message(line: bytes) -> dict[str, Any] | None:
    try:
        message = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return message if isinstance(message, dict) else None


async def _ready(fd: int, within_s: float, *, writing: bool) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    add(fd, event.set)
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    finally:
        remove(fd)
