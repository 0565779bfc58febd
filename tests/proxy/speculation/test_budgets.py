"""What speculation may spend follows from the share of cores, and from what it has saved."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.speculation.budgets import BURST_S, CpuBudget, Credit


@given(st.floats(0.1, 64), st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5)), max_size=50))
def test_spending_never_exceeds_the_share_and_one_burst(cores: float, steps: list[tuple[float, float]]) -> None:
    budget, now, spent = CpuBudget.begun(cores, 0.0), 0.0, 0.0
    for passed, wanted in steps:
        now += passed
        if budget.may_spend(now):
            budget.spend(wanted, now)
            spent += wanted
    # The last call may exceed what was left: its time is known only afterwards.
    assert spent <= cores * (BURST_S + now) + max([wanted for _, wanted in steps], default=0.0) + 1e-6


def test_a_budget_recovers_with_time() -> None:
    budget = CpuBudget.begun(2.0, 0.0)
    budget.spend(30.0, 0.0)
    assert not budget.may_spend(4.9)
    assert budget.may_spend(5.1)


def test_credit_lasts_while_calls_are_used() -> None:
    credit = Credit.begun(0.0)
    for _ in range(100):
        credit.executed(1.0, 0.0)
        credit.used(1.5, 0.0)
    assert credit.pays(0.0)
    for _ in range(60):
        credit.executed(1.0, 0.0)
    assert not credit.pays(0.0)


def test_a_task_that_did_not_pay_is_tried_again() -> None:
    credit = Credit.begun(0.0)
    credit.executed(20.0, 0.0)
    assert not credit.pays(60.0)
    assert credit.pays(3600.0)
