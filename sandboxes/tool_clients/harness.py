"""The model of a harness, as the harness sees it: a turn takes one response in and the next requests out.

Theory of operation. A harness is an agent that runs in the sandbox by itself. Only its requests to the model leave it,
over the relay (`harness_relay`). A turn begins with a response and ends once a request of the harness is here as a
whole, or the harness has ended; if other requests wait already, it ends at once. At its end the relay pauses, and no
request is here in part: all that the harness said is in recorded answers, and all else is in the sandbox. Each response
ends its connection.
"""

import asyncio
import base64
import itertools
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11

from sandboxes.http_message import end_to_end
from sandboxes.listener import Headers
from sandboxes.server_spec import Harness
from sandboxes.tool_clients import harness_relay
from sandboxes.tool_clients.descriptors import read_some, write_all
from sandboxes.tool_clients.http1 import EVENTS_AT_ONCE, MalformedResponseError

LOG = "/tmp/harness.log"  # noqa: S108 - in the sandbox
"""What the harness prints, in the sandbox."""
_PROGRAM = Path(harness_relay.__file__).read_text()
_HEADER = harness_relay.HEADER
_CHUNK_BYTES = 1 << 16
_HEAD_BYTES = 1 << 17
"""Largest head of a request; harnesses send one or two kilobytes."""
_REQUEST_BYTES = 64 << 20
"""Largest body of a request. A context of a million tokens has some 5 MB; images come on top."""
_TURN_BYTES, _CONNECTIONS = 192 << 20, 1000
"""How much a harness may send in one turn, over how many connections. What the relay carries is any program's."""
_TO_MODELS = ("/messages", "/chat/completions", "/responses", "enerateContent")
"""How the paths of requests for a response end: of Anthropic, of OpenAI twice, and of Google."""
_EXIT_CODE = re.compile(rb"-?[0-9]{1,3}")
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Delivery:
    """A model's response to the request on a connection."""

    connection: int
    status: int
    headers: Headers
    body: bytes


@dataclass(slots=True)
class Turn:
    """What a harness did: the requests for which it waits since this turn, and whether it has ended."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    # The connections of earlier requests that it has given up.
    gone: list[int] = field(default_factory=list)
    # Its exit code and the end of what it has printed; None while it runs.
    exit: dict[str, Any] | None = None

    def members(self) -> dict[str, Any]:
        """Return the turn as JSON."""
        return {"requests": self.requests, "gone": self.gone, "exit": self.exit}


def relay_command(harness: Harness) -> str:
    """Return the command that becomes the relay, which starts the harness when it is told so (pure)."""
    words = ["python3", "-B", "-S", "-c", _PROGRAM, str(harness.port), LOG]
    return f"exec {shlex.join(words)}"


@dataclass(frozen=True, slots=True)
class Begin:
    """How a harness is started: a command for /bin/sh, and variables beyond those of the sandbox."""

    command: str
    env: Mapping[str, str]

    @classmethod
    def of(cls, harness: Harness, arguments: Mapping[str, Any]) -> "Begin":
        """Return the command and variables of a start (pure); {model} in a variable stands for the model's URL."""
        url = f"http://127.0.0.1:{harness.port}"
        variables = {**harness.env, **arguments.get("env", {})}
        env = {name: value.replace("{model}", url) for name, value in variables.items()}
        return cls(arguments.get("command") or harness.command, env)


