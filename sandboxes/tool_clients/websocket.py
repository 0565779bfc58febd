"""WebSockets to tool servers inside sandboxes: one message, then what answers it. The door to the websockets library.

Both ends of the TCP connection are in the sandbox: a shell that opened it, and `cat`, carry its bytes to and from our
pipes. So a checkpoint holds the connection whole, and a restored server goes on in the middle of it. Between messages
somebody must listen, for servers look whether their clients live: they ping, and hang up on who is silent.
"""

import asyncio
import base64
import os
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import orjson
from websockets.client import ClientProtocol
from websockets.exceptions import WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN, State
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from sandboxes.calls import ToolCall, ToolResult
from sandboxes.http_message import end_to_end
from sandboxes.ipc.messages import ServerOrder
from sandboxes.tool_clients.http1 import MalformedResponseError

MESSAGES_TYPE = "application/vnd.forkpoint.messages+json"
QUIET_S = 0.25
"""Without a number of answers, they end when nothing has come for so long."""
_CHUNK = 1 << 16
_OF_THE_HANDSHAKE = frozenset({"host", "origin", "content-type", "content-length"})


def is_message(call: ToolCall) -> bool:
    """Whether call is a message on a WebSocket, not a request (pure)."""
    return call.arguments.get("method") == "WS"


def carrier(call: ToolCall, order: ServerOrder) -> ServerOrder:
    """Return the order of a process that opens call's connection to a server, and carries its bytes (pure)."""
    opens = f"exec 5<>/dev/tcp/127.0.0.1/{order.port}; cat <&5 & exec cat >&5"
    name = f"ws {order.name} {call.arguments['connection']} {call.arguments['target']}"
    return replace(order, name=name, command=f"exec bash -c {shlex.quote(opens)}", port=None, behind=order)


@dataclass(slots=True)
class ServerMessages:
    """Messages, text or binary, and the code and reason with which the server then closed, if it did."""

    messages: list[str | bytes] = field(default_factory=list)
    closed: tuple[int, str] | None = None

    def result(self) -> ToolResult:
        """Return them as a result."""
        told = [
            {"text": one} if isinstance(one, str) else {"base64": base64.b64encode(one).decode()}
            for one in self.messages
        ]
        return ToolResult(200, MESSAGES_TYPE, orjson.dumps({"messages": told, "close": self.closed}))


