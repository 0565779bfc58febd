"""Recordings: responses of hosts outside, so that the same request in the same environment gets the same bytes again.

A recording is a file: the body, the head as JSON, the length of that JSON, and a digest of all that. A request that
has a recording never reaches its host again. When all files together take too much room, the least recently used ones
of the environment that takes most are removed. The next such request is then a new one.
"""

import hashlib
import json
import os
import secrets
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sandboxes.listener import Headers

MAX_BODY_BYTES = 128 << 20
"""Largest body of a response. Packages are smaller, and a response is complete here before a program receives it."""
MAX_TOTAL_BYTES = 4 << 30
"""Most bytes of all recordings of one driver; an estimate of what some thousand packages take."""
_MAX_HEAD_BYTES = 1 << 20
"""Largest head as JSON. Hosts send some kilobytes; an imported file may state any length."""
_LEAST_BYTES = 4096
"""What a small file takes on disk."""
_LENGTH = struct.Struct("!Q")
_DIGEST_BYTES = 32
_PART = ".part"
MAX_HEADERS = 200
"""Most headers of a response; origins send a few dozen."""
_KEPT = frozenset({300, 301, 302, 303, 307, 308, 404, 410})
"""Statuses beside 2xx that are recorded. Others, such as 429 and 503, say what was wrong at one moment."""
REFRAMED = frozenset({"content-length"})
"""End-to-end headers that a recording does not have, because its length is its own."""
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class RecordedResponse:
    """A complete response."""

    status: int
    headers: Headers  # End-to-end headers, without those that frame the response.
    length: int  # Size of the body in bytes; 0 if it has none.
    body: BinaryIO  # An open file that begins with the body; its reader closes it.


def is_recorded(status: int) -> bool:
    """Return whether responses with a status are recorded."""
    return status // 100 == 2 or status in _KEPT


class Recordings:
    """The recordings of one driver. All methods block: for as long as reading the file takes."""

    def __init__(self, folder: Path, max_bytes: int = MAX_TOTAL_BYTES) -> None:
        """Use a directory, which is made if it does not exist; remove what a killed process left."""
        self._folder, self._max_bytes = folder, max_bytes
        self._keeping = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in folder.glob(f"*{_PART}"):
            part.unlink()
        self._used = 0
        self.recount()

    def recount(self) -> None:
        """Count the bytes of all files, after others were put beside them, and trim them."""
        with self._keeping:
            self._used = sum(_size(path) for path in self._folder.iterdir())
            if self._used > self._max_bytes:
                self._trim()

    def draft(self) -> BinaryIO:
        """Return a new file for the body of a response, which `keep` or `drop` takes."""
        return (self._folder / f"{secrets.token_hex(16)}{_PART}").open("x+b")

    def drop(self, draft: BinaryIO) -> None:
        """Remove the name of a draft. The open file can still be read."""
        Path(draft.name).unlink(missing_ok=True)

    def keep(self, key: str, draft: BinaryIO, status: int, headers: Headers) -> None:
        """Make a draft, to which the body was written, the recording of a request."""
        draft.seek(0, os.SEEK_END)
        head = json.dumps({"status": status, "headers": headers}).encode()
        draft.write(head + _LENGTH.pack(len(head)))
        size_bytes = draft.tell()
        draft.write(_digest(draft, size_bytes))
        draft.flush()
        path = Path(draft.name)
        # Threads keep recordings side by side.
        with self._keeping:
            self._used += _size(path)
            # The rename makes the recording exist as a whole (rename(2)).
            path.rename(self._folder / key)
            if self._used > self._max_bytes:
                self._trim()

    def load(self, key: str) -> RecordedResponse | None:
        """Return the recording of a request; None if there is none, or it is not what was written."""
        path = self._folder / key
        with suppress(OSError):
            # Older versions named the file without the scope, which the rest of the name covers, too.
            (self._folder / key.rpartition("-")[2]).rename(path)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        try:
            response = read(file)
        except (ValueError, OSError):
            file.close()
            path.unlink(missing_ok=True)
            return None
        # The time says when it was used last.
        os.utime(file.fileno())
        return response

    def _trim(self) -> None:
        """Remove files until three quarters of the room are used: always of the environment that takes most."""
        # The least recently used one is the last of its list.
        scopes: dict[str, list[Path]] = {}
        for path in sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True):
            if path.suffix != _PART:
                scopes.setdefault(path.name.rpartition("-")[0], []).append(path)
        used = {scope: sum(map(_size, files)) for scope, files in scopes.items()}
        self._used = sum(used.values())
        while self._used > self._max_bytes * 3 // 4:
            largest = max(used, key=used.__getitem__)
            path = scopes[largest].pop()
            size_bytes = _size(path)
            self._used, used[largest] = self._used - size_bytes, used[largest] - size_bytes
            path.unlink(missing_ok=True)


def read(file: BinaryIO) -> RecordedResponse:
    """Return the response in a recording, whose body is the file itself; a damaged one is a `ValueError`. Blocking."""
    size_bytes = file.seek(-_DIGEST_BYTES, os.SEEK_END)
    if file.read() != _digest(file, size_bytes):
        raise ValueError("the file is not what was written")
    file.seek(size_bytes - _LENGTH.size)
    (head_bytes,) = _LENGTH.unpack(file.read(_LENGTH.size))
    if head_bytes > _MAX_HEAD_BYTES:
        raise ValueError("the head is too large")
    length = file.seek(size_bytes - _LENGTH.size - head_bytes)
    head = json.loads(file.read(head_bytes))
    headers = tuple((name, value) for name, value in head["headers"])
    file.seek(0)
    return RecordedResponse(head["status"], headers, length, file)


def _digest(file: BinaryIO, size_bytes: int) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    file.seek(0)
    while size_bytes > 0 and (chunk := file.read(min(size_bytes, _CHUNK_BYTES))):
        digest.update(chunk)
        size_bytes -= len(chunk)
    return digest.digest()


def _size(path: Path) -> int:
    return max(_LEAST_BYTES, path.stat().st_size)
