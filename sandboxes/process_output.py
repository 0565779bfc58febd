"""A process of its own in a sandbox: the frames that its output comes in, and the text that becomes it (pure).

`ToolCall("process", "run", {"argv", "env", "cwd", "user", "tty", "timeout_s"?, "detach"?}, stdin)` runs one, as
`docker exec` does: not in a session, with an environment of its own. The answer is a sequence of frames.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MEDIA_TYPE = "application/vnd.forkpoint.process"
OUT, ERR, END = 1, 2, 3
"""Kinds of frames: stdout (all output of a terminal), stderr, and last what `Ending` says, as JSON."""
MAX_BYTES = 32 << 20
"""Of output that is recorded; what is more passes to who listens."""
LINGER_S = 2.0
"""How long output is read after a process ended, where what it left behind holds its pipes: Docker's own time."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HEADER = struct.Struct(">BxxxI")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended. exit_code: 128 + its number for a signal; None for one that goes on, detached or left.

    truncated: more output came than is recorded. signal: the number of the one that was sent to it, and ended it.
    """

    exit_code: int | None
    timed_out: bool = False
    truncated: bool = False
    signal: int = 0


def frame(kind: int, data: bytes) -> bytes:
    """Return one frame: Docker's header of 8 bytes, then the data."""
    return _HEADER.pack(kind, len(data)) + data


def frames(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield kind and data of each frame of a whole answer."""
    at = 0
    while at < len(body):
        kind, length = _HEADER.unpack_from(body, at)
        at += _HEADER.size
        yield kind, body[at : at + length]
        at += length


def output(body: bytes, kind: int) -> bytes:
    """Return what came on one stream of an answer."""
    return b"".join(data for found, data in frames(body) if found == kind)


def by_stream(body: bytes) -> bytes:
    """Return an answer's streams one after the other: in which order they came depends on the moment."""
    return b"".join(frame(kind, output(body, kind)) for kind in (OUT, ERR, END))


def ending(body: bytes) -> Ending:
    """Return what an answer's last frame says."""
    told: dict[str, Any] = {}
    for kind, data in frames(body):
        if kind == END:
            told = json.loads(data)
    return Ending(told["exit_code"], told["timed_out"], told["truncated"], told.get("signal", 0))


class Frames:
    """What has come of a process's output: neighbours on one stream are one frame, however they came."""

    def __init__(self, most: int = MAX_BYTES) -> None:
        self._most = most
        self._body = bytearray()
        self._size = self._at = self._kind = 0

    @property
    def size(self) -> int:
        """How many bytes came."""
        return self._size

    @property
    def whole(self) -> bool:
        """Whether all of it was kept."""
        return self._size <= self._most

    def add(self, kind: int, data: bytes) -> None:
        """Take what came next."""
        room = max(0, self._most - self._size)
        self._size += len(data)
        data = data[:room]
        if not data:
            return
        if kind != self._kind:
            self._kind, self._at = kind, len(self._body)
            self._body += _HEADER.pack(kind, 0)
        self._body += data
        _HEADER.pack_into(self._body, self._at, kind, len(self._body) - self._at - _HEADER.size)

    def end(self, exit_code: int | None, *, timed_out: bool = False) -> bytes:
        """Return the whole answer."""
        told = {"exit_code": exit_code, "timed_out": timed_out, "truncated": not self.whole}
        return bytes(self._body) + frame(END, json.dumps(told).encode())


class Incoming:
    """Takes frames out of the pieces in which they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the frames that are whole now."""
        self._bytes += data
        while len(self._bytes) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._bytes)
            end = _HEADER.size + length
            if len(self._bytes) < end:
                return
            piece = bytes(self._bytes[_HEADER.size : end])
            del self._bytes[:end]
            yield kind, piece


def refusal(argv: object, env: object) -> str:
    """Say what keeps these from being a process's; empty where nothing does."""
    if not (isinstance(argv, Sequence) and argv and all(isinstance(word, str) and "\0" not in word for word in argv)):
        return "argv must be a list of words without NUL, the program first"
    if not isinstance(env, Mapping) or any("\0" in f"{name}{value}" or "=" in name for name, value in env.items()):
        return "env must map names without = to values, both without NUL"
    return ""


def environment(base: Mapping[str, str], given: Mapping[str, str], host: str, *, tty: bool) -> dict[str, str]:
    """Return what a process is started with but HOME, in Docker's order: base's, then the call's own."""
    told = {"PATH": PATH, "HOSTNAME": host} | ({"TERM": "xterm"} if tty else {})
    return {**told, **base, **given}
