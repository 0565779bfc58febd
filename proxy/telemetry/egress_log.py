"""The latest requests of sandboxes to hosts outside, and how many there were (pure)."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from sandboxes.calls import EgressExchange

MAX_EVENTS = 1000
"""Requests that are kept: half a megabyte. The log has all of them."""


@dataclass(frozen=True, slots=True)
class EgressEvent:
    """One request of a program in a sandbox, when its call had ended; no rollout made it in a replay."""

    number: int
    at: float
    tree: int
    node: int
    rollout: str | None
    exchange: EgressExchange


class EgressLog:
    """The requests since this process started: the latest `events`, and counts and bytes by outcome."""

    def __init__(self) -> None:
        self.events: deque[EgressEvent] = deque(maxlen=MAX_EVENTS)
        self.requests: Counter[str] = Counter()
        self.size_bytes: Counter[str] = Counter()

    def note(self, exchanges: Sequence[EgressExchange], tree: int, node: int, rollout: str | None, now: float) -> None:
        """Note the requests of one call."""
        for exchange in exchanges:
            self.events.append(EgressEvent(self.requests.total(), now, tree, node, rollout, exchange))
            self.requests[exchange.outcome] += 1
            self.size_bytes[exchange.outcome] += exchange.size_bytes
