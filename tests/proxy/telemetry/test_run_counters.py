"""Counters by run: bounded, and no call is lost from their sum."""

from proxy.telemetry.run_counters import RunCounters
from proxy.tree.rollout import Outcome


def test_run_used_longest_ago_gives_way() -> None:
    counters = RunCounters(max_runs=2)
    for run in ("a", "b", "a", "c"):
        counters.answered(run, Outcome.HIT, 2.0)
    counters.answered("c", Outcome.MISS, 3.0)
    assert list(counters.totals) == ["a", "c"]
    assert (counters.others.outcomes[Outcome.HIT], counters.others.saved_s) == (1, 2.0)
    assert (counters.totals["c"].outcomes[Outcome.MISS], counters.totals["c"].executed_s) == (1, 3.0)
    assert sum(map(sum, [counters.others.outcomes, *(each.outcomes for each in counters.totals.values())])) == 5
