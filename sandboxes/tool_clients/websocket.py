"""WebSockets to tool servers inside sandboxes: a call is one message and its answers. The door to websockets.

Theory of operation:

1. Both ends of the TCP connection are in the sandbox. A shell opens it with bash's /dev/tcp, and two `cat` processes
   carry its bytes to and from pipes of the proxy. So a checkpoint holds the whole connection.
2. The protocol machine is the library's sans-I/O `ClientProtocol`. It has no state that matters between messages, so
   after a restore a fresh machine in the state OPEN takes over.
3. Servers ping their clients and close connections to silent ones. So the pipe is read between calls too, by a callback
   of the event loop that answers pings at once.
4. Messages that arrive between calls wait for the next call's result. While some wait, the sandbox cannot be frozen.
"""

import asyncio
import base64
import os
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

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
from sandboxes.ipc.codec import with_members
from sandboxes.ipc.server_messages import ServerOrder
from sandboxes.tool_clients.descriptors import write_all
from sandboxes.tool_clients.http1 import MalformedResponseError

MESSAGES_TYPE = "application/vnd.forkpoint.messages+json"
QUIET_S = 0.25
"""If the client gave no number of answers, they end after this long without a message."""
_CHUNK_BYTES = 1 << 12
"""How much is read in a turn of the event loop. Four kilobytes of pings take 50 ms."""
_FRAMES = 100_000
"""Most frames from one message of the client to the next."""
_HANDSHAKE_HEADERS = frozenset({"host", "origin", "content-type", "content-length"})
"""Headers of a client's request that do not go into the handshake with the server."""


def is_message(call: ToolCall) -> bool:
    """Return whether a call is a message on a WebSocket and not an HTTP request (pure)."""
    return call.arguments.get("method") == "WS"


def carrier(call: ToolCall, order: ServerOrder) -> ServerOrder:
    """Return the order of the processes that carry a connection to a server, each with its own name (pure)."""
    # The last `exec` leaves two `cat` processes and no shell, which is all that a checkpoint has to hold.
    script = f"exec 5<>/dev/tcp/127.0.0.1/{order.port}; cat <&5 & exec cat >&5"
    # By target as well: two connections of one rollout may lead to two paths of one server.
    name = f"ws {order.name} {call.arguments['connection']} {call.arguments['target']}"
    return with_members(order, name=name, command=f"exec bash -c {shlex.quote(script)}", port=None, behind=order)


@dataclass(slots=True)
class ServerMessages:
    """The messages that the server sent for one message."""

    messages: list[str | bytes] = field(default_factory=list)
    # The code and the reason with which the server then closed the connection; None if it did not.
    closed: tuple[int, str] | None = None

    def result(self) -> ToolResult:
        """Return the messages as a result."""
        messages = [
            {"text": message} if isinstance(message, str) else {"base64": base64.b64encode(message).decode()}
            for message in self.messages
        ]
        return ToolResult(200, MESSAGES_TYPE, orjson.dumps({"messages": messages, "close": self.closed}))


