"""The journal: the steps that rollouts took, appended before each answer and folded into the store from time to time.

A step is 25 bytes and one `write(2)`, some microseconds, where a transaction costs fifty. What a killed process wrote
is in the page cache and is read back at the next start; a torn last step was never answered and is dropped. With
`sync=True` each step waits for the disk, for machines that lose power.
"""

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_STEP = struct.Struct("<QQIB")
_CHECK = struct.Struct("<I")
STEP_BYTES = _STEP.size + _CHECK.size


@dataclass(frozen=True, slots=True)
class Step:
    """The turn-th call of a rollout (from 0) was answered by a record, with an `Outcome`."""

    rollout: int
    record: int
    turn: int
    outcome: int


Fold = Callable[[list[Step]], None]
"""Writes steps to the store in one transaction. The same steps may come again after a crash: it must not mind."""


class Journal:
    """An append-only file per segment. One writer, on the event loop's thread."""

    def __init__(self, directory: Path, fold: Fold, *, sync: bool = False) -> None:
        self._directory, self._fold, self._sync = directory, fold, sync
        self._descriptor = -1
        self._segment = 0
        self.pending = 0

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

    def append(self, rollout: int, record: int, turn: int, outcome: int) -> None:
        """Write one step. It survives a kill of this process from here on.

        Raises:
            OSError: the disk is full or failing; the step is not taken.
        """
        body = _STEP.pack(rollout, record, turn, outcome)
        entry = body + _CHECK.pack(zlib.crc32(body))
        if os.write(self._descriptor, entry) != STEP_BYTES:
            # Half a step would hide all that follow it.
            os.ftruncate(self._descriptor, self.pending * STEP_BYTES)
            raise OSError(28, "no space left for the journal; free some disk", str(self._directory))
        if self._sync:
            os.fdatasync(self._descriptor)
        self.pending += 1

    def fold(self) -> None:
        """Bring the steps since the last fold into the store and begin a new segment. 2 us a step."""
        if not self.pending:
            return
        old = self._path(self._segment)
        steps = list(read_steps(old.read_bytes()))
        self._fold(steps)
        os.close(self._descriptor)
        self._start_segment()
        old.unlink()

    def close(self) -> None:
        """Fold and let go of the file."""
        if self._descriptor >= 0:
            self.fold()
            os.close(self._descriptor)
            self._descriptor = -1
            self._path(self._segment).unlink(missing_ok=True)

    def _segments(self) -> list[Path]:
        return sorted(self._directory.glob("*.steps"))

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:012d}.steps"

    def _start_segment(self) -> None:
        self._segment += 1
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self._path(self._segment), flags, 0o600)
        self.pending = 0


def read_steps(data: bytes) -> Iterator[Step]:
    """Yield the steps that data holds, up to the first torn or damaged one."""
    for at in range(0, len(data) - STEP_BYTES + 1, STEP_BYTES):
        body = data[at : at + _STEP.size]
        (check,) = _CHECK.unpack_from(data, at + _STEP.size)
        if zlib.crc32(body) != check:
            return
        yield Step(*_STEP.unpack(body))
