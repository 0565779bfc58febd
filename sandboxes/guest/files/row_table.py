"""Rows of paths that differ from the root state, and their form on disk: a sorted table that is mapped, not read.

    header      magic, number of rows, number of ordered rows, bytes of all paths, whether the table is complete
    sums        the two sums of the state (`state_sums`), 512 bytes each
    rows        32 bytes each, in the order of paths: hash, modification time, where the path ends, kind
    order       numbers of the rows with a time of the clock, in the order of times, 4 bytes each
    paths       all paths one after another

A layer has a table of what it changed. A *complete* table has every row of its state instead, so nothing below it is
needed. Tables are written by the sandbox's supervisor, for itself: only its own process and the proxy hold them.
"""

import array
import itertools
import mmap
import os
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from sandboxes.linux.descriptors import Opened

_HEADER = struct.Struct("<4sIIQB3x")
_ROW = struct.Struct("<16sqIB3x")
_MAGIC = b"FPR1"
_SUM = 512


class Row(NamedTuple):
    """How a path differs from the root state."""

    kind: int  # `GONE`, `FIXED` or `CLOCKED`.
    # A hash of what is there (`facts`); empty if it is gone, and for a directory of which only the time differs.
    what: bytes = b""
    mtime_ns: int = 0

    @property
    def is_time_only(self) -> bool:
        """Whether it is a directory of which only the time differs."""
        return self.kind != GONE and not self.what


SAME, GONE, FIXED, CLOCKED = range(4)
"""Kinds of rows. SAME stands in tables for None: the path is as in the root state, whatever lies below says. GONE: only
the root state has it. FIXED: its time was set by a program and counts as it is. CLOCKED: its time is of the clock, and
only the order of such times counts."""

Rows = Mapping[str, Row | None]


class MalformedTableError(Exception):
    """A table of rows is damaged."""


class RowTable:
    """A table in memory or in a mapped file."""

    def __init__(self, data: memoryview) -> None:
        """Look at a table; nothing is read yet. A wrong header or length is a `MalformedTableError`."""
        if len(data) < _HEADER.size + 2 * _SUM:
            raise MalformedTableError("it is too short")
        magic, self._count, self._ordered, path_bytes, complete = _HEADER.unpack_from(data)
        # Where each part begins follows from the counts, so the file needs no table of offsets.
        self._rows_at = _HEADER.size + 2 * _SUM
        self._order_at = self._rows_at + self._count * _ROW.size
        self._paths_at = self._order_at + 4 * self._ordered
        self.end = self._paths_at + path_bytes
        # Bytes behind its end are no error: tables of several layers lie one after another (`split`).
        if magic != _MAGIC or self.end > len(data):
            raise MalformedTableError("it is not a table of rows, or it was cut")
        # `complete`: whether it has every row of its state.
        self._data, self.complete = data, bool(complete)
        # `content`: the sum of the state's rows.
        # `order`: the sum of the state's order of times.
        self.content, self.order = (
            int.from_bytes(data[at : at + _SUM], "little") for at in (_HEADER.size, _HEADER.size + _SUM)
        )

    def __len__(self) -> int:
        return int(self._count)

    def path(self, number: int) -> bytes:
        """Return the path of a row."""
        # A row has the end of its path only: the path begins where the one before it ends.
        start = 0 if number == 0 else self._fields(number - 1)[2]
        end = self._fields(number)[2]
        return bytes(self._data[self._paths_at + start : self._paths_at + end])

    def row(self, number: int) -> Row | None:
        """Return a row by its number."""
        what, mtime_ns, _, kind = self._fields(number)
        return None if kind == SAME else Row(kind, what if any(what) else b"", mtime_ns)

    def find(self, path: bytes) -> Row | None:
        """Return the row of a path; None if it has none, or is as in the root state."""
        number = self._first(path)
        return self.row(number) if number < self._count and self.path(number) == path else None

    def below(self, path: bytes) -> Iterator[tuple[bytes, Row | None]]:
        """Yield the rows below a directory."""
        prefix = path + b"/"
        # In the order of paths, all that lies below a directory is one run of rows.
        number = self._first(prefix)
        while number < self._count and (below := self.path(number)).startswith(prefix):
            yield below, self.row(number)
            number += 1

    def items(self) -> Iterator[tuple[bytes, Row | None]]:
        """Yield all rows, in the order of paths."""
        start = 0
        for number in range(self._count):
            what, mtime_ns, end, kind = self._fields(number)
            path = bytes(self._data[self._paths_at + start : self._paths_at + end])
            yield path, None if kind == SAME else Row(kind, what if any(what) else b"", mtime_ns)
            start = end

    # -- the order of times ------------------------------------------------------------------------------------------

    @property
    def ordered(self) -> int:
        """The number of rows with a time of the clock, whose places in the order of times `at` takes."""
        return int(self._ordered)

    def at(self, place: int) -> tuple[int, int]:
        """Return the time at a place of the order, and the number of its row."""
        number: int = struct.unpack_from("<I", self._data, self._order_at + 4 * place)[0]
        return self._fields(number)[1], number

    def place(self, mtime_ns: int) -> int:
        """Return the first place whose time is not before the given one."""
        # Bisection: a table of a million rows reads 20 of them.
        return bisect_left(range(self._ordered), mtime_ns, key=lambda place: self.at(place)[0])

    def _fields(self, number: int) -> tuple[bytes, int, int, int]:
        fields: tuple[bytes, int, int, int] = _ROW.unpack_from(self._data, self._rows_at + number * _ROW.size)
        return fields

    def _first(self, path: bytes) -> int:
        return bisect_left(range(self._count), path, key=self.path)


