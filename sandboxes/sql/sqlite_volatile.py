"""The clock and the lots of SQLite: noticed when a statement really uses them, or made to stand still.

Whatever reads the clock (`now`, `date()`, `CURRENT_TIMESTAMP`, in a view, a default or a trigger as well) asks the
library's VFS for it, and there it is noticed: in the worker's memory the library's function is replaced. Lots
(`random`, `randomblob`) are functions that a connection may replace.
"""

import _sqlite3
import contextlib
import ctypes
import os
import sqlite3
import time
from hashlib import blake2b

_UNIX_EPOCH_MS = 210_866_760_000_000
"""The Unix epoch in SQLite's time: milliseconds since noon of 24 November 4714 BC."""
MAX_BLOB = 10 << 20

_POINTERS = (
    "xOpen", "xDelete", "xAccess", "xFullPathname", "xDlOpen", "xDlError", "xDlSym", "xDlClose", "xRandomness",
    "xSleep", "xCurrentTime", "xGetLastError", "xCurrentTimeInt64",
)  # fmt: skip


class _Vfs(ctypes.Structure):
    """`sqlite3_vfs` of sqlite3.h, version 2: part of the library's stable interface."""

    _fields_ = [
        ("iVersion", ctypes.c_int), ("szOsFile", ctypes.c_int), ("mxPathname", ctypes.c_int),
        ("pNext", ctypes.c_void_p), ("zName", ctypes.c_char_p), ("pAppData", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]  # fmt: skip


_CurrentTime = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64))
_DATE_FUNCTIONS = frozenset({
    "date", "time", "datetime", "julianday", "unixepoch", "strftime", "timediff", "current_date", "current_time",
    "current_timestamp",
})  # fmt: skip


class VolatileInputs:
    """Clock and lots of one process. Make one, then `attach` every connection.

    noticed: whether either was used since `begin`.
    """

    def __init__(self) -> None:
        self.used = False
        self._frozen_ms: int | None = None
        self._seed, self._drawn = b"", 0
        self._callback = _CurrentTime(self._now)
        self.sees_clock = self._replace_clock()

    def begin(self, frozen_ms: int | None, seed: bytes) -> None:
        """Get ready for a statement. frozen_ms: what a clock that stands still shows; then lots come from seed."""
        self.used, self._frozen_ms, self._seed, self._drawn = False, frozen_ms, seed, 0

    def attach(self, connection: sqlite3.Connection) -> None:
        """Let this connection's lots come from here."""
        connection.create_function("random", 0, self._random)
        connection.create_function("randomblob", 1, self._randomblob)

    def named(self, function: str) -> None:
        """Note that a statement names a function; only where the clock cannot be watched does that tell anything."""
        if not self.sees_clock and function in _DATE_FUNCTIONS:
            self.used = True

    def _replace_clock(self) -> bool:
        vfs = _default_vfs()
        if vfs is not None:
            vfs.xCurrentTimeInt64 = ctypes.cast(self._callback, ctypes.c_void_p).value
        return vfs is not None

    def _now(self, _vfs: int | None, out: "ctypes._Pointer[ctypes.c_int64]") -> int:
        now_ms = self._frozen_ms
        if now_ms is None:
            self.used = True
            now_ms = time.time_ns() // 1_000_000
        out[0] = _UNIX_EPOCH_MS + now_ms
        return 0

    def _random(self) -> int:
        return int.from_bytes(self._lots(8), "big", signed=True)

    def _randomblob(self, size: object) -> bytes:
        wanted = 0
        with contextlib.suppress(TypeError, ValueError):
            wanted = int(size)  # type: ignore[call-overload]
        if wanted > MAX_BLOB:
            raise ValueError("string or blob too big")
        return self._lots(max(1, wanted))

    def _lots(self, size: int) -> bytes:
        if self._frozen_ms is None:
            self.used = True
            return os.urandom(size)
        drawn = b""
        while len(drawn) < size:
            self._drawn += 1
            drawn += blake2b(self._drawn.to_bytes(8, "big"), key=self._seed[:64]).digest()
        return drawn[:size]


def clock_can_be_set() -> bool:
    """Say whether the library's clock can be watched and set; not where its symbols are hidden (a static build)."""
    return _default_vfs() is not None


def _default_vfs() -> _Vfs | None:
    with contextlib.suppress(OSError, AttributeError):
        # The symbols as `sqlite3` itself has them: another copy of the library would have another clock.
        library = ctypes.CDLL(getattr(_sqlite3, "__file__", None))
        library.sqlite3_vfs_find.restype = ctypes.c_void_p
        vfs = _Vfs.from_address(library.sqlite3_vfs_find(None))
        if vfs.iVersion >= 2:
            return vfs
    return None
