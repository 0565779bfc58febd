"""The journal: the steps that rollouts took, written before each response and folded into the store later.

Theory of operation:

1. `append` copies an entry of 25 bytes into a shared mapping of a file. This takes well under a microsecond, against
   10 us for a `write(2)` under load and 50 us for a transaction, and it is on the way of every hit.
2. The pages of the mapping belong to the kernel, so an entry survives a kill of the process from the moment it is
   copied. A loss of power it survives only with `sync=True`, where each step waits for the disk.
3. Files are segments of fixed size. `trickle` starts a new segment, folds the entries of the old ones into the store
   in slices, and deletes a segment when all of its entries are in the store.
4. A killed process leaves segments behind, and the next `open` folds them. Folding an entry twice does no harm, so
   nothing needs to record how far a fold had come. Each entry ends with a checksum: the last entry may be torn, but
   its response was never sent, so it is dropped.
"""

import asyncio
import mmap
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_ENTRY = struct.Struct("<QIQB")
_CHECK = struct.Struct("<I")
STEP_BYTES = _ENTRY.size + _CHECK.size
"""Size of an entry in a segment: rollout, turn, record, outcome and checksum."""
_SEGMENT_BYTES = 1 << 20
"""Size of a segment in bytes: 40,000 entries. Smaller ones would be rotated within a fold interval under load."""
_SLICE = 1000
"""Entries folded at a time while calls are answered: about 2 ms, the longest wait that a fold adds to a hit."""


class JournalEntry(NamedTuple):
    """One step of a rollout.

    Attributes:
        rollout: Number of the rollout.
        turn: Which of the rollout's calls this was, from 0.
        record: Number of the record that answered the call.
        outcome: How the call was answered; an `Outcome`.
    """

    rollout: int
    turn: int
    record: int
    outcome: int


Fold = Callable[[list[JournalEntry]], None]
"""Writes steps to the store in one transaction, and skips the steps that the store has."""


class Journal:
    """An append-only log of steps in segments. Only the event loop's thread may use it."""

    def __init__(self, directory: Path, fold: Fold, *, sync: bool = False) -> None:
        """Create a journal that is not open yet.

        Args:
            directory: Where the segments are.
            fold: Writes steps to the store.
            sync: Whether each step waits for the disk, so that it survives a loss of power.
        """
        self._directory, self._fold, self._sync = directory, fold, sync
        self._map: mmap.mmap | None = None
        self._used = 0
        self._segment = 0
        # Entries of the current segment, and full segments with the entries that are still to be folded.
        self._pending: list[JournalEntry] = []
        self._full: deque[tuple[Path, list[JournalEntry]]] = deque()

    def open(self) -> int:
        """Fold what earlier processes left behind, start a segment, and return how many steps were folded."""
        self._directory.mkdir(parents=True, exist_ok=True)
        folded = 0
        for segment in sorted(self._directory.glob("*.steps")):
            steps = list(read_steps(segment.read_bytes()))
            if steps:
                self._fold(steps)
            folded += len(steps)
            self._segment = int(segment.stem)
            segment.unlink()
        self._start_segment()
        return folded

    def append(self, step: JournalEntry) -> None:
        """Write one step. From here on it survives a kill of this process.

        Raises:
            OSError: The disk is full or fails; the step is not taken.
        """
        if self._used + STEP_BYTES > _SEGMENT_BYTES:
            self._rotate()
        assert self._map is not None
        body = _ENTRY.pack(*step)
        self._map[self._used : self._used + STEP_BYTES] = body + _CHECK.pack(zlib.crc32(body))
        if self._sync:
            self._map.flush()
        self._used += STEP_BYTES
        self._pending.append(step)

    def fold(self) -> None:
        """Fold every step now, before the store is queried for steps. 2 us a step."""
        self._rotate()
        while self._full:
            self._fold_some(len(self._full[0][1]))

    async def trickle(self) -> None:
        """Fold every step, in slices between which calls are answered."""
        self._rotate()
        while self._full:
            self._fold_some(_SLICE)
            await asyncio.sleep(0)

    def close(self) -> None:
        """Fold every step and close the segment. Idempotent."""
        if self._map is not None:
            self.fold()
            self._map.close()
            self._map = None
            self._path(self._segment).unlink(missing_ok=True)

    def _rotate(self) -> None:
        """Start a new segment, unless the current one is empty."""
        if self._pending:
            full, old = (self._path(self._segment), self._pending), self._map
            # First the new segment: if the disk is full, this raises and the old one stays in use.
            self._start_segment()
            self._full.append(full)
            if old is not None:
                old.close()

    def _fold_some(self, count: int) -> None:
        segment, steps = self._full[0]
        self._fold(steps[:count])
        del steps[:count]
        if not steps:
            # Only now: after a kill in between, the next process folds the whole segment again.
            segment.unlink()
            self._full.popleft()

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:012d}.steps"

    def _start_segment(self) -> None:
        path = self._path(self._segment + 1)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Reserve all blocks now: a full disk raises here. In a sparse file, writing to the mapping would be a
            # SIGBUS that kills the process.
            os.posix_fallocate(descriptor, 0, _SEGMENT_BYTES)
            self._map = mmap.mmap(descriptor, _SEGMENT_BYTES)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        self._segment += 1
        self._used, self._pending = 0, []


def read_steps(data: bytes) -> Iterator[JournalEntry]:
    """Yield the steps of a segment, up to the first entry that is torn or damaged; unused space reads as damaged."""
    for start in range(0, len(data) - STEP_BYTES + 1, STEP_BYTES):
        body = data[start : start + _ENTRY.size]
        (checksum,) = _CHECK.unpack_from(data, start + _ENTRY.size)
        if zlib.crc32(body) != checksum:
            return
        yield JournalEntry(*_ENTRY.unpack(body))
