"""The pages of a database that differ from those of its root state, read from the write-ahead log.

Theory of operation. The digest of a state must be cheap after every commit, and must not depend on history: equal
changes give equal digests, and undoing a change gives the earlier digest again.

1. A fork starts from a state whose changed pages are known. Its own changes are in a write-ahead log: a header of 32
   bytes, then frames of 24 bytes and one page each (sqlite.org/fileformat2.html#walformat).
2. After each commit, `Pages.take` reads the new frames only. The last frame of a page number is its current version.
3. A page that equals the root's page is not a change, so undone changes disappear. Other pages are remembered by a hash
   of 16 bytes.
4. Page 1 contains counters that every write increments. They are zeroed before pages are compared or hashed.
5. The digest is a hash of the page count and of the changed pages in order. It therefore names the content relative
   to the root, whose own digest is part of its name.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

WAL_HEADER, FRAME_HEADER = 32, 24
"""Lengths in bytes of the log's header and of the header of each frame."""
_FRAME = struct.Struct(">II")
"""Start of a frame's header: the page number, and the database's size in pages after a commit, else 0."""
_ENTRY = struct.Struct(">I16s")
"""Saved form of a changed page: its number and its hash."""
_INDEX_HEADER = struct.Struct("=IIIBBHII")
"""Start of the log's index: version, padding, change counter, two flags, page size, frames, pages."""
_WRITE_COUNTERS = ((24, 28), (92, 100))
"""Byte ranges of page 1 that every write changes: the change counter, "version-valid-for" and the library's version."""


@dataclass(frozen=True, slots=True)
class WalIndex:
    """The header of a log's shared index (`-shm`)."""

    frames: int  # Committed frames in the log.
    pages: int  # Pages of the database after the last commit.

    @classmethod
    def read(cls, fd: int) -> "WalIndex":
        """Read the header from an open `-shm`, between transactions."""
        # Keep the descriptor open as long as the connection: when a process closes any descriptor of a file, it loses
        # all its POSIX locks on that file.
        data = os.pread(fd, _INDEX_HEADER.size, 0)
        if len(data) < _INDEX_HEADER.size:
            return cls(0, 0)
        *_, frames, pages = _INDEX_HEADER.unpack(data)
        return cls(frames, pages)


def wal_bytes(frames: int, page_size: int) -> int:
    """Return the length in bytes of a log with this many frames."""
    return WAL_HEADER + frames * (FRAME_HEADER + page_size) if frames else 0


def page_size_of(header: bytes) -> int:
    """Return the page size that a database's first 100 bytes name."""
    size = int.from_bytes(header[16:18], "big")
    # The field has two bytes, so 65536 is stored as 1.
    return 65536 if size == 1 else size


def last_versions(wal: int, first: int, last: int, page_size: int) -> Mapping[int, int]:
    """Map each page number in frames first+1..last to the offset of the page's newest version in the log."""
    offsets: dict[int, int] = {}
    for number in range(first, last):
        frame_offset = WAL_HEADER + number * (FRAME_HEADER + page_size)
        page, _ = _FRAME.unpack(os.pread(wal, _FRAME.size, frame_offset))
        offsets[page] = frame_offset + FRAME_HEADER
    return offsets


def changed_pages(saved: bytes) -> tuple[int, list[int]]:
    """Return the number of pages of a database, and which of them differ from the root's, from what `save` returned."""
    return int.from_bytes(saved[:4], "big"), [page for page, _ in _ENTRY.iter_unpack(saved[4:])]


class Pages:
    """The pages of one database that differ from the root's: the hash of each, by page number, in `changed`."""

    def __init__(self, root: Path, saved: bytes = b"") -> None:
        """Start from a saved result of `save`; without one, from the root itself."""
        self._root = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
        self.page_size = page_size_of(os.pread(self._root, 100, 0))
        self.count = os.fstat(self._root).st_size // self.page_size  # Pages of the database.
        self.changed: dict[int, bytes] = {}
        if saved:
            self.count = int.from_bytes(saved[:4], "big")
            self.changed = dict(_ENTRY.iter_unpack(saved[4:]))
        self._digest: bytes | None = None

    def close(self) -> None:
        """Close the root's file."""
        os.close(self._root)

    def take(self, wal: int, first: int, last: int, count: int) -> None:
        """Apply the committed frames `first` to `last` of a log, after which the database has `count` pages."""
        for page, offset in last_versions(wal, first, last, self.page_size).items():
            new = _without_counters(page, os.pread(wal, self.page_size, offset))
            old = _without_counters(page, os.pread(self._root, self.page_size, (page - 1) * self.page_size))
            if new == old:
                self.changed.pop(page, None)
            else:
                self.changed[page] = blake2b(new, digest_size=16).digest()
        if count < self.count:
            # VACUUM and truncation remove pages from the end.
            self.changed = {page: value for page, value in self.changed.items() if page <= count}
        self.count = count
        self._digest = None

    def save(self) -> bytes:
        """Return the pages in the form that the constructor reads."""
        return self.count.to_bytes(4, "big") + b"".join(_ENTRY.pack(*entry) for entry in sorted(self.changed.items()))

    def digest(self) -> bytes:
        """Return 32 bytes that name the content relative to the root. Cached."""
        if self._digest is None:
            self._digest = blake2b(self.save(), digest_size=32).digest()
        return self._digest


def _without_counters(page: int, data: bytes) -> bytes:
    if page != 1 or len(data) < 100:
        return data
    blank = bytearray(data)
    for start, end in _WRITE_COUNTERS:
        blank[start:end] = bytes(end - start)
    return bytes(blank)
