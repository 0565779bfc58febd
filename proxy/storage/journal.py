"""The journal: the steps that rollouts took, written before each response and folded into the store later.

1. `append` copies a step of 32 bytes into a shared mapping of a file, because it is on the way of every hit: a
   `write(2)` or a transaction takes many times as long.
2. The pages of the mapping belong to the kernel, so a step survives a kill of the process from the moment it is
   copied. A loss of power it survives only with `sync=True`, where each step waits for the disk.
3. Files are segments of fixed size (`journal_segments`). `trickle` starts a new segment, folds the steps of the old
   ones into the store in slices, and deletes a segment when all of its steps are in the store.
4. A killed process leaves segments behind, and the next `open` folds them. Folding a step twice does no harm, so
   nothing needs to record how far a fold had come.
5. A mark in the store says which segments there must be, and on which boot of the machine they were written. `open`
   compares: a rollout whose steps may be missing is marked as lost in the store, and never continues from an earlier
   position. A damaged segment is renamed to `*.damaged`.
"""

import asyncio
import mmap
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from proxy.storage.errors import DamagedError
from proxy.storage.journal_segments import SEGMENT_BYTES, STEP_BYTES, JournalEntry, checksum, pack_step, read_segment
from sandboxes.linux.files import boot_id, sync_path

_SLICE = 1000
"""Entries folded at a time while calls are answered. A hit may wait for so many."""
MARK = "journal"
"""The mark in the store that says which segments there must be."""
_MARK_MEMBERS: dict[str, Callable[[Any], Any]] = {"open": bool, "boot": str, "sync": bool, "first": int, "last": int}

Fold = Callable[[list[JournalEntry]], None]
"""Writes steps to the store in one transaction, and skips the steps that the store has."""


class JournalStore(Protocol):
    """What the journal needs of the store. `proxy.storage.rollouts.RolloutStore` is one."""

    def recover(self, steps: list[JournalEntry]) -> Mapping[int, str]:
        """Write the steps that continue where the store stands; return why the others do not, by rollout."""
        ...

    def lose(self, rollouts: Collection[int] | None, why: str) -> int:
        """Write that running rollouts (None: all of them) have lost their position; return how many that is new to."""
        ...


class JournalMarks(Protocol):
    """What the journal needs of the store's file. `proxy.storage.database.StoreDatabase` is one."""

    def mark(self, name: str) -> str | None:
        """Return a mark; None if it was never put. Raises `DamagedError` if it is not what was put."""
        ...

    def put_mark(self, name: str, value: str, *, durable: bool) -> None:
        """Write a mark; with durable it is on the disk afterwards."""
        ...


@dataclass(slots=True)
class JournalRecovery:
    """What `Journal.open` met."""

    steps: int = 0  # How many it read.
    # What was wrong, a sentence each; empty after a kill or an orderly end.
    damage: list[str] = field(default_factory=list)
    lost: int = 0  # How many rollouts lost their position for it.


