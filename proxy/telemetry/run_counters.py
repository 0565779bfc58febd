"""Counters by the label `run`, for as many runs as a metrics page can bear (pure)."""

from dataclasses import dataclass, field

from proxy.tree.rollout import Outcome

MAX_RUNS = 50
"""Runs with counters of their own, some 300 bytes each. Agents choose labels, and each run is five series that a
Prometheus server keeps, so their number is bounded; a proxy rarely serves ten runs at once."""
OTHERS = "(other)"
"""Stands for all runs whose counters were given up."""


@dataclass(slots=True)
class RunTotals:
    """Totals of one run since this process started.

    Attributes:
        outcomes: Answered calls by `Outcome`.
        executed_s: Seconds that tools ran for misses and bypasses.
        saved_s: Seconds that tools would have run for hits and waits.
        used: Number of the last call, counted over all runs.
    """

    outcomes: list[int] = field(default_factory=lambda: [0] * len(Outcome))
    executed_s: float = 0.0
    saved_s: float = 0.0
    used: int = 0


class RunCounters:
    """The totals of the runs that were used last. The totals of others are summed under `OTHERS`, so no sum shrinks."""

    def __init__(self, max_runs: int = MAX_RUNS) -> None:
        self._max_runs, self._calls = max_runs, 0
        self.totals: dict[str, RunTotals] = {}
        self.others = RunTotals()

    def answered(self, run: str, outcome: Outcome, tool_s: float) -> None:
        """Count an answered call of a run. 0.3 us; O(runs) for a run that is new while all places are taken."""
        totals = self.totals.get(run)
        if totals is None:
            if len(self.totals) >= self._max_runs:
                self._give_up(min(self.totals, key=lambda name: self.totals[name].used))
            totals = self.totals[run] = RunTotals()
        self._calls += 1
        totals.used = self._calls
        totals.outcomes[outcome] += 1
        if outcome is Outcome.HIT or outcome is Outcome.WAIT:
            totals.saved_s += tool_s
        else:
            totals.executed_s += tool_s

    def _give_up(self, run: str) -> None:
        old = self.totals.pop(run)
        self.others.outcomes = [a + b for a, b in zip(self.others.outcomes, old.outcomes, strict=True)]
        self.others.executed_s += old.executed_s
        self.others.saved_s += old.saved_s
