"""How many spare sandboxes to keep: as many as were begun at once of late. Pure: the time is an argument."""

import math
from collections import deque

LEAST = 2
"""Spares that are always kept. With none, every start would wait for the kernel."""

_MOST = 16
"""The most spares. A group of rollouts of one task begins at once, and groups of 8 to 16 are usual."""

_BURST_S = 0.5
"""Local sandboxes that begin within so many seconds count as begun at once: spares are not made again much faster."""

_HALF_LIFE_S = 300.0
"""After so many seconds without a burst, half as many spares are kept. The steps of a training take minutes, so that
the next group of rollouts still finds spares. The value is an estimate."""


class SpareDemand:
    """Follows how many sandboxes are begun at once."""

    def __init__(self) -> None:
        """Begin without any demand."""
        self._begun: deque[float] = deque()
        self._peak, self._peak_at_s = 0.0, 0.0

    def note(self, now_s: float) -> None:
        """Note that a sandbox begins."""
        self._begun.append(now_s)
        while self._begun[0] < now_s - _BURST_S:
            self._begun.popleft()
        if len(self._begun) >= self._decayed(now_s):
            self._peak, self._peak_at_s = float(len(self._begun)), now_s

    def wanted(self, now_s: float) -> int:
        """Return how many spares to keep."""
        return max(LEAST, min(_MOST, math.ceil(self._decayed(now_s) - 0.5)))

    def _decayed(self, now_s: float) -> float:
        return self._peak * math.pow(0.5, (now_s - self._peak_at_s) / _HALF_LIFE_S)