class ModelPort:
    """The proxy's end of a relay, for one turn."""

    def __init__(self, fds: Sequence[int], silence_s: float) -> None:
        """Take over the descriptors that lead to the relay's stdin and from its stdout. `close` closes them."""
        self._write_fd, self._read_fd = fds
        self._silence_s = silence_s
        self._buffer = bytearray()
        self._arriving: dict[int, _Arriving] = {}
        self._answered: set[int] = set()
        self._received_bytes = 0
        for fd in fds:
            os.set_blocking(fd, False)

    def close(self) -> None:
        """Close both descriptors."""
        for fd in (self._write_fd, self._read_fd):
            os.close(fd)

    async def turn(self, begin: "Begin | Delivery | None", *, others_wait: bool = False) -> Turn:
        """Start the harness, deliver a response, or (None) do neither; return what the harness then does.

        `others_wait` says that it waits for other responses, too. Raises MalformedResponseError if the relay or the
        harness sends what it must not, TimeoutError if the harness does nothing for too long.
        """
        turn = Turn()

        def is_over() -> bool:
            waits = others_wait or bool(turn.requests) or turn.exit is not None
            return waits and all(request.is_whole for request in self._arriving.values())

        match begin:
            case Begin():
                start = {"command": begin.command, "env": dict(begin.env)}
                await self._send(0, b"s", json.dumps(start).encode())
            case Delivery():
                await self._respond(begin.connection, _response(begin))
        while True:
            await self._send(0, b"g")
            while not is_over():
                await self._take(turn, *await self._frame())
            await self._send(0, b"p")
            while (frame := await self._frame())[1] != b"p":
                await self._take(turn, *frame)
            if turn.exit is not None:
                await self._end()
                return turn
            # What came in before the pause may have been the begin of another request, or the end of the only one.
            if is_over():
                return turn

    async def _end(self) -> None:
        """Wait until the relay has ended, as it does once the harness has."""
        while await self._receive():
            pass

    async def _take(self, turn: Turn, number: int, kind: bytes, data: bytes) -> None:
        if max(len(self._arriving), len(turn.gone)) >= _CONNECTIONS:
            raise MalformedResponseError(f"the harness has more than {_CONNECTIONS} connections")
        if kind == b"x":
            code, _, log = data.partition(b"\n")
            if _EXIT_CODE.fullmatch(code) is None:
                raise MalformedResponseError("its relay says nothing of how it has ended")
            turn.exit = {"code": int(code), "log": log.decode(errors="replace")}
        elif kind == b"e":
            if self._arriving.pop(number, None) is None and number not in self._answered:
                turn.gone.append(number)
            # The harness has given the request up, so nobody waits for its response.
            turn.requests = [request for request in turn.requests if request["connection"] != number]
        elif kind != b"d":
            raise MalformedResponseError("its relay sends a frame of no kind")
        # What follows a request that has its response is not read: the response ends its connection.
        elif data and number not in self._answered:
            await self._feed(turn, number, data)

    async def _feed(self, turn: Turn, number: int, data: bytes) -> None:
        arriving = self._arriving.setdefault(number, _Arriving())
        try:
            whole = await arriving.feed(data)
        except h11.RemoteProtocolError:
            # Any program in the sandbox may have connected, such as one that tries its ports.
            await self._respond(number, _BAD_REQUEST)
            return
        if arriving.wants_to_go_on:
            await self._send(number, b"d", _CONTINUE)
        if whole is None:
            return
        if whole["method"] == "POST" and whole["target"].partition("?")[0].endswith(_TO_MODELS):
            turn.requests.append({"connection": number, **whole})
        else:
            # Lists of models, counts of tokens, telemetry.
            await self._respond(number, _NOT_FOUND)

    async def _respond(self, number: int, response: bytes) -> None:
        self._arriving.pop(number, None)
        self._answered.add(number)
        await self._send(number, b"d", response)
        await self._send(number, b"e")

    async def _send(self, number: int, kind: bytes, data: bytes = b"") -> None:
        await write_all(self._write_fd, _HEADER.pack(number, kind, len(data)) + data, self._silence_s)

    async def _frame(self) -> tuple[int, bytes, bytes]:
        while True:
            if len(self._buffer) >= _HEADER.size:
                number, kind, length = _HEADER.unpack_from(self._buffer)
                if length > _CHUNK_BYTES + _HEAD_BYTES:
                    raise MalformedResponseError("its relay sends a frame that is too long")
                end = _HEADER.size + length
                if len(self._buffer) >= end:
                    data = bytes(self._buffer[_HEADER.size : end])
                    del self._buffer[:end]
                    return number, kind, data
            data = await self._receive()
            if not data:
                raise MalformedResponseError("its relay has ended")
            self._buffer += data

    async def _receive(self) -> bytes:
        """Return the next bytes from the relay. All of them count: any program in the sandbox may write them."""
        data = await read_some(self._read_fd, self._silence_s)
        self._received_bytes += len(data)
        if self._received_bytes > _TURN_BYTES:
            raise MalformedResponseError(f"the harness sends more than {_TURN_BYTES} bytes in a turn")
        return data


class _Arriving:
    def __init__(self) -> None:
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)
        self._head: h11.Request | None = None
        self._body = bytearray()
        self.is_whole = False

    @property
    def wants_to_go_on(self) -> bool:
        return self._parser.they_are_waiting_for_100_continue

    async def feed(self, data: bytes) -> dict[str, Any] | None:
        """Return the request that this data completes. Raises `h11.RemoteProtocolError` if it is none."""
        if self.is_whole:
            # A client may send its next request early. The response ends the connection, so it asks again.
            return None
        self._parser.receive_data(data)
        for number in itertools.count(1):
            if number % EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)
            match event := self._parser.next_event():
                case h11.NEED_DATA:
                    break
                case h11.Request():
                    self._head = event
                case h11.Data():
                    self._body += event.data
                    if len(self._body) > _REQUEST_BYTES:
                        raise h11.RemoteProtocolError("the request is too large")
                case _:
                    self.is_whole = True
                    return self._request()
        return None

    def _request(self) -> dict[str, Any]:
        head = self._head
        assert head is not None, "a request ends after it has begun"
        named = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers)
        body = bytes(self._body)
        try:
            told = {"body": body.decode()}
        except UnicodeDecodeError:
            told = {"base64": base64.b64encode(body).decode()}
        headers = [list(header) for header in end_to_end(named)]
        return {"method": head.method.decode(), "target": head.target.decode("latin-1"), "headers": headers, **told}


def body_of(request: Mapping[str, Any]) -> bytes:
    """Return the body of a request of `Turn.requests` (pure)."""
    return base64.b64decode(request["base64"]) if "base64" in request else str(request["body"]).encode()


def _response(delivery: Delivery) -> bytes:
    lines = [f"HTTP/1.1 {delivery.status} {'OK' if delivery.status < 400 else 'Refused'}"]
    headers = end_to_end(delivery.headers, without=frozenset({"content-length"}))
    lines += [f"{name}: {value}" for name, value in headers]
    lines += [f"Content-Length: {len(delivery.body)}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1") + delivery.body
