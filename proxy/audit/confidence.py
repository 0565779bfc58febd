"""How sure a sample makes one of a rate (pure)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A rate's bounds: it is between them with at least this confidence."""

    low: float
    high: float
    confidence: float = CONFIDENCE


def clopper_pearson(differing: int, checked: int, confidence: float = CONFIDENCE) -> Interval:
    """Return the exact (Clopper-Pearson) interval of a rate of which differing in checked were seen.

    Exact and not Wilson's: for every rate and sample size it covers the true rate at least as often as it says.
    Wilson's is shorter, and covers less than it says for rates near 0, the ones that matter here.
    """
    if checked == 0:
        return Interval(0.0, 1.0, confidence)
    tail = (1 - confidence) / 2
    low = 0.0 if differing == 0 else _solve(lambda p: 1 - _at_most(differing - 1, checked, p) - tail)
    high = 1.0 if differing == checked else _solve(lambda p: tail - _at_most(differing, checked, p))
    return Interval(low, high, confidence)


def _at_most(most: int, of: int, p: float) -> float:
    """Return the chance of at most so many successes."""
    if p <= 0:
        return 1.0
    if p >= 1:
        return 0.0 if most < of else 1.0
    log_p, log_q = math.log(p), math.log1p(-p)
    base = math.lgamma(of + 1)
    terms = (
        base - math.lgamma(k + 1) - math.lgamma(of - k + 1) + k * log_p + (of - k) * log_q for k in range(most + 1)
    )
    return min(1.0, math.fsum(math.exp(term) for term in terms))


def _solve(rising: Callable[[float], float]) -> float:
    """Return where a function that rises over [0, 1] is zero."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
