"""Where the time of one call went."""

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Timing:
    """Seconds by part. wait_s: behind another call of this rollout, another's execution, or for a free sandbox."""

    tool_s: float = 0.0
    restore_s: float = 0.0
    replay_s: float = 0.0
    wait_s: float = 0.0
    replayed_calls: int = 0

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to a part, `"restore_s"` for example."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.perf_counter() - start)


_REMEMBERED = 2_000
"""Rollouts whose timings are held, the ones that ran last: some 100 bytes for each call that was not a hit."""


class Timings:
    """Where the time of the last rollouts' calls went, by rollout and turn. Hits took none worth a word."""

    def __init__(self) -> None:
        self._by_rollout: OrderedDict[int, dict[int, Timing]] = OrderedDict()

    def note(self, rollout: int, turn: int, timing: Timing) -> None:
        self._by_rollout.setdefault(rollout, {})[turn] = timing
        self._by_rollout.move_to_end(rollout)
        if len(self._by_rollout) > _REMEMBERED:
            self._by_rollout.popitem(last=False)

    def of(self, rollout: int) -> dict[int, Timing]:
        """Return what is known of a rollout's calls, by turn; nothing of those that ran before the proxy started."""
        return self._by_rollout.get(rollout, {})
