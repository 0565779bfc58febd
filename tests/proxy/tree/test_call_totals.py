"""Totals of answered calls."""

from proxy.tree.call_totals import CallTotals
from proxy.tree.rollout import Outcome


def test_hits_and_waits_save_what_misses_execute() -> None:
    totals, more = CallTotals(), CallTotals()
    totals.answered(Outcome.MISS, 2.0)
    totals.answered(Outcome.HIT, 6.0, calls=3)
    more.answered(Outcome.WAIT, 1.0)
    more.answered(Outcome.BYPASS, 0.5)
    totals.merge(more)
    assert totals.as_dict() == {
        "calls": 6, "hits": 3, "waits": 1, "misses": 1, "bypasses": 1, "hit_rate": 4 / 6, "executed_s": 2.5,
        "saved_s": 7.0,
    }  # fmt: skip
