"""Confidence intervals contain the true rate as often as they state."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.audit.confidence import clopper_pearson


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_interval_bounds_have_the_stated_probability(seen: tuple[int, int]) -> None:
    """Each bound is the rate at which the observed count has a probability of 2.5 %."""
    differing, checked = seen
    interval = clopper_pearson(differing, checked)
    assert 0 <= interval.low <= differing / checked <= interval.high <= 1

    def at_most(k: int, p: float) -> float:
        return math.fsum(math.comb(checked, i) * p**i * (1 - p) ** (checked - i) for i in range(k + 1))

    if differing < checked:
        assert at_most(differing, interval.high) == pytest.approx(0.025, abs=1e-6)
    if differing:
        assert 1 - at_most(differing - 1, interval.low) == pytest.approx(0.025, abs=1e-6)


def test_intervals_cover_the_true_rate() -> None:
    randomness = random.Random(1)  # noqa: S311
    for rate in (0.001, 0.05, 0.3):
        draws = [sum(randomness.random() < rate for _ in range(100)) for _ in range(400)]
        held = sum(clopper_pearson(k, 100).low <= rate <= clopper_pearson(k, 100).high for k in draws)
        assert held / len(draws) >= 0.95


def test_an_empty_sample_bounds_nothing() -> None:
    interval = clopper_pearson(0, 0)
    assert (interval.low, interval.high) == (0.0, 1.0)
