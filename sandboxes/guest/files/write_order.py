"""The order in which a call wrote its files, and how a replay gets the same one.

Programs see the order of modification times (`make`, `ls -t`), and a second run of a call may write in another order:
the order of a set, threads, a tick of the clock between two files. So a record keeps the order of the files that its
call wrote. A replay that wrote the same files gives them times in that order.

An order is a digest of the paths, and the rank of each path in the order of times, by the order of paths. Rank 0 is the
latest time before the call.
"""

import array
import contextlib
import hashlib
import os
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from sandboxes.guest.files.row_table import CLOCKED, Row
from sandboxes.linux import trees
from sandboxes.linux.descriptors import Opened

_SECOND = 1_000_000_000
_DIGEST_BYTES = 16

_PLAIN, _DEFLATED = b"p", b"z"
"""Forms of the list of ranks."""

_SHORT_BYTES = 1_024
"""Lists below this length are stored as they are: those of 256 files."""

_MAX_BYTES = 64 << 20
"""The longest list of ranks: of 16 million files. Orders come back from the store, which must not fill the memory."""


class WrittenTimes(NamedTuple):
    """The times that a call gave to what it wrote; `before_ns` is the latest of the state before, 0 without any."""

    times: Mapping[str, int]
    before_ns: int


def of_rows(rows: Mapping[str, Row | None], since_ns: int, before_ns: int) -> WrittenTimes:
    """Return the times among changed rows that are of this call: others were moved or copied with their file (pure)."""
    times = {
        path: row.mtime_ns for path, row in rows.items() if row and row.kind == CLOCKED and row.mtime_ns >= since_ns
    }
    return WrittenTimes(times, before_ns)


def packed(written: WrittenTimes) -> bytes | None:
    """Return the order of what a call wrote; None if there is none to tell, or the clock was set back (pure)."""
    times = written.times
    # Ranks begin at the time before the call, so an earlier time has none.
    if not times or min(times.values()) < written.before_ns:
        return None
    ranks = {time: rank for rank, time in enumerate(sorted({*times.values(), written.before_ns}))}
    paths = sorted(times)
    listed = array.array("I", [ranks[times[path]] for path in paths]).tobytes()
    # Compression takes 20 us, which a call that writes one file need not pay for.
    return _digest(paths) + (_PLAIN + listed if len(listed) < _SHORT_BYTES else _DEFLATED + zlib.compress(listed, 1))


def times_for(written: WrittenTimes, order: bytes) -> dict[str, int]:
    """Return new times, by which what was written is in a recorded order; empty if none fit or are needed (pure)."""
    paths = sorted(written.times)
    # Equal already, or of other paths: then the replay has not made the same files, and no times help.
    if not paths or order == packed(written) or order[:_DIGEST_BYTES] != _digest(paths):
        return {}
    form, listed = order[_DIGEST_BYTES : _DIGEST_BYTES + 1], order[_DIGEST_BYTES + 1 :]
    ranks = array.array("I")
    with contextlib.suppress(zlib.error, ValueError):
        ranks.frombytes(zlib.decompressobj().decompress(listed, _MAX_BYTES) if form == _DEFLATED else listed)
    # The order came back from the store, so its length is not certain.
    if len(ranks) != len(paths):
        return {}
    start, last = max(min(written.times.values()), written.before_ns + 1), max(ranks)
    if start % _SECOND + last >= _SECOND:
        # Whole seconds count as set by a program, so no time may be one.
        start = (start // _SECOND + 1) * _SECOND
    # The first time may be a whole second itself.
    start += start % _SECOND == 0
    return {path: written.before_ns if rank == 0 else start + rank - 1 for path, rank in zip(paths, ranks, strict=True)}


def give(top: int, times: Mapping[str, int]) -> None:
    """Set modification times of paths below a sandbox's root, in which nothing runs."""
    for path, mtime_ns in times.items():
        # Opened part by part without links: the agent made these paths.
        folder, _, name = path.rpartition("/")
        inside = trees.open_below(top, f"{folder}/" if folder else "")
        if inside is None:
            raise FileNotFoundError(path)
        with Opened(inside):
            status = os.stat(name or ".", dir_fd=inside, follow_symlinks=False)
            os.utime(name or ".", ns=(status.st_atime_ns, mtime_ns), dir_fd=inside, follow_symlinks=False)


def _digest(paths: list[str]) -> bytes:
    return hashlib.sha256(b"\0".join(os.fsencode(path) for path in paths)).digest()[:_DIGEST_BYTES]
