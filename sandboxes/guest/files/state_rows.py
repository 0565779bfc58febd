"""All rows of one state: those of small layers in memory, those of a large table on disk, and the state's digests."""

# Theory of operation.
#
# A state is the rows of its layers, of which the highest layer wins. The rows above the last complete table are in
# `changes`, at most some thousands; all others are looked up in the table, which is mapped. So a sandbox with a million
# files needs little memory, and starts without reading the table.
#
# Both sums follow each change. For the order of times that takes the neighbours of each changed time, which are looked
# for in the table and in the sorted times of `changes`.

import hashlib
import os
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator

from sandboxes.guest.files import row_table
from sandboxes.guest.files.row_table import CLOCKED, FIXED, Row, Rows, RowTable
from sandboxes.guest.files.state_sums import Group, added, group, packed, pairs, term

LEAST_ROWS = 2_048
"""Rows in memory at which a complete table is written. Each restore reads those rows, in 1 us each."""

_SHARE = 16
"""A table of a million rows is written again only after a sixteenth of it has changed: writing takes 2 us a row."""

_RESORTED = 64
"""With more changes than this, the times in memory are sorted again instead of inserted one by one."""


class StateRows:
    """The rows of one state."""

    def __init__(self, tables: Iterable[RowTable] = (), table: RowTable | None = None) -> None:
        """Take a state's complete table, if there is one, and those of the layers above, the topmost first."""
        self._table = table
        known = list(tables)
        # The rows above the table; None for a path that is as in the root state.
        self.changes = row_table.merged(known)
        top = known[0] if known else table
        # `content`: the sum of all rows without times of the clock.
        # `order`: the sum of the order of those times.
        self.content, self.order = (0, 0) if top is None else (top.content, top.order)
        self._sort()

    def copy(self) -> "StateRows":
        """Return the same state, to be changed."""
        other = StateRows()
        other._table, other.changes, other._times = self._table, dict(self.changes), list(self._times)
        other.content, other.order = self.content, self.order
        other._sorted = None
        return other

    def _sort(self) -> None:
        self._times = sorted((row.mtime_ns, path) for path, row in self.changes.items() if row and row.kind == CLOCKED)
        self._sorted: list[str] | None = None

    # -- looking up --------------------------------------------------------------------------------------------------

    @property
    def is_root(self) -> bool:
        """Whether nothing differs from the root state."""
        return self.content == 0 and self.order == 0

    def get(self, path: str) -> Row | None:
        """Return the row of a path; None if it is as in the root state."""
        if path in self.changes:
            return self.changes[path]
        return None if self._table is None else self._table.find(os.fsencode(path))

    def below(self, path: str) -> list[str]:
        """Return the paths below a directory that differ from the root state."""
        prefix = path + "/"
        # Sorted once for many directories: a scan for each of them would be quadratic.
        if self._sorted is None:
            self._sorted = sorted(self.changes)
        known, at = [], bisect_left(self._sorted, prefix)
        while at < len(self._sorted) and self._sorted[at].startswith(prefix):
            if self.changes[self._sorted[at]] is not None:
                known.append(self._sorted[at])
            at += 1
        if self._table is not None:
            for name, row in self._table.below(os.fsencode(path)):
                if row is not None and (below := os.fsdecode(name)) not in self.changes:
                    known.append(below)
        return known

    def items(self) -> Iterator[tuple[str, Row]]:
        """Yield all rows; those of the table first."""
        if self._table is not None:
            for name, row in self._table.items():
                if row is not None and (path := os.fsdecode(name)) not in self.changes:
                    yield path, row
        yield from ((path, row) for path, row in self.changes.items() if row is not None)

    @property
    def count(self) -> int:
        """The number of rows, or somewhat more."""
        return len(self.changes) + (0 if self._table is None else len(self._table))

    @property
    def latest_ns(self) -> int:
        """The latest time of the clock; 0 if there is none."""
        return max(self._neighbour(1 << 63, (), forward=False) or 0, 0)

    # -- changing ----------------------------------------------------------------------------------------------------

    def update(self, rows: Rows) -> bool:
        """Change rows and both sums; return whether any row differs."""
        # All rows before any of them changes: sums of differences need both sides.
        before = {path: self.get(path) for path in rows}
        changed = {path: row for path, row in rows.items() if row != before[path]}
        touched: set[int] = set()
        for path, row in changed.items():
            old = before[path]
            name = os.fsencode(path)
            self.content = added(self.content, _term(name, row) - _term(name, old))
            times = {None if side is None or side.kind != CLOCKED else side.mtime_ns for side in (old, row)}
            # A new content with the time of before leaves the order as it was.
            if len(times) > 1:
                touched |= {time for time in times if time is not None}
        # Only the pairs of neighbouring times around the touched ones change, so only these are summed up twice.
        times_around = self._around(touched)
        before_pairs = pairs(times_around, touched, self._group_at)
        self._store(changed)
        self.order = added(self.order, pairs(times_around, touched, self._group_at) - before_pairs)
        return bool(changed)

    def _store(self, changed: Rows) -> None:
        many = len(changed) > _RESORTED
        for path, row in changed.items():
            if not many:
                self._move(path, self.changes.get(path), row)
            # A row that says nothing hides one of the table; without such a row it is not needed.
            if row is None and (self._table is None or self._table.find(os.fsencode(path)) is None):
                self.changes.pop(path, None)
            else:
                self.changes[path] = row
        self._sorted = None
        if many:
            self._sort()

    def _move(self, path: str, old: Row | None, new: Row | None) -> None:
        if old is not None and old.kind == CLOCKED:
            del self._times[bisect_left(self._times, (old.mtime_ns, path))]
        if new is not None and new.kind == CLOCKED:
            insort(self._times, (new.mtime_ns, path))

    # -- the order of times ------------------------------------------------------------------------------------------

    def _around(self, touched: Collection[int]) -> set[int]:
        around, end = set(touched), -1
        for time in sorted(touched):
            # Up to the next other time, all touched ones have the same neighbours.
            if time < end:
                continue
            before, after = (self._neighbour(time, touched, forward=way) for way in (False, True))
            end = 1 << 63 if after is None else after
            around |= {other for other in (before, after) if other is not None}
        return around

    def _neighbour(self, time: int, touched: Collection[int], *, forward: bool) -> int | None:
        """Return the nearest time of the clock after, or before, a time; those that are touched do not count."""
        times, step = [], 1 if forward else -1
        at = bisect_left(self._times, (time, "")) - (not forward)
        while 0 <= at < len(self._times) and (self._times[at][0] in touched or self._times[at][0] == time):
            at += step
        if 0 <= at < len(self._times):
            times.append(self._times[at][0])
        if (table := self._table) is not None:
            place = table.place(time) - (not forward)
            while 0 <= place < table.ordered:
                other, number = table.at(place)
                if other != time and other not in touched and os.fsdecode(table.path(number)) not in self.changes:
                    times.append(other)
                    break
                place += step
        return (min if forward else max)(times, default=None)

    def _group_at(self, time: int) -> Group:
        names, at = [], bisect_left(self._times, (time, ""))
        while at < len(self._times) and self._times[at][0] == time:
            names.append(os.fsencode(self._times[at][1]))
            at += 1
        if (table := self._table) is not None:
            place = table.place(time)
            while place < table.ordered and (row := table.at(place))[0] == time:
                name = table.path(row[1])
                if os.fsdecode(name) not in self.changes:
                    names.append(name)
                place += 1
        return group(names)

    # -- digests and tables ------------------------------------------------------------------------------------------

    def digests(self, sessions: bytes) -> tuple[bytes, bytes]:
        """Return the exact and the content digest of the state with these sessions (see `StateDigest`)."""
        content = packed(self.content)
        return _digest(sessions, content, packed(self.order)), _digest(sessions, content)

    def witness(self, sessions: bytes, without: Iterable[str]) -> bytes:
        """Return the content digest without some paths."""
        total = self.content
        for path in without:
            # The sum is over a group, so a row is taken out as it was put in.
            total = added(total, -_term(os.fsencode(path), self.get(path)))
        return _digest(sessions, packed(total))

    def table_of(self, rows: Rows) -> bytes:
        """Return the table of a layer with these rows that leads to this state; it is complete if it is time for it."""
        below = self.count - len(self.changes)
        complete = len(self.changes) > max(LEAST_ROWS, below // _SHARE)
        whole = dict(self.items()) if complete else rows
        return row_table.pack(row_table.in_order(whole), self.content, self.order, complete=complete)


def _term(name: bytes, row: Row | None) -> int:
    if row is None:
        return 0
    time = str(row.mtime_ns).encode() if row.kind == FIXED else b""
    return term(name, bytes([row.kind]), row.what, time)


def _digest(*parts: bytes) -> bytes:
    # All parts but the sessions have a fixed length, so different parts never give the same bytes.
    return hashlib.blake2b(b"\0".join(parts), digest_size=32).digest()
