"""What a sandbox's files differ in from before a call and from its root state, kept up to date by the supervisor."""

# Theory of operation.
#
# Two comparisons are made after each call, at very different cost:
#
# 1. Has anything in the upper layer changed since the last look? `stat` of each entry there says so, in 2 us an entry.
#    Most calls stop here.
# 2. If so: in what do the files differ from the root state? That is the *delta*, and it needs the content of changed
#    files. The digest of the delta is part of the state's name.
#
# A delta is relative to the root state, not to the last call. So histories that end alike have equal deltas, and meet
# in one node of the proxy's tree.
#
# While processes run, files may change at any moment, so no digest names the state. It gets a *witness* instead: the
# digest of the files that no running process has open for writing. A replay must reach the same witness.

import os
import time
from collections.abc import Callable, Container

from sandboxes.effects import StateDigest
from sandboxes.guest import bash_session as session_texts
from sandboxes.guest.files import delta
from sandboxes.ipc.state_messages import StartSandbox
from sandboxes.linux import processes
from sandboxes.shell_text import ShellSession

Digests = tuple[StateDigest | None, bytes | None]
"""The digest of a state without running processes, or the witness of a state with some; None for the other."""

WATCH_S = 0.1
"""The longest interval between two looks at disk use and at servers during a call."""
QUIET_S = 2.0
"""How long files and processes must be unchanged until running processes count as writing nothing.

A process that writes every second is noticed; one that writes more rarely than this is taken for silent in between.
"""


class Stillness:
    """Whether the processes that run in a sandbox may be changing files by themselves.

    Which process wrote a file is not known. But a process that writes again and again is noticed before long, because a
    call finds other files than the last call left. As long as it may be writing, each state is another one moments
    later, and its record cannot be reused.
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


class Changes:
    """The files of one sandbox, compared with what they were before a call and with the root state.

    Attributes:
        roots: The directories that are compared.
        disk_bytes: How much the sandbox may write.
        reserve_bytes: With less free disk than this, failures are the machine's.
        now: The delta to the root state; None if it is too large to know.
    """

    def __init__(self, roots: delta.DeltaRoots, order: StartSandbox) -> None:
        self.roots = roots
        self.disk_bytes, self.reserve_bytes = order.disk_bytes, order.reserve_bytes
        self._below_bytes, self._born_ns = order.below_bytes, order.born_ns
        # Two references to one value: `_base` is the delta of the layers below, `now` adds the upper directory to it.
        self._base = self.now = order.delta
        self._signatures: dict[str, delta.Signature] = {}

    def look(self) -> bool:
        """Update the delta; return whether anything differs from before."""
        signatures = delta.signatures(self.roots.upper)
        if signatures == self._signatures:
            return False
        self._signatures = signatures
        if self._base is None or self.now is None:
            return True
        before = self.now
        try:
            self.now = delta.merge(self._base, self.roots)
        except delta.DeltaTooLargeError:
            self.now = None
            return True
        return self.now != before

    @property
    def written(self) -> bool:
        """Whether the sandbox has written anything over the layers below."""
        return bool(self._signatures)

    @property
    def undone(self) -> bool:
        """Whether what was written makes no difference to the state below."""
        return self.now is not None and self.now == self._base

    @property
    def linked(self) -> list[str]:
        """The written paths that are hard links to one file."""
        return delta.linked(self._signatures)

    def digests(self, sessions: dict[str, ShellSession], *, alive: bool) -> Digests:
        """Return the state's digest, or its witness if processes run."""
        # Reading all descriptors takes 0.25 ms: a call that leaves the root state's files alone need not pay for it.
        written = processes.written_paths() if alive and self.now else set()
        return digests_of(self.now, sessions, self._born_ns, written if alive else None)

    @property
    def upper_bytes(self) -> int:
        """The bytes on disk of what was written over the layers below."""
        return delta.size_bytes(self.roots.upper) if self.written else 0

    def switched(self, upper: int, lower: int, added_bytes: int) -> None:
        """Go on over other layers.

        Args:
            upper: The new, empty upper directory.
            lower: What lies below it now.
            added_bytes: The bytes of the layer that the old upper became; 0 if it was thrown away.
        """
        # A descriptor of the old upper would keep its mount busy, and `look` would go on comparing the wrong directory.
        os.close(self.roots.upper)
        os.close(self.roots.lower)
        self.roots = delta.DeltaRoots(upper, lower, self.roots.root)
        self._base = self.now
        self._signatures = {}
        self._below_bytes += added_bytes

    def free_bytes(self) -> int:
        """Return the free bytes of the machine's disk."""
        return free_bytes(self.roots.upper)

    def disk_watch(self) -> Callable[[], str | None]:
        """Return a function that returns a reason once the sandbox holds too much; see `disk_watch`."""
        below = self._below_bytes
        return disk_watch(self.roots.upper, self.disk_bytes, self.reserve_bytes, below_bytes=below)


def digests_of(
    now: delta.Delta | None, sessions: dict[str, ShellSession], born_ns: int, written: Container[str] | None
) -> Digests:
    """Return the digest of a state, or its witness; neither if the delta is too large to know.

    Args:
        now: The delta to the root state.
        sessions: The shell sessions that differ from a new one.
        born_ns: When the root state was made.
        written: The files that running processes have open for writing; None if no process runs.
    """
    if now is None:
        return None, None
    digest, now_ns = session_texts.digest(sessions), time.time_ns()
    if written is None:
        return StateDigest(*delta.digests(now, digest, born_ns=born_ns, now_ns=now_ns)), None
    # A running process may go on writing to these files at any moment. Only the other files say what the call did.
    still = {path: entry for path, entry in now.items() if path not in written}
    return None, delta.digests(still, digest, born_ns=born_ns, now_ns=now_ns)[1]


def free_bytes(folder: int) -> int:
    """Return the free bytes of the disk that a directory is on."""
    # f_bavail leaves out the blocks that are reserved for root (statvfs(3)), so "free" means the same for every user.
    disk = os.fstatvfs(folder)
    return disk.f_bavail * disk.f_frsize


def disk_watch(upper: int, limit: int, reserve: int, *, below_bytes: int = 0) -> Callable[[], str | None]:
    """Return a function that says whether a sandbox has used too much disk.

    The function is called often. It measures the sandbox's files only when the disk's free space has
    fallen enough that they may have grown over the limit.

    Args:
        upper: The sandbox's upper directory.
        limit: How many bytes of new files the sandbox may have.
        reserve: With fewer free bytes on the disk than this, failures are the machine's.
        below_bytes: What the sandbox has written into layers already.

    Returns:
        A function that returns "disk" over the limit, "host" if the reserve is touched, and None otherwise.
    """
    # Free space is one cheap system call; a walk of the upper directory is not. Other writers on the same disk only
    # make it measure earlier.
    free, looked, step = free_bytes(upper), time.monotonic(), min(limit // 8, 16 << 20)

    def over() -> str | None:
        nonlocal free, looked
        if time.monotonic() - looked < WATCH_S / 2:
            return None
        looked, now = time.monotonic(), free_bytes(upper)
        if now < reserve:
            return "host"
        if free - now < step:
            return None
        free = now
        return "disk" if below_bytes + delta.size_bytes(upper) > limit else None

    return over
