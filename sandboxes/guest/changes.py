"""What a sandbox's files differ in from before a call and from its root state, kept up to date in pid 1."""

import os
import time
from collections.abc import Callable, Container

from sandboxes.effects import StateDigest
from sandboxes.guest import bash_session as session_texts
from sandboxes.guest import file_delta as delta
from sandboxes.ipc.state_messages import StartSandbox
from sandboxes.linux import processes
from sandboxes.session_types import ShellSession

Digests = tuple[StateDigest | None, bytes | None]
"""The digest of a state without running processes, or the witness of a state with some; None for the other."""

WATCH_S = 0.1
QUIET_S = 2.0
"""How long files and the set of processes have to stand still beside what lives, until it counts as writing nothing."""


class Stillness:
    """Whether what lives in a sandbox may be writing files by itself.

    Which process wrote a file cannot be told. But what writes again and again is seen to before long: a call beside it
    finds other files than the last one left. Until then, and from then on, each state is another one moments later.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrote_at = self._moved_at = clock() - QUIET_S

    @property
    def restless(self) -> bool:
        """Whether anything stirred lately: since then, nothing that was looked at was another than before."""
        return self._clock() - max(self._wrote_at, self._moved_at) < QUIET_S

    def saw(self, *, wrote: bool, moved: bool = False) -> None:
        """Note whether files are others than they were, and whether other processes live than did."""
        if wrote:
            self._wrote_at = self._clock()
        if moved:
            self._moved_at = self._clock()

    def stood_still(self, seconds: float) -> None:
        """Note that nothing could run for so long, as for a dump: what writes had no chance to be seen."""
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
        self._base = self.now = order.delta
        self._signatures: dict[str, delta.Signature] = {}

    def look(self) -> bool:
        """Update the delta; return whether anything differs from before."""
        found = delta.signatures(self.roots.upper)
        if found == self._signatures:
            return False
        self._signatures = found
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
        """Whether nothing of what was written makes a difference."""
        return self.now is not None and self.now == self._base

    @property
    def linked(self) -> list[str]:
        """Paths that share their file with others."""
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
        """Go on over other layers: what was written is below now, or gone."""
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
        """See `disk_watch`."""
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
    """Return the bytes that the disk of a directory has left."""
    found = os.fstatvfs(folder)
    return found.f_bavail * found.f_frsize


def disk_watch(upper: int, limit: int, reserve: int, *, below_bytes: int = 0) -> Callable[[], str | None]:
    """Return what tells when a sandbox's new files exceed limit bytes ("disk"), or less than reserve is free ("host").

    It looks closely only when the disk's free space fell. below_bytes: what lies in layers already.
    """
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
