"""An exact paired test: do pairs of measurements differ by more than chance, and by how much at most?

If both members of a pair come from the same distribution, the sign of their difference is that of a fair coin. So the
mean difference is compared with the means under all 2^n choices of signs (Fisher's randomization test).
"""

from collections.abc import Sequence

import numpy as np

_ALPHA, _STEPS = 0.05, 60


def p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p-value; its cost doubles with each pair, so at most 20 are allowed."""
    values = np.array(differences, dtype=np.float64)
    if not 0 < len(values) <= 20:
        raise ValueError(f"{len(values)} pairs: give between 1 and 20.")
    bits = np.arange(1 << len(values))[:, None] >> np.arange(len(values)) & 1
    sums = np.abs((2 * bits - 1) @ values)
    # Sums of the same numbers in another order may differ by a rounding error.
    return float(np.mean(sums >= abs(values.sum()) - 1e-12))


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the difference: all shifts that the test does not reject.

    Six pairs are the fewest that can reject anything. With fewer, the interval has no bounds.
    """
    mean = float(np.mean(differences))
    if 2 ** (1 - len(differences)) > _ALPHA:
        return -np.inf, np.inf
    reach = float(np.ptp(differences)) + 1e-9

    def bound(sign: int) -> float:
        inside, outside = 0.0, 2 * reach
        for _ in range(_STEPS):
            middle = (inside + outside) / 2
            shift = mean + sign * middle
            rejected = p_value([each - shift for each in differences]) <= _ALPHA
            inside, outside = (inside, middle) if rejected else (middle, outside)
        return mean + sign * inside

    return bound(-1), bound(1)
