"""The clock and the random numbers of SQLite: their use is detected, and they can be frozen.

A result that depends on either is not shared between rollouts. Detection must not depend on a statement's text, because
views, defaults and triggers read the clock too:

- Every function of time asks the library's default VFS for the current time. This module replaces that one function
  pointer in the memory of the worker (sqlite.org/c3ref/vfs.html).
- `random` and `randomblob` are ordinary functions, which a connection may replace.
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
"""Limit of one value in bytes. Larger values make single operations too long to interrupt."""

_POINTERS = (
    "xOpen", "xDelete", "xAccess", "xFullPathname", "xDlOpen", "xDlError", "xDlSym", "xDlClose", "xRandomness",
    "xSleep", "xCurrentTime", "xGetLastError", "xCurrentTimeInt64",
)  # fmt: skip


class _Vfs(ctypes.Structure):
    """The structure `sqlite3_vfs` of sqlite3.h, version 2, which is part of the library's stable interface."""

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
    """The clock and the random numbers of all SQLite connections in a process."""

    def __init__(self) -> None:
        self.used = False  # A statement has used the clock or random numbers since `begin`, and they were not frozen.
        self._frozen_ms: int | None = None
        self._seed, self._block = b"", 0
        self._callback = _CurrentTime(self._now)
        # The library's clock is replaced. False for a build that hides its symbols.
        self.sees_clock = self._replace_clock()

    def begin(self, frozen_ms: int | None, seed: bytes) -> None:
        """Prepare for a statement; `frozen_ms` (Unix time) freezes the clock, and the seed decides random numbers."""
        self.used, self._frozen_ms, self._seed, self._block = False, frozen_ms, seed, 0

    def attach(self, connection: sqlite3.Connection) -> None:
        """Replace the random functions of a connection."""
        connection.create_function("random", 0, self._random)
        connection.create_function("randomblob", 1, self._randomblob)

    def named(self, function: str) -> None:
        """Note that a statement names a function. This is the fallback where the clock cannot be replaced."""
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
        return int.from_bytes(self._random_bytes(8), "big", signed=True)

    def _randomblob(self, size: object) -> bytes:
        # As in SQLite, an argument that is not a number counts as 0, and the blob has at least one byte.
        length = 0
        with contextlib.suppress(TypeError, ValueError):
            length = int(size)  # type: ignore[call-overload]
        if length > MAX_BLOB:
            raise ValueError("string or blob too big")
        return self._random_bytes(max(1, length))

    def _random_bytes(self, size: int) -> bytes:
        if self._frozen_ms is None:
            self.used = True
            return os.urandom(size)
        data = b""
        while len(data) < size:
            self._block += 1
            data += blake2b(self._block.to_bytes(8, "big"), key=self._seed[:64]).digest()
        return data[:size]


def clock_can_be_set() -> bool:
    """Return whether the library's clock can be replaced. A static build hides the symbols that this needs."""
    return _default_vfs() is not None


def _default_vfs() -> _Vfs | None:
    with contextlib.suppress(OSError, AttributeError):
        # Look the symbol up in the module `sqlite3` itself: another copy of the library would have another clock.
        library = ctypes.CDLL(getattr(_sqlite3, "__file__", None))
        library.sqlite3_vfs_find.restype = ctypes.c_void_p
        vfs = _Vfs.from_address(library.sqlite3_vfs_find(None))
        if vfs.iVersion >= 2:
            return vfs
    return None
