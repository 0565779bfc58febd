"""The journal: the steps that rollouts took, written before each answer and folded into the store from time to time.

A step is 25 bytes copied into a shared mapping of a file, well under a microsecond, where a `write(2)` was measured at
ten under load and a transaction at fifty. What a killed process wrote is in the page cache and is read back at the next
start; a torn last step was never answered and is dropped. With `sync=True` each step waits for the disk, for machines
that lose power.
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

_STEP = struct.Struct("<QIQB")
_CHECK = struct.Struct("<I")
STEP_BYTES = _STEP.size + _CHECK.size


_SEGMENT_BYTES = 1 << 20
_SLICE = 1000
"""Steps folded at a time while calls are answered: about 2 ms."""


class JournalEntry(NamedTuple):
    """The turn-th call of a rollout (from 0) was answered by a record, with an `Outcome`."""

    rollout: int
    turn: int
    record: int
    outcome: int


Fold = Callable[[list[JournalEntry]], None]
"""Writes steps to the store in one transaction. The same steps may come again after a crash: it must not mind."""


class Journal:
    """An append-only file per segment. One writer, on the event loop's thread."""

    def __init__(self, directory: Path, fold: Fold, *, sync: bool = False) -> None:
        self._directory, self._fold, self._sync = directory, fold, sync
        self._map: mmap.mmap | None = None
        self._used = 0
        self._segment = 0
        self._pending: list[JournalEntry] = []
        self._queue: deque[tuple[Path, list[JournalEntry]]] = deque()

    def open(self) -> int:
        """Fold what earlier processes left and start a new segment; return how many steps were folded."""
        self._directory.mkdir(parents=True, exist_ok=True)
        folded = 0
        for segment in self._segments():
            steps = list(read_steps(segment.read_bytes()))
            if steps:
                self._fold(steps)
            folded += len(steps)
            self._segment = int(segment.stem)
            segment.unlink()
        self._start_segment()
        return folded

    def append(self, step: JournalEntry) -> None:
        """Write one step. It survives a kill of this process from here on.

        Raises:
            OSError: the disk is full or failing; the step is not taken.
        """
        if self._used + STEP_BYTES > _SEGMENT_BYTES:
            self._rotate()
        assert self._map is not None
        body = _STEP.pack(*step)
        self._map[self._used : self._used + STEP_BYTES] = body + _CHECK.pack(zlib.crc32(body))
        if self._sync:
            self._map.flush()
        self._used += STEP_BYTES
        self._pending.append(step)

    def fold(self) -> None:
        """Bring every step into the store now. 2 us a step."""
        self._rotate()
        while self._queue:
            self._fold_some(len(self._queue[0][1]))

    async def trickle(self) -> None:
        """Bring the steps up to now into the store, in slices between which calls are answered."""
        self._rotate()
        while self._queue:
            self._fold_some(_SLICE)
            await asyncio.sleep(0)

    def close(self) -> None:
        """Fold and let go of the file."""
        if self._map is not None:
            self.fold()
            self._map.close()
            self._map = None
            self._path(self._segment).unlink(missing_ok=True)

    def _rotate(self) -> None:
        if self._pending:
            full, old = (self._path(self._segment), self._pending), self._map
            self._start_segment()
            self._queue.append(full)
            if old is not None:
                old.close()

    def _fold_some(self, most: int) -> None:
        segment, steps = self._queue[0]
        self._fold(steps[:most])
        del steps[:most]
        if not steps:
            # Only now: a kill in between finds the whole segment again, and folding a step twice does no harm.
            segment.unlink()
            self._queue.popleft()

    def _segments(self) -> list[Path]:
        return sorted(self._directory.glob("*.steps"))

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:012d}.steps"

    def _start_segment(self) -> None:
        path = self._path(self._segment + 1)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # All of it now: a full disk is an error here, but a SIGBUS in a mapping without blocks under it.
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
    """Yield the steps that data holds, up to the first torn or damaged one."""
    for at in range(0, len(data) - STEP_BYTES + 1, STEP_BYTES):
        body = data[at : at + _STEP.size]
        (check,) = _CHECK.unpack_from(data, at + _STEP.size)
        if zlib.crc32(body) != check:
            return
        yield JournalEntry(*_STEP.unpack(body))
