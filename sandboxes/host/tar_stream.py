"""The bytes of a tar that are read once, forward, while digests of them are computed."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import BinaryIO, Self

from sandboxes.guest.files.facts import PIECE_BYTES, ContentHash
from sandboxes.portability import NotPortableError

_MAX_HEADER_BYTES = 4 << 20
"""Limits one pax header. `tarfile` reads a header into memory; attributes of a file take at most 64 KiB each."""


class TarStream:
    """A file for `tarfile`. Contents of members are read by `content`, and not through `tarfile`, which copies them."""

    # Digests of large pieces are computed in a thread of its own, while the caller writes them and reads the next one.

    def __init__(self, data: BinaryIO) -> None:
        """Begin to read; data may be a pipe or a socket."""
        self._data, self._position = data, 0
        self._whole, self._outline = hashlib.sha256(), hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "tar digests")
        self._hashing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown()

    # -- called by `tarfile` -----------------------------------------------------------------------------------------

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, position: int) -> None:
        """Read on to a position. `tarfile` goes back only for members that no layer has: a `NotPortableError`."""
        if position < self._position:
            raise NotPortableError("one of its members is read twice")
        while self._position < position and self.read(min(PIECE_BYTES, position - self._position)):
            pass

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes of headers and padding; `NotPortableError` if a header claims to have megabytes."""
        # tarfile reads a header with the size that the header itself claims.
        if size > _MAX_HEADER_BYTES:
            raise NotPortableError("one of its headers is too large")
        data = self._next(size)
        self._hash(len(data), partial(self._whole.update, data))
        self._outline.update(data)
        return data

    # -- called by the code that unpacks -----------------------------------------------------------------------------

    def content(self, size: int, content: ContentHash | None = None) -> Iterator[bytes]:
        """Yield, in pieces, the content of the member whose header was read last; `content` gets the pieces too."""
        if size < 0:
            raise NotPortableError("one of its members has a negative size")
        for at in range(0, size, PIECE_BYTES):
            piece = self._next(min(PIECE_BYTES, size - at))
            if len(piece) < min(PIECE_BYTES, size - at):
                raise NotPortableError("it is not a tar of a layer: it was cut")
            self._hash(len(piece), partial(self._update, at, piece, content))
            yield piece
        self._wait()

    def finish(self) -> tuple[str, str]:
        """Read to the end; return the SHA-256 of all bytes, and of all bytes but contents, in hexadecimal."""
        while self.read(PIECE_BYTES):
            pass
        self._wait()
        return self._whole.hexdigest(), self._outline.hexdigest()

    def _next(self, size: int) -> bytes:
        data = self._data.read(size)
        while len(data) < size and (more := self._data.read(size - len(data))):
            data += more
        self._position += len(data)
        return data

    def _update(self, at: int, piece: bytes, content: ContentHash | None) -> None:
        self._whole.update(piece)
        if content is not None:
            content.update(at, piece)

    def _hash(self, size: int, update: Callable[[], None]) -> None:
        """Update digests, after the update before. At most one piece waits."""
        self._wait()
        if size == PIECE_BYTES:
            self._hashing = self._thread.submit(update)
        else:
            update()

    def _wait(self) -> None:
        hashing, self._hashing = self._hashing, None
        if hashing is not None:
            hashing.result()
