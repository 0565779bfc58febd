"""Which pages of a database differ from those of its root state, read from the write-ahead log.

That is what the digest of a state is made of: the same changes give the same pages, and a change that is undone leaves
none. Each commit costs one look at the pages that it wrote.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

WAL_HEADER, FRAME_HEADER = 32, 24
_FRAME = struct.Struct(">II")
_ENTRY = struct.Struct(">I16s")
_INDEX_HEADER = struct.Struct("=IIIBBHII")
_COUNTS_OF_WRITES = ((24, 28), (92, 100))
"""Of page 1: the change counter, the number of the change that "version-valid-for" is about, the library's version."""


@dataclass(frozen=True, slots=True)
class WalIndex:
    """The head of the shared index of a write-ahead log (`-shm`): committed frames, and pages of the database then."""

    frames: int
    pages: int

    @classmethod
    def read(cls, fd: int) -> "WalIndex":
        """Read it from an open `-shm` between transactions. The descriptor must stay open as long as the connection
        does: closing any descriptor of a file gives up the process's locks on it."""
        data = os.pread(fd, _INDEX_HEADER.size, 0)
        if len(data) < _INDEX_HEADER.size:
            return cls(0, 0)
        *_, frames, pages = _INDEX_HEADER.unpack(data)
        return cls(frames, pages)


def wal_bytes(frames: int, page_size: int) -> int:
    """Return the length of a log with so many frames."""
    return WAL_HEADER + frames * (FRAME_HEADER + page_size) if frames else 0


def page_size_of(header: bytes) -> int:
    """Return the page size that a database's first 100 bytes name."""
    size = int.from_bytes(header[16:18], "big")
    return 65536 if size == 1 else size


def last_versions(wal: int, first: int, last: int, page_size: int) -> Mapping[int, int]:
    """Return the pages that frames first+1..last hold, and at which offset the newest version of each begins."""
    found: dict[int, int] = {}
    for number in range(first, last):
        at = WAL_HEADER + number * (FRAME_HEADER + page_size)
        page, _ = _FRAME.unpack(os.pread(wal, _FRAME.size, at))
        found[page] = at + FRAME_HEADER
    return found


class Pages:
    """The pages of one database that differ from the root's, by number, with a 16-byte hash of each."""

    def __init__(self, root: Path, saved: bytes = b"") -> None:
        self._root = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
        self.page_size = page_size_of(os.pread(self._root, 100, 0))
        self.count = os.fstat(self._root).st_size // self.page_size
        self.changed: dict[int, bytes] = {}
        if saved:
            self.count = int.from_bytes(saved[:4], "big")
            self.changed = dict(_ENTRY.iter_unpack(saved[4:]))
        self._digest: bytes | None = None

    def close(self) -> None:
        os.close(self._root)

    def take(self, wal: int, first: int, last: int, count: int) -> None:
        """Take frames first+1..last of a log, after which the database has count pages."""
        for page, at in last_versions(wal, first, last, self.page_size).items():
            new = _without_counts(page, os.pread(wal, self.page_size, at))
            old = _without_counts(page, os.pread(self._root, self.page_size, (page - 1) * self.page_size))
            if new == old:
                self.changed.pop(page, None)
            else:
                self.changed[page] = blake2b(new, digest_size=16).digest()
        if count < self.count:
            self.changed = {page: value for page, value in self.changed.items() if page <= count}
        self.count = count
        self._digest = None

    def save(self) -> bytes:
        """Return what a later `Pages` begins with."""
        return self.count.to_bytes(4, "big") + b"".join(_ENTRY.pack(*entry) for entry in sorted(self.changed.items()))

    def digest(self) -> bytes:
        """Return 32 bytes that name the content relative to the root. 1 us for each page that differs, then nothing."""
        if self._digest is None:
            self._digest = blake2b(self.save(), digest_size=32).digest()
        return self._digest


def _without_counts(page: int, data: bytes) -> bytes:
    if page != 1 or len(data) < 100:
        return data
    blank = bytearray(data)
    for start, end in _COUNTS_OF_WRITES:
        blank[start:end] = bytes(end - start)
    return bytes(blank)
