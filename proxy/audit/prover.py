"""Proofs: states are replayed once before their snapshots are evicted, in the background.

A snapshot may be evicted only if another way to its state is known to work (`snapshots.policy.victims`). A replay that
nobody needed yet is made here, when a budget is exceeded and `SnapshotCache.fit` waits for it. If it reaches another
state (a random number, the time), the snapshot stays as long as a rollout needs it.
"""

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import structlog

from proxy.execution.errors import StateLostError
from proxy.execution.restore import Restorer
from proxy.tree.tree import PROOF_AGE_S, Node, Tree, path
from sandboxes.errors import SandboxError, SpecError
from sandboxes.pool.pool import OverloadedError
from snapshots.cache import SnapshotCache
from snapshots.snapshot import Snapshot

log = structlog.get_logger()

_ROUND_S = 5.0
"""Longest time of one round, between two evictions. One proof may take longer."""
_PAUSE_SHARE = 4
"""A round is followed by a pause this many times as long, so that proofs take at most a fifth of one sandbox's time."""
_MAX_PROOF_S = 60.0
"""Longest recorded time of the calls of a proof. Dearer states are treated like states that no replay reaches."""
_MAX_FAILURES = 3
"""How often the machine may fail in a proof before its state is treated so, too."""


class Prover:
    """Replays states whose snapshots could be evicted."""

    def __init__(
        self,
        restorer: Restorer,
        cache: SnapshotCache,
        snapshots: Callable[[str], Snapshot | None],
        find: Callable[[int, int], tuple[Tree, Node] | None],
        evict: Callable[[], Awaitable[int]],
        busy: Callable[[], int],
    ) -> None:
        """Create a prover that does nothing until a budget is exceeded; `busy` counts calls in flight."""
        self._restorer, self._cache, self._snapshots, self._find = restorer, cache, snapshots, find
        self._evict, self._busy = evict, busy
        self._failures: Counter[str] = Counter()
        self._rests_until = 0.0

    async def work(self) -> None:
        """Prove what waits, the least valuable first, within one round; then evict."""
        began = time.monotonic()
        if began < self._rests_until or not self._cache.unproven:
            return
        tried = 0
        for name in tuple(self._cache.unproven):
            # A proof takes a sandbox and a core, which calls need more. Only a proxy that is never idle is not spared.
            if time.monotonic() - began > _ROUND_S or (tried and self._busy()) or not self._restorer.has_spare_room:
                break
            tried += await self._prove(name)
        self._rests_until = time.monotonic() + _PAUSE_SHARE * (time.monotonic() - began)
        if tried:
            await self._evict()

    async def _prove(self, name: str) -> bool:
        """Prove the state of one snapshot; return whether anything was learned about it."""
        snapshot = self._snapshots(name)
        position = None if snapshot is None else self._find(snapshot.tree, snapshot.node)
        if position is None:
            return True
        tree, node = position
        steps = [record for record in path(node) if not record.proven]
        if time.time() - max((record.recorded_at for record in steps), default=-math.inf) < PROOF_AGE_S:
            # Too early: a state that shows the minute would pass.
            return False
        # A replay ahead of its use must send nothing to servers that are not ours.
        if tree.spec.upstreams or sum(record.seconds for record in steps) > _MAX_PROOF_S:
            self._cache.give_up(name)
            return True
        try:
            await self._restorer.prove(tree, node)
        except StateLostError:
            log.info("a state has no way but its snapshot", node=node.id)
        except (SandboxError, SpecError, OverloadedError) as error:
            log.info("proof of a state failed", node=node.id, error=str(error))
            self._failures[name] += 1
            if self._failures[name] >= _MAX_FAILURES:
                del self._failures[name]
                self._cache.give_up(name)
        return True
