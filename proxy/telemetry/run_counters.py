"""Counters by the label `run`, for as many runs as a metrics page can bear (pure)."""

from dataclasses import dataclass

from proxy.tree.call_totals import CallTotals
from proxy.tree.rollout import Outcome

MAX_RUNS = 50
"""Runs with counters of their own, some 300 bytes each. Agents choose labels, and each run is five series that a
Prometheus server keeps, so their number is bounded; a proxy rarely serves ten runs at once."""
OTHERS = "(other)"
"""Stands for all runs whose counters were given up."""


@dataclass(slots=True)
class RunTotals(CallTotals):
    """Totals of one run since this process started; `used` is its last call's number over all runs."""

    used: int = 0


class RunCounters:
    """The totals of the runs that were used last. The totals of others are summed under `OTHERS`, so no sum shrinks."""

    def __init__(self, max_runs: int = MAX_RUNS) -> None:
        self._max_runs, self._calls = max_runs, 0
        self.totals: dict[str, RunTotals] = {}
        self.others = CallTotals()

    def answered(self, run: str, outcome: Outcome, tool_s: float) -> None:
        """Count an answered call of a run. 0.3 us; O(runs) for a run that is new while all places are taken."""
        totals = self.totals.get(run)
        if totals is None:
            if len(self.totals) >= self._max_runs:
                self.others.merge(self.totals.pop(min(self.totals, key=lambda name: self.totals[name].used)))
            totals = self.totals[run] = RunTotals()
        self._calls += 1
        totals.used = self._calls
        totals.answered(outcome, tool_s)
