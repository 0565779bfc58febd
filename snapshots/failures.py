"""Restores that failed: how often each snapshot did, when one counts as lost, and what takes its place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from snapshots.snapshot import Snapshot, StateNode
from snapshots.store import SnapshotStore

HOPELESS_FAILURES = 3
"""Failed restores, without a success between them, after which a snapshot may count as lost."""
HOPELESS_S = 30.0
"""Seconds between the first and the last of them. An estimate: a daemon that restarts is back within ten."""


class _Failures(NamedTuple):
    """Restores of a snapshot that failed since its last success; times in seconds of a monotonic clock."""

    first_s: float
    last_s: float
    number: int


class RestoreFailures:
    """Counts failed restores by snapshot and not by node: the node's next snapshot begins without failures."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._failures: dict[str, _Failures] = {}
        self._renewals: set[str] = set()

    def note(self, name: str, now: float) -> int:
        """Note that a restore failed; return how many of the snapshot have failed since its last success."""
        known = self._failures.get(name, _Failures(now, now, 0))
        self._failures[name] = failures = _Failures(known.first_s, now, known.number + 1)
        return failures.number

    def end(self, name: str) -> None:
        """Note that a restore succeeded."""
        self._failures.pop(name, None)

    def forget(self, name: str) -> None:
        """Forget what is known of a snapshot that is removed."""
        self._failures.pop(name, None)
        self._renewals.discard(name)

    def is_hopeless(self, node: StateNode) -> bool:
        """Return whether every restore of the node's snapshot has failed for so long that the next one will too."""
        failures = None if node.snapshot is None else self._failures.get(node.snapshot)
        if failures is None or failures.number < HOPELESS_FAILURES:
            return False
        return failures.last_s - failures.first_s >= HOPELESS_S

    def is_renewal(self, node: StateNode) -> bool:
        """Return whether the node's snapshot was taken because another one could not be restored."""
        return node.snapshot in self._renewals

    @contextmanager
    def renewing(self, node: StateNode) -> Iterator[None]:
        """Take the snapshot of a node away while another one is taken; give it back if there is no other at the end."""
        old, node.snapshot = self._store.get(node.snapshot), None
        if old is not None:
            # Not evicted meanwhile: it may be the only one again in a moment.
            old.leases += 1
        try:
            yield
        finally:
            self._settle(node, old)

    def _settle(self, node: StateNode, old: Snapshot | None) -> None:
        if node.snapshot is not None:
            self._renewals.add(node.snapshot)
        if old is None:
            return
        old.leases -= 1
        # A node that was forgotten meanwhile has lost its snapshots.
        if node.snapshot is None and not node.detached and self._store.get(old.id) is old:
            node.snapshot = old.id
            return
        self.forget(old.id)
        self._store.drop(old)
