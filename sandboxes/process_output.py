"""The output of a single process in a sandbox, as a sequence of frames (pure).

`ToolCall("process", "run", {"argv", "env", "cwd", "user", "tty", "timeout_s"?, "detach"?}, stdin)` runs a process as
`docker exec` does: outside every session, with its own environment. The body of the result is a sequence of frames.
A frame is Docker's header of 8 bytes (kind, three zeros, length as big-endian 32 bits) and its data.
"""

import codecs
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MEDIA_TYPE = "application/vnd.forkpoint.process"
OUT, ERR, END = 1, 2, 3
"""The kinds of frames: stdout (all output of a terminal), stderr, and at last the `Ending` as JSON."""
MAX_BYTES = 32 << 20
"""Largest output that is recorded. More output still reaches clients that listen."""
LINGER_S = 2.0
"""How long output is read after a process ended while background processes hold its pipes; as long as Docker does."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The search path of images that name none, as Docker gives it."""
_END_BYTES = 1 << 10
"""How much of the end of an output is kept beside its beginning. Our marks have 200 bytes at most."""
_HEADER = struct.Struct(">BxxxI")


class OutputError(ValueError):
    """The bytes are not the output of a process: cut off, or of another form."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended."""

    exit_code: int | None  # The exit code; 128 + number for a signal; None if the process continues in the background.
    timed_out: bool = False  # The process was killed because its time was up.
    truncated: bool = False  # The process wrote more than `MAX_BYTES`.
    signal: int = 0  # The number of the signal that a client sent and that ended the process; 0 for none.


def frame(kind: int, data: bytes) -> bytes:
    """Return a frame."""
    return _HEADER.pack(kind, len(data)) + data


def frames(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield kind and data of each frame of a complete body; one that ends within a frame is an `OutputError`."""
    at = 0
    while at < len(body):
        if len(body) - at < _HEADER.size:
            raise OutputError("the output of a process ends within the header of a frame")
        kind, length = _HEADER.unpack_from(body, at)
        at += _HEADER.size
        if len(body) - at < length:
            raise OutputError(f"the output of a process lacks {length - len(body) + at} bytes of a frame")
        yield kind, body[at : at + length]
        at += length


def output(body: bytes, kind: int) -> bytes:
    """Return the data of one stream of a body."""
    return b"".join(data for other, data in frames(body) if other == kind)


def by_stream(body: bytes) -> bytes:
    """Return a body with its streams one after the other. The order in which they arrived differs from run to run."""
    return b"".join(frame(kind, output(body, kind)) for kind in (OUT, ERR, END))


def ending(body: bytes) -> Ending:
    """Return the ending that the last frame of a body describes; a body that is cut off is an `OutputError`."""
    fields: Any = None
    try:
        for kind, data in frames(body):
            if kind == END:
                fields = json.loads(data)
        return Ending(fields["exit_code"], fields["timed_out"], fields["truncated"], fields.get("signal", 0))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise OutputError(f"the output of a process has no ending: {error!r}") from None


class Frames:
    """The output of a process so far. Neighbouring data of one stream becomes one frame."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._body = bytearray()
        self._size = self._at = self._kind = 0

    @property
    def size(self) -> int:
        """The number of bytes that the process wrote."""
        return self._size

    @property
    def whole(self) -> bool:
        """Whether all output was kept."""
        return self._size <= self._max_bytes

    def add(self, kind: int, data: bytes) -> None:
        """Append data of a stream. Data beyond the limit is counted and not kept."""
        room = max(0, self._max_bytes - self._size)
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
        """Return the complete body, with a last frame for the ending."""
        fields = {"exit_code": exit_code, "timed_out": timed_out, "truncated": not self.whole}
        return bytes(self._body) + frame(END, json.dumps(fields).encode())


class KeptOutput:
    """The first bytes of an output, up to a limit (`limits.output_bytes`), or its first and its last bytes.

    What is kept depends on the bytes and on the limit, and not on the pieces in which they come. A cut never leaves a
    part of a UTF-8 character.
    """

    def __init__(self) -> None:
        self.data = bytearray()  # What is kept of the beginning.
        # `dropped`: how many more bytes came. The last of them may be kept too.
        # `end`: the last bytes that came, for marks that are not cut; empty while nothing is dropped.
        self.dropped, self.end = 0, b""
        self._tail, self._tail_bytes = bytearray(), 0

    def add(self, data: bytes, max_bytes: int, tail_bytes: int = 0) -> None:
        """Append data. Of more than max_bytes, the last tail_bytes are kept, and the first ones up to the limit."""
        if not self.dropped:
            self.data += data
            if len(self.data) <= max_bytes:
                return
            whole = whole_characters(self.data[: max_bytes - tail_bytes])
            data = bytes(self.data[whole:])
            self.end = bytes(self.data[max(0, whole - _END_BYTES) : whole])
            del self.data[whole:]
        self.dropped += len(data)
        self.end = (self.end + data)[-_END_BYTES:]
        self._tail_bytes = tail_bytes
        self._tail += data
        # Each byte is moved once at most.
        if len(self._tail) > 2 * tail_bytes:
            del self._tail[: len(self._tail) - tail_bytes]

    def take(self) -> bytes:
        """Remove and return what was kept, with a line in the place of what was not."""
        tail = bytes(self._tail[len(self._tail) - self._tail_bytes :]) if self._tail_bytes else b""
        tail = tail[begun_character(tail) :]
        note = f"\n[forkpoint: {self.dropped - len(tail)} more bytes left out]\n".encode() if self.dropped else b""
        taken = bytes(self.data) + note + tail
        self.data.clear()
        self._tail.clear()
        self.dropped, self.end = 0, b""
        return taken


def begun_character(data: bytes) -> int:
    """Return how many bytes at the beginning are the rest of a UTF-8 character."""
    # Bytes after the first of a character are 10xxxxxx, and there are three at the most.
    return next((place for place, byte in enumerate(data[:3]) if byte & 0xC0 != 0x80), min(3, len(data)))


def whole_characters(data: bytes | bytearray) -> int:
    """Return how many bytes there are before a UTF-8 character that has begun at the end and is not complete."""
    # A character has four bytes at the most. What is no UTF-8 counts as whole.
    end = bytes(data[-3:])
    return len(data) - len(end) + codecs.utf_8_decode(end, "replace", False)[1]


class Incoming:
    """Parses frames that arrive in pieces."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the frames that are complete with this piece."""
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
    """Return why a process cannot have these arguments and variables; an empty text if it can."""
    if not (isinstance(argv, Sequence) and argv and all(isinstance(word, str) and "\0" not in word for word in argv)):
        return "argv must be a list of strings without NUL, the program first"
    if not isinstance(env, Mapping) or any("\0" in f"{name}{value}" or "=" in name for name, value in env.items()):
        return "env must map names without = to values, both without NUL"
    return ""


def environment(base: Mapping[str, str], given: Mapping[str, str], *, tty: bool) -> dict[str, str]:
    """Return the variables of a process without HOME, in Docker's order: defaults, the image's, the call's."""
    defaults = {"PATH": PATH, "HOSTNAME": base["HOSTNAME"]} | ({"TERM": "xterm"} if tty else {})
    return {**defaults, **base, **given}
