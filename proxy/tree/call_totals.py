"""Totals of answered calls, by how they were answered (pure)."""

from dataclasses import dataclass, field
from typing import Any

from proxy.tree.rollout import Outcome


@dataclass(slots=True)
class CallTotals:
    """Totals of answered calls. Seconds of tools do not include restores and replays."""

    outcomes: list[int] = field(default_factory=lambda: [0] * len(Outcome))  # Number of calls by `Outcome`.
    executed_s: float = 0.0  # Seconds that tools ran for misses and bypasses.
    saved_s: float = 0.0  # Seconds that tools would have run for hits and waits.

    def answered(self, outcome: Outcome, tool_s: float, calls: int = 1) -> None:
        """Count calls that were answered in the same way; `tool_s` is the time of their tools when recorded."""
        self.outcomes[outcome] += calls
        if outcome is Outcome.HIT or outcome is Outcome.WAIT:
            self.saved_s += tool_s
        else:
            self.executed_s += tool_s

    def merge(self, other: "CallTotals") -> None:
        """Add the totals of other calls."""
        self.outcomes = [mine + theirs for mine, theirs in zip(self.outcomes, other.outcomes, strict=True)]
        self.executed_s += other.executed_s
        self.saved_s += other.saved_s

    @property
    def calls(self) -> int:
        """Number of all calls."""
        return sum(self.outcomes)

    @property
    def hit_rate(self) -> float:
        """Share of calls that no tool ran for, from 0 to 1."""
        saved = self.outcomes[Outcome.HIT] + self.outcomes[Outcome.WAIT]
        return saved / self.calls if saved else 0.0

    @property
    def by_name(self) -> dict[str, int]:
        """Number of calls by outcome, under the names that the REST API uses."""
        hits, misses, waits, bypasses = self.outcomes
        return {"hits": hits, "waits": waits, "misses": misses, "bypasses": bypasses}

    def as_dict(self) -> dict[str, Any]:
        """Return the totals under the names that the REST API uses."""
        return {
            "calls": self.calls, **self.by_name, "hit_rate": self.hit_rate, "executed_s": self.executed_s,
            "saved_s": self.saved_s,
        }  # fmt: skip
