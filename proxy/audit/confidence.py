"""Confidence intervals of a rate that was estimated from a sample (pure)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

CONFIDENCE = 0.95
"""Probability with which an interval contains the true rate: the convention in statistics."""
_BISECTIONS = 60
"""Halvings of [0, 1] that find a bound: 2^-60 is below the precision of a float near 1."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of a rate, from 0 to 1."""

    low: float
    high: float


def clopper_pearson(differing: int, checked: int) -> Interval:
    """Return the exact (Clopper-Pearson) interval of the rate behind a sample; from 0 to 1 if nothing was checked.

    Wilson's is shorter, but covers less than stated for rates near 0, which are the rates that matter here.
    """
    if checked == 0:
        return Interval(0.0, 1.0)
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if differing == 0 else _solve(lambda p: 1 - _at_most(differing - 1, checked, p) - tail)
    high = 1.0 if differing == checked else _solve(lambda p: tail - _at_most(differing, checked, p))
    return Interval(low, high)


def _at_most(successes: int, trials: int, p: float) -> float:
    """Return the probability of at most so many successes, each with probability p (binomial distribution)."""
    if p <= 0:
        return 1.0
    if p >= 1:
        return 0.0 if successes < trials else 1.0
    # In logarithms: the binomial coefficients of large samples exceed every float.
    log_p, log_q = math.log(p), math.log1p(-p)
    base = math.lgamma(trials + 1)
    terms = (
        base - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * log_p + (trials - k) * log_q
        for k in range(successes + 1)
    )
    return min(1.0, math.fsum(math.exp(term) for term in terms))


def _solve(rising: Callable[[float], float]) -> float:
    """Return the zero in [0, 1] of a function that rises."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
