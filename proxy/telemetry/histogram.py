"""How long things took, in buckets (pure)."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

FAST = (25e-6, 50e-6, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
"""Upper bounds, in seconds, for what takes microseconds."""
SLOW = (1e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
"""For what takes milliseconds to minutes."""


class Histogram:
    """Counts observations by bucket; one costs 0.2 us."""

    __slots__ = ("_bounds", "_counts", "total_s")

    def __init__(self, bounds: Sequence[float] = SLOW) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total_s += seconds

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield each bucket's upper bound, as Prometheus writes it, with the observations up to it."""
        below = 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            below += count
            yield bound, below
