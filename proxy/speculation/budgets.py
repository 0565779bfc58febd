"""What speculation may spend: CPU time as a share of the machine, and credit as long as it pays (pure)."""

from dataclasses import dataclass

BURST_S = 10.0
"""Seconds of the share that may be saved up while nothing is likely enough to be run.

A test suite takes some seconds of CPU time. Halved, calls that take longer are cancelled before they end. Doubled, a
pause of the agents is followed by a longer time in which the share is exceeded.
"""
_FIRST_CREDIT_S = 10.0
"""CPU seconds that a task may spend before any speculated call was used."""
_MAX_CREDIT_S = 60.0
"""Most CPU seconds that earlier successes are good for: what paid an hour ago may not pay now."""
_REFILL = 0.01
"""CPU seconds of credit that a task gets each second, so that a task that did not pay is tried again."""
_OVERHEAD_S = 0.02
"""CPU seconds that the proxy spends for each speculated call, its sandbox left out: a restore, a record, a freeze.
Measured: 15 to 25 ms a call (`bench/misspath.py`)."""


@dataclass(slots=True)
class CpuBudget:
    """CPU time that flows in at a constant rate and is spent in bursts.

    Attributes:
        cores: CPU seconds that flow in each second.
        left_s: CPU seconds that may be spent now; negative in debt.
        at: When `left_s` was computed, in seconds of the monotonic clock.
    """

    cores: float
    left_s: float
    at: float

    @classmethod
    def begun(cls, cores: float, now: float) -> "CpuBudget":
        """Return a budget that begins full."""
        return cls(cores, cores * BURST_S, now)

    def spend(self, cpu_s: float, now: float) -> None:
        """Take CPU time that was used."""
        self.left_s = min(self.cores * BURST_S, self.left_s + (now - self.at) * self.cores) - cpu_s
        self.at = now

    def may_spend(self, now: float) -> bool:
        """Return whether there is anything left."""
        self.spend(0.0, now)
        return self.left_s > 0


@dataclass(slots=True)
class Credit:
    """What a task's speculation has saved and spent: it goes on only while it saves at least what it costs.

    Attributes:
        left_s: CPU seconds that may still be spent in vain.
        at: When `left_s` was computed, in seconds of the monotonic clock.
    """

    left_s: float
    at: float

    @classmethod
    def begun(cls, now: float) -> "Credit":
        """Return the credit of a task in which nothing was speculated yet."""
        return cls(_FIRST_CREDIT_S, now)

    def executed(self, cpu_s: float, now: float) -> None:
        """Take what a speculated call cost."""
        self._change(-cpu_s - _OVERHEAD_S, now)

    def used(self, saved_s: float, now: float) -> None:
        """Add the seconds that a rollout did not wait because its call had been executed."""
        self._change(saved_s, now)

    def pays(self, now: float) -> bool:
        """Return whether the task may go on."""
        self._change(0.0, now)
        return self.left_s > 0

    def _change(self, by_s: float, now: float) -> None:
        self.left_s = min(_MAX_CREDIT_S, self.left_s + (now - self.at) * _REFILL + by_s)
        self.at = now