def pack(rows: Iterable[tuple[bytes, Row | None]], content: int, order: int, *, complete: bool) -> bytes:
    """Return a table of rows, which are in the order of their paths; the sums are of the whole state."""
    body, paths, end, times = bytearray(), [], 0, []
    count = 0
    for path, row in rows:
        # None hides a row of a table below: the path is as in the root state again.
        kind, what, mtime_ns = row or (SAME, b"", 0)
        end += len(path)
        paths.append(path)
        body += _ROW.pack(what, mtime_ns, end, kind)
        # The order serves neighbours in a complete table; the rows of a single layer are few and are sorted in memory.
        if complete and kind == CLOCKED:
            times.append((mtime_ns, count))
        count += 1
    times.sort()
    head = _HEADER.pack(_MAGIC, count, len(times), end, complete)
    sums = content.to_bytes(_SUM, "little") + order.to_bytes(_SUM, "little")
    order_bytes = array.array("I", [number for _, number in times]).tobytes()
    return b"".join((head, sums, body, order_bytes, *paths))


def split(data: bytes) -> list[RowTable]:
    """Return the tables of several layers, which are stored one after another, the topmost first."""
    tables, rest = [], memoryview(data)
    while rest:
        tables.append(RowTable(rest))
        # A slice of a memoryview copies nothing.
        rest = rest[tables[-1].end :]
    return tables


def check(data: bytes) -> None:
    """Read a table that comes from elsewhere. What `pack` does not write is a `MalformedTableError`."""
    table = RowTable(memoryview(data))
    try:
        rows = list(table.items())
    except struct.error as error:
        raise MalformedTableError(str(error)) from error
    # Written again it must give the same bytes: so paths are sorted and unique, and the order is that of the times.
    if len(data) != table.end or pack(rows, table.content, table.order, complete=table.complete) != data:
        raise MalformedTableError("it is not in its canonical form")
    paths = [path for path, _ in rows]
    if any(one >= other for one, other in itertools.pairwise(paths)):
        raise MalformedTableError("its paths are not in order")


def mapped(fd: int) -> RowTable | None:
    """Return the table in a file, which is mapped and closed here; None if the file is empty."""
    with Opened(fd):
        status = os.fstat(fd)
        # A device, which stands for no table, has no size either.
        return RowTable(memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))) if status.st_size else None


def merged(tables: Iterable[RowTable]) -> dict[str, Row | None]:
    """Return the rows of several layers, the topmost first, as one layer's, in which higher layers win."""
    rows: dict[str, Row | None] = {}
    for table in tables:
        for path, row in table.items():
            # The topmost table comes first, so a path that is there already wins.
            rows.setdefault(os.fsdecode(path), row)
    return rows


def in_order(rows: Rows) -> list[tuple[bytes, Row | None]]:
    """Return rows in the order of a table."""
    return sorted((os.fsencode(path), row) for path, row in rows.items())
