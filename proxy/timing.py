"""Where the time of one call went."""

import time
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
