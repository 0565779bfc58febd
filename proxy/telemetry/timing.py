"""Timings: how long the parts of single calls took."""

import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_MAX_CALLS = 20_000
"""Calls whose timings are kept, 160 bytes each: of the rollouts that ran last. A single rollout is kept whole."""

_MAX_TIMES_BYTES = 16 << 20
"""Memory for the times of answers: of the rollouts that ran last. A single rollout is kept whole.

It holds two million times of long rollouts, or 45,000 rollouts of one call.
"""

_TIME_BYTES = 8
_ROLLOUT_BYTES = 350
"""The memory of a rollout's times beside the times: an array, a tuple and an entry (tracemalloc)."""


@dataclass(slots=True)
class Timing:
    """Where the seconds of one call went; `known` if the tree knew the call, but no way back to its target."""

    endpoint: str = ""
    tool_s: float = 0.0
    restore_s: float = 0.0
    replay_s: float = 0.0
    wait_s: float = 0.0
    replayed_calls: int = 0
    known: bool = False

    @contextmanager
    def measure(self, field: str) -> Iterator[None]:
        """Add the seconds that the block takes to a field, for example `"restore_s"`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, field, getattr(self, field) + time.perf_counter() - start)


class Timings:
    """Timings of the latest rollouts' calls, by rollout and turn. Hits are not noted: they take microseconds."""

    def __init__(self) -> None:
        self._by_rollout: OrderedDict[int, dict[int, Timing]] = OrderedDict()
        self._calls = 0

    def note(self, rollout: int, turn: int, timing: Timing) -> None:
        """Keep the timing of a call, and forget the rollouts that ran longest ago if there are too many."""
        timings = self._by_rollout.setdefault(rollout, {})
        self._calls -= len(timings)
        timings[turn] = timing
        self._calls += len(timings)
        self._by_rollout.move_to_end(rollout)
        while self._calls > _MAX_CALLS and len(self._by_rollout) > 1:
            self._calls -= len(self._by_rollout.popitem(last=False)[1])

    def of(self, rollout: int) -> dict[int, Timing]:
        """Return the timings of a rollout by turn; calls from before the proxy started have none."""
        return self._by_rollout.get(rollout, {})


class AnswerTimes:
    """When the calls of the latest rollouts were answered, hits included, by rollout and turn."""

    def __init__(self) -> None:
        self._by_rollout: OrderedDict[int, tuple[int, array[float]]] = OrderedDict()
        self._bytes = 0

    def note(self, rollout: int, turn: int, at: float) -> None:
        """Keep when a call was answered, in seconds of the monotonic clock. 0.15 µs: each hit notes its time."""
        known = self._by_rollout.get(rollout)
        if known is None:
            # After a restart of the proxy, the first turn is not 0.
            known = self._by_rollout[rollout] = turn, array("d")
            self._bytes += _ROLLOUT_BYTES
            while self._bytes > _MAX_TIMES_BYTES and len(self._by_rollout) > 1:
                _, times = self._by_rollout.popitem(last=False)[1]
                self._bytes -= _ROLLOUT_BYTES + _TIME_BYTES * len(times)
        known[1].append(at)
        self._bytes += _TIME_BYTES

    def of(self, rollout: int) -> dict[int, float]:
        """Return the times of a rollout's answers by turn; calls from before the proxy started have none."""
        first, times = self._by_rollout.get(rollout, (0, array("d")))
        return {first + number: at for number, at in enumerate(times)}
