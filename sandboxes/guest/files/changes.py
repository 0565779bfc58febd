"""What a sandbox's files differ in from before a call and from its root state, kept up to date by the supervisor."""

# Theory of operation.
#
# Two comparisons are made after each call:
#
# 1. Has anything in the upper layer changed since the last look? `stat` of each entry there says so, in 2 us an entry.
#    Most calls stop here.
# 2. If so: in what do these entries differ from the root state? That needs their content, and changes two sums from
#    which the state's digests follow (`state_sums`). The cost is that of the call's own changes.
#
# Differences are to the root state, not to the last call. So histories that end alike have equal digests, and meet in
# one node of the proxy's tree.
#
# While processes run, files may change at any moment, so no digest names the state. It gets a *witness* instead: the
# digest of the files that no running process has open for writing. A replay must reach the same witness.

import functools
import os
import time
from collections.abc import Callable, Iterable

from sandboxes.guest import programs
from sandboxes.guest.bash import session as session_texts
from sandboxes.guest.files import delta, link_groups, row_table
from sandboxes.guest.files.disk_watch import DiskWatch, free_bytes
from sandboxes.guest.files.state_rows import StateRows
from sandboxes.guest.files.tracker import Digests, FileTracker
from sandboxes.ipc.messages import FileDelta
from sandboxes.ipc.state_messages import LayersSwitched, Links, StartSandbox
from sandboxes.linux import processes
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.trees import TreeTooDeepError
from sandboxes.shell_text import ShellSession

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""How a directory is opened."""
QUIET_S = 2.0
"""How long files and processes must be unchanged until running processes count as writing nothing. A process that
writes every second is noticed; one that writes more rarely than this is taken for silent in between."""


class Stillness:
    """Whether the processes that run in a sandbox may be changing files by themselves.

    Which process wrote a file is not known, but a call that finds other files than the last call left shows that one
    writes. As long as it may be writing, each state is another one moments later, and its record cannot be reused.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrote_at = self._moved_at = clock() - QUIET_S

    @property
    def restless(self) -> bool:
        """Whether files or processes were seen to change within the last `QUIET_S`."""
        return self._clock() - max(self._wrote_at, self._moved_at) < QUIET_S

    def saw(self, *, wrote: bool, moved: bool = False) -> None:
        """Note whether files, and whether the set of processes, differ from the last look."""
        if wrote:
            self._wrote_at = self._clock()
        if moved:
            self._moved_at = self._clock()

    def stood_still(self, seconds: float) -> None:
        """Note that all processes were held still for so long, as by a dump: no write could be seen in that time."""
        self._wrote_at += seconds


class WrittenFiles:
    """What a sandbox has written, compared with what it was before a call and with the root state."""

    def __init__(self, roots: delta.DeltaRoots, tracker: FileTracker, disk_bytes: int, reserve_bytes: int) -> None:
        self.roots, self.tracker = roots, tracker
        # `disk_bytes`: how much the sandbox may write.
        # `reserve_bytes`: with less free disk than this, failures are the machine's.
        self.disk_bytes, self.reserve_bytes = disk_bytes, reserve_bytes
        # `below_bytes`: what the sandbox has written into layers below its upper directory.
        # `too_deep`: whether directories are nested too deeply to be walked. Such a state is never frozen.
        self.below_bytes, self.too_deep = 0, False
        self._measured_free = free_bytes(roots.upper)
        self._disk = DiskWatch(roots.upper, disk_bytes, reserve_bytes)

    def _top(self) -> int:
        return os.open("/", FOLDER)

    def look(self) -> bool:
        """Update what differs; return whether anything differs from before."""
        try:
            changed, self.too_deep = self.tracker.look(self.roots, self._top), False
            self._measured_free = self.free_bytes()
        # What differs is not known, so it counts as a change until the agent has removed what is too deep.
        except TreeTooDeepError:
            self.tracker.forget()
            changed = self.too_deep = True
        return changed

    def nests_too_deep(self) -> bool:
        """Look for directories that are nested too deeply."""
        try:
            delta.size_bytes(self.roots.upper)
        except TreeTooDeepError:
            return True
        return False

    @property
    def order(self) -> bytes | None:
        """The order in which the last call wrote."""
        return self.tracker.order

    def expect(self, order: bytes) -> None:
        """Give what the next call writes this order; see `write_order`."""
        self.tracker.expected = order

    def shown(self) -> FileDelta | None:
        """Return what differs, for people; None if it is too much."""
        return None if self.too_deep else self.tracker.shown()

    def lack_shell(self) -> bool:
        """Return whether no shell of the sandbox can be executed any more; see `programs.is_broken`."""
        with Opened(self._top()) as top:
            return programs.is_broken(self.roots.root, top)

    def free_bytes(self) -> int:
        """Return the free bytes of the disk that the sandbox writes to."""
        return free_bytes(self.roots.upper)

    def over_disk(self, pids: Callable[[], Iterable[int]]) -> str | None:
        """Return a reason once the sandbox holds too much; see `DiskWatch.over`."""
        disk = self._disk
        disk.upper, disk.below_bytes = self.roots.upper, self.below_bytes
        disk.held_bytes = self.tracker.scan.size_bytes
        disk.unmeasured_free = self._measured_free if self.too_deep else None
        return disk.over(pids)


