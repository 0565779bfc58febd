"""The state of a sandbox's files: the rows below its upper directory, those of the upper directory, and the digests."""

import time
from collections.abc import Callable, Iterable

from sandboxes.effects import StateDigest
from sandboxes.guest.files import write_order
from sandboxes.guest.files.delta import DeltaRoots
from sandboxes.guest.files.scan import UpperScan
from sandboxes.guest.files.state_rows import StateRows
from sandboxes.linux.descriptors import Opened

Digests = tuple[StateDigest | None, bytes | None]
"""The digest of a state without running processes, or the witness of a state with some; None for the other."""

_SHOWN = 20_000
"""The most differences that are shown to people: some 2 MB in one message."""

_CLOCK_REALTIME_COARSE = 5
"""The clock of file times (linux/time.h): no write gets an earlier time than this clock shows before it."""


class FileTracker:
    """What the files of one sandbox differ in from its root state."""

    def __init__(self, born_ns: int, rows: StateRows, *, linked_below: bool, linked_root: bool) -> None:
        """Start over an empty upper directory, with the rows of the state below; see `UpperScan`."""
        # `linked_root`: whether the root state has hard links. Then all states of the task have an index.
        self._born_ns = born_ns
        # `base`: the rows of the state below the upper directory.
        # `now`: the rows of the present state.
        self.base = self.now = rows
        # `linked_below`: whether the layers below have hard links, so that overlayfs keeps an index of them.
        self.linked_below, self._linked_root = linked_below, linked_root
        # Whether calls have made hard links that showed after a call. It is part of the state, also once they are gone:
        # with an index, the hard links of the base stay links too.
        self.linked = linked_below and not linked_root
        self.order: bytes | None = None  # The order in which the last call wrote; see `write_order`.
        # The order in which the next call has to write, because it is a replay; None for any other call.
        self.expected: bytes | None = None
        self._begin()

    def _begin(self) -> None:
        self._looked_ns = _coarse_ns()
        # A clock that was set back gives files of calls earlier times than the root state's.
        self._born_ns = min(self._born_ns, self._looked_ns)
        self.scan = UpperScan(self._born_ns)

    def look(self, roots: DeltaRoots, top: Callable[[], int]) -> bool:
        """Update the rows; return whether any differs from the last look. `top` opens the root, for recorded times."""
        expected, self.expected, self.order = self.expected, None, None
        changed = False
        if self._update(roots, top):
            # Those of the state before this call: both change below.
            since_ns, before_ns = self._looked_ns, self.now.latest_ns
            rows = {path: self.scan.row(path, self.base) for path in self.scan.touched}
            # A file that was touched and is as before counts as unchanged.
            rows = {path: row for path, row in rows.items() if row != self.now.get(path)}
            written = write_order.of_rows(rows, since_ns, before_ns)
            if expected is not None and (times := write_order.times_for(written, expected)):
                with Opened(top()) as opened:
                    write_order.give(opened, times)
                # Read again and not computed: what is recorded must be what is on disk.
                self.scan.update(roots, self.base)
                rows |= {path: self.scan.row(path, self.base) for path in self.scan.touched}
                written = write_order.of_rows(rows, since_ns, before_ns)
            self.order = write_order.packed(written)
            if rows:
                # The state below the upper directory stays as it is: the upper directory may be thrown away.
                if self.now is self.base:
                    self.now = self.base.copy()
                changed = self.now.update(rows)
        self._looked_ns = _coarse_ns()
        return changed

    def _update(self, roots: DeltaRoots, top: Callable[[], int]) -> bool:
        if not self.linked_below:
            changed = self.scan.update(roots, self.base)
        else:
            with Opened(top()) as opened:
                changed = self.scan.update(roots, self.base, opened)
        self.linked |= bool(self.scan.linked) and not self._linked_root
        return changed

    def forget(self) -> None:
        """Forget the upper directory, which cannot be looked at now: the next look reads all of it."""
        self.now = self.base
        self._begin()

    @property
    def undone(self) -> bool:
        """Whether what was written makes no difference to the state below."""
        return all(row == self.base.get(path) for path, row in self.scan.rows.items())

    @property
    def written(self) -> bool:
        """Whether the upper directory has entries, or differs itself from what is below."""
        return len(self.scan.signatures) > 1 or not self.undone

    def table(self) -> bytes:
        """Return the table of a layer that the upper directory becomes; see `row_table`."""
        return self.now.table_of(self.scan.rows)

    def shown(self) -> dict[str, tuple[str, int]] | None:
        """Return what differs from the root state, for people; None if it is too much to show."""
        # Directories of which only the time differs are left out: their entries tell more.
        if self.now.count > _SHOWN:
            return None
        return {path: (row.what.hex() or "-", row.mtime_ns) for path, row in self.now.items() if not row.is_time_only}

    def sealed(self, rows: StateRows | None, *, linked_below: bool) -> None:
        """Go on over an empty upper directory; without rows from a complete table, those known are kept."""
        self.base = self.now = self.now if rows is None else rows
        self.linked_below = linked_below
        self._begin()

    def digests(self, sessions: bytes, written: Iterable[str] | None) -> Digests:
        """Return the state's digest; its witness if processes run, by the files that they have open for writing."""
        sessions += b"linked" if self.linked else b""
        if written is None:
            return StateDigest(*self.now.digests(sessions)), None
        # A running process may go on writing to these files at any moment. Only the others say what the call did.
        return None, self.now.witness(sessions, written)


def _coarse_ns() -> int:
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