class Socket:
    """The client's end of one connection."""

    def __init__(self, fds: Sequence[int], call: ToolCall, port: int, *, max_bytes: int, opened: bool) -> None:
        """Take over the pipes of a connection; `opened`: it comes from a checkpoint, with its handshake behind it."""
        self._write_fd, self._read_fd = fds
        self._max_bytes, self._received_bytes, self._received_frames = max_bytes, 0, 0
        path, _, query = call.arguments["target"].partition("?")
        offered = [Subprotocol(name) for name in call.arguments["subprotocols"]]
        # No compression: its window would be state of this end, which no checkpoint holds.
        self._protocol = ClientProtocol(
            WebSocketURI(secure=False, host="127.0.0.1", port=port, path=path, query=query),
            subprotocols=offered or None,
            # A connection from a checkpoint had its handshake in the life before; a second one would be data to the
            # server.
            state=OPEN if opened else State.CONNECTING,
            max_size=max_bytes,
        )
        self._offered = offered
        self._fragments: list[bytes] = []
        self._text = False
        self._messages: deque[str | bytes] = deque()
        self._response: Response | None = None
        self._arrived = asyncio.Event()
        self._failure: str | None = None
        self._closed = False
        for fd in fds:
            os.set_blocking(fd, False)
        # From now on, and not only during calls: pings come at any time.
        asyncio.get_running_loop().add_reader(self._read_fd, self._read)

    @property
    def is_drained(self) -> bool:
        """Whether every message that has arrived is part of a result."""
        # A message of which only fragments have come would be lost by a freeze, too.
        return not (self._messages or self._fragments)

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        if not self._closed:
            self._closed = True
            self._failure = self._failure or "its WebSocket was closed"
            # Before the close: the number of a closed descriptor may belong to another file by the next turn.
            asyncio.get_running_loop().remove_reader(self._read_fd)
            # A call may wait until it can write, and must not write to that file.
            asyncio.get_running_loop().remove_writer(self._write_fd)
            os.close(self._read_fd)
            os.close(self._write_fd)
            # A call may wait for a message that will never come; it wakes and finds the failure.
            self._arrived.set()

    async def shake_hands(self, call: ToolCall, *, silence_s: float) -> None:
        """Make the handshake with the client's own headers and subprotocols; a refusal is MalformedResponseError."""
        request = self._protocol.connect()
        headers = [(name, value) for name, value in call.arguments["headers"]]
        for name, value in end_to_end(headers, without=_HANDSHAKE_HEADERS):
            # The library makes headers of its own; two keys would make the handshake ambiguous.
            if not name.lower().startswith("sec-websocket-"):
                request.headers[name] = value
        self._protocol.send_request(request)
        await self._flush(silence_s)
        # The response is read by `_read`, between two turns of this loop.
        while self._response is None:
            await self._wait(silence_s)
        if self._protocol.handshake_exc is not None:
            raise MalformedResponseError(f"it refuses the WebSocket: {self._protocol.handshake_exc}")
        chosen = self._protocol.subprotocol
        # The client's own handshake is over: it was promised the first one before a sandbox was there.
        if self._offered and chosen != self._offered[0]:
            raise MalformedResponseError(f"it chooses the subprotocol {chosen!r} and not the first that was offered")

    async def exchange(self, call: ToolCall, *, silence_s: float) -> ServerMessages:
        """Send the message of a call and collect its answers, after those that arrived since the last call.

        Raises MalformedResponseError if the server breaks the protocol, or ends the connection without a close frame,
        OSError if the connection broke, and TimeoutError if the server was silent for `silence_s`.
        """
        # The limit is for each message and its answers, not for the connection's whole life.
        self._received_bytes = self._received_frames = 0
        received = ServerMessages([*self._messages])
        self._messages.clear()
        # The end may have come between two calls, in which case the client has to be shown why.
        if self._failure is not None or self._protocol.state is not OPEN:
            raise MalformedResponseError(
                f"its WebSocket had ended before this message: {self._failure or self._protocol.close_reason}"
            )
        send = self._protocol.send_binary if call.arguments["binary"] else self._protocol.send_text
        send(call.body)
        await self._flush(silence_s)
        answers = call.arguments["answers"]
        # Messages from before the call do not count as its answers.
        # `quiet`: the client did not say how many answers there are; silence ends them.
        wanted = None if answers == "quiet" else len(received.messages) + int(answers)
        while received.closed is None and (wanted is None or len(received.messages) < wanted):
            if self._messages:
                received.messages.append(self._messages.popleft())
            # Looked at after the messages: what came before the close frame still counts.
            elif self._protocol.close_rcvd is not None:
                received.closed = (int(self._protocol.close_rcvd.code), self._protocol.close_rcvd.reason)
            else:
                try:
                    # Before the first answer the server may work long; between answers it may not.
                    await self._wait(QUIET_S if wanted is None and received.messages else silence_s)
                except TimeoutError:
                    if wanted is None and received.messages:
                        break
                    raise
        return received

    async def _wait(self, within_s: float) -> None:
        # Checked before the event is cleared: `_read` may have failed since the last wait.
        if self._failure is not None:
            raise MalformedResponseError(self._failure)
        self._arrived.clear()
        async with asyncio.timeout(within_s):
            await self._arrived.wait()

    async def _flush(self, within_s: float) -> None:
        await write_all(self._write_fd, b"".join(self._protocol.data_to_send()), within_s)

    # -- receiving: called by the event loop whenever the pipe has data ------------------------------------------------

    def _read(self) -> None:
        # One read for each call-back: the loop calls again while data remains.
        try:
            data = os.read(self._read_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            data, self._failure = b"", f"its WebSocket broke: {error}"
        # Bytes that arrive between calls count as well, so a server cannot fill the proxy's memory.
        self._received_bytes += len(data)
        try:
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
        except (WebSocketException, EOFError) as error:
            self._failure = self._failure or f"its WebSocket broke: {error}"
        # A close or an error may come in one piece with messages, so the events are handled first.
        events = self._protocol.events_received()
        self._received_frames += len(events)
        for event in events:
            self._handle(event)
        # The parser keeps its error and does not raise it.
        if data and self._protocol.parser_exc is not None and self._protocol.close_rcvd is None:
            self._failure = self._failure or f"it breaks the WebSocket protocol: {self._protocol.parser_exc}"
        if self._received_bytes > self._max_bytes or self._received_frames > _FRAMES:
            self._failure = f"it sends more than {self._max_bytes} bytes, or {_FRAMES} frames"
        # A connection that has ended takes no reply.
        if data:
            self._reply()
        else:
            self._failure = self._failure or "it closed its WebSocket without a close frame"
        # A reader on a closed pipe would be called in every turn of the loop.
        if self._failure is not None:
            asyncio.get_running_loop().remove_reader(self._read_fd)
        self._arrived.set()

    def _reply(self) -> None:
        """Send what the protocol itself answers: pongs, and the reply to a close."""
        data = b"".join(self._protocol.data_to_send())
        try:
            # A partly written frame cannot be continued: the next message would land in its middle.
            if data and os.write(self._write_fd, data) < len(data):
                self._failure = "it does not read its WebSocket"
        except OSError:
            # The pipe is full or broken. The next message reports it.
            return

    def _handle(self, event: object) -> None:
        if isinstance(event, Response):
            self._response = event
        # Pings and closes are answered by `_reply`; pongs mean nothing here.
        elif isinstance(event, Frame) and event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            if event.opcode is not Opcode.CONT:
                self._text = event.opcode is Opcode.TEXT
            # Copied into bytes: a frame may hold another kind of buffer.
            self._fragments.append(bytes(event.data))
            if event.fin:
                whole = b"".join(self._fragments)
                self._fragments.clear()
                self._messages.append(whole.decode(errors="replace") if self._text else whole)