class Socket:
    """The client's end of one connection, over descriptors to its carrier. most: bytes of a message, and of all kept.

    opened: whether its handshake is made: it comes from a checkpoint.
    """

    def __init__(self, fds: Sequence[int], call: ToolCall, port: int, *, most: int, opened: bool) -> None:
        self._write_fd, self._read_fd = fds
        self._most, self._kept = most, 0
        path, _, query = call.arguments["target"].partition("?")
        offered = [Subprotocol(name) for name in call.arguments["subprotocols"]]
        # Without compression: its window is memory that no checkpoint of the server has.
        self._protocol = ClientProtocol(
            WebSocketURI(secure=False, host="127.0.0.1", port=port, path=path, query=query),
            subprotocols=offered or None,
            state=OPEN if opened else State.CONNECTING,
            max_size=most,
        )
        self._offered = offered
        self._fragments: list[bytes] = []
        self._text = False
        self._messages: deque[str | bytes] = deque()
        self._response: Response | None = None
        self._came = asyncio.Event()
        self._over: str | None = None
        self._closed = False
        for fd in fds:
            os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(self._read_fd, self._read)

    @property
    def still(self) -> bool:
        """Whether nothing has come that was not told yet."""
        return not (self._messages or self._fragments)

    def close(self) -> None:
        """Let go of the descriptors. Idempotent."""
        if not self._closed:
            self._closed = True
            self._over = self._over or "it was closed"
            asyncio.get_running_loop().remove_reader(self._read_fd)
            os.close(self._read_fd)
            os.close(self._write_fd)
            self._came.set()

    async def shake_hands(self, call: ToolCall, *, silence_s: float) -> None:
        """Open the connection with what call's client sent to open its own.

        Raises:
            Garbage: the server refuses. OSError: it hung up. TimeoutError: it says nothing.
        """
        request = self._protocol.connect()
        sent = [(name, value) for name, value in call.arguments["headers"]]
        for name, value in end_to_end(sent, without=_OF_THE_HANDSHAKE):
            if not name.lower().startswith("sec-websocket-"):
                request.headers[name] = value
        self._protocol.send_request(request)
        await self._flush(silence_s)
        while self._response is None:
            await self._wait(silence_s)
        if self._protocol.handshake_exc is not None:
            raise MalformedResponseError(f"it refuses the WebSocket: {self._protocol.handshake_exc}")
        chosen = self._protocol.subprotocol
        if self._offered and chosen != self._offered[0]:
            raise MalformedResponseError(f"of the subprotocols it takes {chosen!r}, not the first")

    async def ask(self, call: ToolCall, *, silence_s: float) -> ServerMessages:
        """Send call's message and hear what answers it.

        Raises:
            Garbage: what comes breaks the protocol, or the connection ends without a word. OSError: it broke.
            TimeoutError: nothing came for silence_s.
        """
        self._kept = 0
        said = ServerMessages([*self._messages])
        self._messages.clear()
        if self._over is not None or self._protocol.state is not OPEN:
            raise MalformedResponseError(
                f"its WebSocket has ended before this message: {self._over or self._protocol.close_reason}"
            )
        send = self._protocol.send_binary if call.arguments["binary"] else self._protocol.send_text
        send(call.body)
        await self._flush(silence_s)
        answers = call.arguments["answers"]
        wanted = None if answers == "quiet" else len(said.messages) + int(answers)
        while said.closed is None and (wanted is None or len(said.messages) < wanted):
            if self._messages:
                said.messages.append(self._messages.popleft())
            elif self._protocol.close_rcvd is not None:
                said.closed = (int(self._protocol.close_rcvd.code), self._protocol.close_rcvd.reason)
            else:
                try:
                    await self._wait(QUIET_S if wanted is None and said.messages else silence_s)
                except TimeoutError:
                    if wanted is None and said.messages:
                        break
                    raise
        return said

    async def _wait(self, within_s: float) -> None:
        """Wait until something came.

        Raises:
            Garbage: nothing will any more. TimeoutError: nothing did.
        """
        if self._over is not None:
            raise MalformedResponseError(self._over)
        self._came.clear()
        async with asyncio.timeout(within_s):
            await self._came.wait()

    async def _flush(self, within_s: float) -> None:
        view = memoryview(b"".join(self._protocol.data_to_send()))
        loop = asyncio.get_running_loop()
        while view:
            try:
                view = view[os.write(self._write_fd, view) :]
            except BlockingIOError:
                able = asyncio.Event()
                loop.add_writer(self._write_fd, able.set)
                try:
                    async with asyncio.timeout(within_s):
                        await able.wait()
                finally:
                    loop.remove_writer(self._write_fd)

    # What comes

    def _read(self) -> None:
        try:
            data = os.read(self._read_fd, _CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            data, self._over = b"", f"its WebSocket broke: {error}"
        self._kept += len(data)
        try:
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
        except (WebSocketException, EOFError) as error:
            self._over = self._over or f"its WebSocket broke: {error}"
        for event in self._protocol.events_received():
            self._hear(event)
        if data and self._protocol.parser_exc is not None and self._protocol.close_rcvd is None:
            self._over = self._over or f"what it says is no WebSocket: {self._protocol.parser_exc}"
        if self._kept > self._most:
            self._over = f"it says more than {self._most} bytes"
        if data:
            self._reply()
        else:
            self._over = self._over or "it hung up on its WebSocket"
        if self._over is not None:
            asyncio.get_running_loop().remove_reader(self._read_fd)
        self._came.set()

    def _reply(self) -> None:
        """Send what the protocol itself answers: pongs, and the other half of a close."""
        data = b"".join(self._protocol.data_to_send())
        try:
            if data and os.write(self._write_fd, data) < len(data):
                self._over = "it does not read its WebSocket"
        except OSError:
            # A full pipe, or nobody there: the next message finds out.
            return

    def _hear(self, event: object) -> None:
        if isinstance(event, Response):
            self._response = event
        elif isinstance(event, Frame) and event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            if event.opcode is not Opcode.CONT:
                self._text = event.opcode is Opcode.TEXT
            self._fragments.append(bytes(event.data))
            if event.fin:
                whole = b"".join(self._fragments)
                self._fragments.clear()
                self._messages.append(whole.decode(errors="replace") if self._text else whole)