class Journal:
    """An append-only log of steps in segments. Only the event loop's thread may use it."""

    def __init__(
        self, directory: Path, fold: Fold, store: JournalStore, marks: JournalMarks, *, sync: bool = False
    ) -> None:
        """Create a journal that is not open yet; with `sync`, a step survives a loss of power.

        `fold` writes steps to the store, which takes what earlier processes left; `marks` name the segments that must
        be.
        """
        self._directory, self._fold, self._sync = directory, fold, sync
        self._store, self._marks = store, marks
        self._map: mmap.mmap | None = None
        self._used = self._segment = self._previous = 0
        # Entries of the current segment, and full segments with the entries that are still to be folded.
        self._pending: list[JournalEntry] = []
        self._full: deque[tuple[Path, list[JournalEntry]]] = deque()

    def open(self) -> JournalRecovery:
        """Fold what earlier processes left behind, mark rollouts that lost steps, and start a segment."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._sync:
            sync_path(self._directory.parent)
        recovery = JournalRecovery()
        mark = self._read_mark(recovery)
        segments = {int(path.stem): path for path in self._directory.glob("*.steps")}
        self._check_presence(mark, set(segments), recovery)
        for number, path in sorted(segments.items()):
            self._recover(number, path, recovery)
        self._segment = max([*segments, mark.get("last", 0)])
        # Durable, or a loss of power could make the next process believe in an orderly end.
        self._start_segment(durable=True)
        return recovery

    def append(self, step: JournalEntry) -> None:
        """Write one step, which now survives a kill. Raises OSError or StoreError if it could not; it is not taken."""
        if self._used + STEP_BYTES > SEGMENT_BYTES:
            self._rotate()
        assert self._map is not None
        body, start = pack_step(step, self._previous), self._used
        end = start + STEP_BYTES
        # The checksum comes second: a kill in between leaves a slot without one, which the next process drops.
        self._map[start : end - 4] = body
        self._map[end - 4 : end] = checksum(body, self._segment, start)
        if self._sync:
            self._map.flush()
        self._used, self._previous = end, step.rollout
        self._pending.append(step)

    def fold(self) -> None:
        """Fold every step now, before the store is queried for steps."""
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
            # An orderly end: from here on no segment is expected.
            self._put_mark(is_open=False)
            self._path(self._segment).unlink(missing_ok=True)

    def _read_mark(self, recovery: JournalRecovery) -> dict[str, Any]:
        """Return the mark of the last process; empty if there was none, or if its mark is damaged."""
        try:
            mark = orjson.loads(self._marks.mark(MARK) or "{}")
            return {name: kind(mark[name]) for name, kind in _MARK_MEMBERS.items()} if mark else {}
        except (ValueError, TypeError, KeyError, DamagedError):
            self._lose(None, "the mark of the journal in the store is damaged", recovery)
            return {}

    def _check_presence(self, mark: dict[str, Any], present: set[int], recovery: JournalRecovery) -> None:
        """Compare the segments that are there with the mark."""
        if not mark.get("open"):
            return
        missing = sorted(set(range(mark["first"], mark["last"] + 1)) - present)
        if missing:
            self._lose(None, f"journal segment {missing[0]} is missing, with the last steps of rollouts", recovery)
        elif mark["boot"] != boot_id() and not mark["sync"]:
            # Neither the journal nor the store waited for the disk, so the last steps of any rollout may be missing.
            self._lose(None, "the machine stopped, and the last steps may not have reached its disk", recovery)

    def _recover(self, number: int, path: Path, recovery: JournalRecovery) -> None:
        """Fold one segment of an earlier process; set it aside if it is damaged."""
        reading = read_segment(path.read_bytes(), number, size_bytes=SEGMENT_BYTES)
        recovery.steps += len(reading.steps)
        if reading.damage and (reading.unknown or 0 in reading.lost):
            self._lose(None, reading.damage, recovery)
        elif reading.damage:
            self._lose(reading.lost, reading.damage, recovery)
        # After the losses: what is lost takes no more steps.
        for rollout, why in self._store.recover(reading.steps).items():
            self._lose({rollout}, why, recovery)
        if reading.damage:
            path.rename(path.with_suffix(".damaged"))
        else:
            path.unlink()

    def _lose(self, rollouts: Collection[int] | None, why: str, recovery: JournalRecovery) -> None:
        recovery.lost += self._store.lose(rollouts, why)
        recovery.damage.append(why)

    def _rotate(self) -> None:
        """Start a new segment, unless the current one is empty."""
        if self._pending:
            full, old = (self._path(self._segment), self._pending), self._map
            # First the new segment: if the disk is full, this raises and the old one stays in use.
            self._full.append(full)
            try:
                self._start_segment()
            except BaseException:
                self._full.pop()
                raise
            if old is not None:
                old.close()

    def _fold_some(self, count: int) -> None:
        segment, steps = self._full[0]
        self._fold(steps[:count])
        del steps[:count]
        if not steps:
            self._full.popleft()
            # The mark comes first: a segment that is missing while it is expected counts as damage.
            self._put_mark(is_open=True)
            # Only now: after a kill in between, the next process folds the whole segment again.
            segment.unlink()

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:012d}.steps"

    def _start_segment(self, *, durable: bool = False) -> None:
        path, draft = self._path(self._segment + 1), self._directory / "draft"
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # Reserve all blocks now: a full disk raises here. In a sparse file, writing to the mapping would be a
            # SIGBUS that kills the process.
            os.posix_fallocate(descriptor, 0, SEGMENT_BYTES)
            mapping = mmap.mmap(descriptor, SEGMENT_BYTES)
            if self._sync:
                os.fsync(descriptor)
        except OSError:
            draft.unlink()
            raise
        finally:
            os.close(descriptor)
        # A segment appears with its full size, so a shorter one was cut.
        draft.rename(path)
        if self._sync:
            sync_path(self._directory)
        self._segment += 1
        try:
            # Before the first step: from now on the segment is expected.
            self._put_mark(is_open=True, durable=durable)
        except BaseException:
            self._segment -= 1
            path.unlink()
            raise
        self._map, self._used, self._pending = mapping, 0, []

    def _put_mark(self, *, is_open: bool, durable: bool = False) -> None:
        first = int(self._full[0][0].stem) if self._full else self._segment
        mark = {"open": is_open, "boot": boot_id(), "sync": self._sync, "first": first, "last": self._segment}
        self._marks.put_mark(MARK, orjson.dumps(mark).decode(), durable=durable)
