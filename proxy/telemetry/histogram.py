"""Histograms of durations (pure)."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

FAST = (25e-6, 50e-6, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
"""Upper bounds of the buckets, in seconds, for work that takes microseconds: hits."""
SLOW = (1e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
"""Upper bounds of the buckets, in seconds, for work that takes milliseconds to minutes: starts, restores, replays."""


class Histogram:
    """Counts durations by bucket; `total_s` is their sum."""

    __slots__ = ("_bounds", "_counts", "total_s")

    def __init__(self, bounds: Sequence[float] = SLOW) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total_s += seconds

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield the upper bound of each bucket, as Prometheus writes it, and the number of observations up to it."""
        below = 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            below += count
            yield bound, below