class Changes(WrittenFiles):
    """The files of one local sandbox. Its upper directory may become a layer, and then others lie below a new one."""

    def __init__(self, roots: delta.DeltaRoots, order: StartSandbox, rows: StateRows) -> None:
        links = {"linked_below": order.linked_below, "linked_root": order.linked_root}
        tracker = FileTracker(order.born_ns, rows, **links)
        super().__init__(roots, tracker, order.disk_bytes, order.reserve_bytes)
        self.below_bytes = order.below_bytes
        self._keeps_links, self._regular_below = order.keeps_links, order.regular_below

    @property
    def written(self) -> bool:
        """Whether the sandbox has written anything over the layers below."""
        return self.too_deep or self.tracker.written

    @property
    def undone(self) -> bool:
        """Whether what was written makes no difference to the state below."""
        return not self.too_deep and self.tracker.undone

    @property
    def links(self) -> Links:
        """What kind of hard links some of the written paths are."""
        linked = self.tracker.scan.linked
        return ("other" if self.breaking else "regular") if linked else ""

    @property
    def breaking(self) -> list[str]:
        """The written paths that are hard links to one file, and would be files of their own over a frozen layer."""
        scan = self.tracker.scan
        return scan.linked if scan.linked and not (self._keeps_links and scan.links_regular and self._may_index) else []

    @functools.cached_property
    def _may_index(self) -> bool:
        # A second for a large base, so the proxy remembers it.
        return self._regular_below or link_groups.only_regular(self.roots.lower)

    def digests(self, sessions: dict[str, ShellSession], *, alive: bool) -> Digests:
        """Return the state's digest, or its witness if processes run."""
        if self.too_deep:
            return None, None
        # Reading all descriptors takes 0.25 ms: a call that leaves the root state's files alone need not pay for it.
        written = processes.written_paths() if alive and not self.tracker.now.is_root else set()
        return self.tracker.digests(session_texts.digest(sessions), written if alive else None)

    @property
    def upper_bytes(self) -> int:
        """The bytes on disk of what was written over the layers below, as of the last look."""
        return self.tracker.scan.size_bytes if self.written and not self.too_deep else 0

    def switched(self, upper: int, lower: int, table: int, switched: LayersSwitched) -> None:
        """Go on over other layers: a new upper directory, and what lies below; the table is complete or empty."""
        # `look` would go on comparing the wrong directory. The mounts are the caller's.
        os.close(self.roots.upper)
        self.roots = delta.DeltaRoots(upper, lower, self.roots.root)
        mapped = row_table.mapped(table)
        rows = None if mapped is None else StateRows((), mapped)
        self.tracker.sealed(rows, linked_below=switched.linked_below)
        self.below_bytes += switched.added_bytes
