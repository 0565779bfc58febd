"""The positions that an ingress has passed on to its agents, in a file that survives a kill of the process.

The file is mapped into memory. A position is appended in place, and belongs to the kernel once it is copied. When the
file is full, the latest position of each rollout is written to a new file. With `sync`, each one waits for the disk.
"""

import mmap
import os
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import Self

from proxy.cluster.protocol import Position
from sandboxes.linux.files import boot_id, sync_path

_HEAD = struct.Struct("<8s40sI")
_MAGIC = b"FKPTPOS1"
_ENTRY = struct.Struct("<QQI")
_CHECKSUM = struct.Struct("<I")
_ENTRY_BYTES = _ENTRY.size + _CHECKSUM.size
_START = 64
"""Where the entries begin, behind the head."""
_MIN_ENTRIES = 1 << 15
"""Entries of an empty file: 0.8 MB. Each rewrite frees at least half of a file."""
_ENDED = 0xFFFFFFFF
"""The turn of an entry which says that a rollout has ended."""


class PositionsLostError(RuntimeError):
    """The file does not have all positions that were passed on, so none of it may be used."""


class PositionFile:
    """The latest position of each rollout that this ingress has passed an answer to."""

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        """Read the file, or create it.

        Args:
            path: The file.
            sync: Whether each position waits for the disk, so that it survives a loss of power.

        Raises:
            PositionsLostError: The machine has stopped since the file was written, or the file is damaged.
        """
        self._path, self._sync = path, sync
        self._positions: dict[int, Position] = {}
        self._map: mmap.mmap | None = None
        self._used = self._size = 0
        if path.exists():
            self._read(path.read_bytes())
        self._rewrite()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, rollout: int) -> Position | None:
        """Return the latest position of a rollout; None if no answer was passed on to it."""
        return self._positions.get(rollout)

    def put(self, rollout: int, position: Position) -> None:
        """Keep a position, unless a later one is known. 1.5 us. It survives a kill from here on.

        Raises:
            OSError: The disk is full or fails. The position is not kept, so the answer must not be passed on.
        """
        known = self._positions.get(rollout)
        if known is None or known < position:
            self._append(rollout, position)
            self._positions[rollout] = position

    def forget(self, rollout: int) -> None:
        """Forget a rollout that has ended."""
        if self._positions.pop(rollout, None) is not None:
            self._append(rollout, Position(_ENDED, 0))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def _append(self, rollout: int, position: Position) -> None:
        if self._used + _ENTRY_BYTES > self._size:
            self._rewrite()
        assert self._map is not None
        body, at = _ENTRY.pack(rollout, position.node, position.turn), self._used
        # The checksum comes second: a kill in between leaves an entry without one, whose answer was never passed on.
        self._map[at : at + _ENTRY.size] = body
        self._map[at + _ENTRY.size : at + _ENTRY_BYTES] = _checksum(body, at)
        if self._sync:
            self._map.flush()
        self._used = at + _ENTRY_BYTES

    def _read(self, data: bytes) -> None:
        if len(data) < _START:
            raise PositionsLostError("the file of positions is cut")
        magic, boot, was_synced = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise PositionsLostError("the file of positions is damaged")
        if boot.rstrip(b"\0") != boot_id().encode() and not was_synced:
            raise PositionsLostError("the machine stopped, and the last positions may not have reached its disk")
        for at in range(_START, len(data) - _ENTRY_BYTES + 1, _ENTRY_BYTES):
            body, checksum = data[at : at + _ENTRY.size], data[at + _ENTRY.size : at + _ENTRY_BYTES]
            if checksum != _checksum(body, at):
                # The last entry may be half written. Anything behind it means that this is damage.
                if any(data[at + _ENTRY_BYTES :]):
                    raise PositionsLostError("the file of positions is damaged")
                break
            rollout, node, turn = _ENTRY.unpack(body)
            if turn == _ENDED:
                self._positions.pop(rollout, None)
            else:
                self._positions[rollout] = Position(turn, node)

    def _rewrite(self) -> None:
        """Write the latest positions to a new file, and go on in it."""
        entries = max(_MIN_ENTRIES, 2 * len(self._positions))
        size, draft = _START + entries * _ENTRY_BYTES, self._path.with_suffix(".draft")
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # A full disk must raise here: a write to a mapped hole would kill the process.
            os.posix_fallocate(descriptor, 0, size)
            mapped = mmap.mmap(descriptor, size)
            mapped[: _HEAD.size] = _HEAD.pack(_MAGIC, boot_id().encode(), self._sync)
            at = _START
            for rollout, position in self._positions.items():
                body = _ENTRY.pack(rollout, position.node, position.turn)
                mapped[at : at + _ENTRY_BYTES] = body + _checksum(body, at)
                at += _ENTRY_BYTES
            if self._sync:
                mapped.flush()
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft.rename(self._path)
        if self._sync:
            sync_path(self._path.parent)
        self.close()
        self._map, self._used, self._size = mapped, at, size


def _checksum(body: bytes, at: int) -> bytes:
    # With its place, so that an unused slot of zeros has no valid checksum.
    return _CHECKSUM.pack(zlib.crc32(body, at))
