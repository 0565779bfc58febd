"""How many of the machine's cores have nothing to do."""

import os
from pathlib import Path


class IdleCores:
    """Counts the cores that were idle between two looks. A look takes 30 µs."""

    def __init__(self) -> None:
        self._before = self._read()

    def since_last(self) -> float:
        """Return how many cores were idle on average since the last look; 0 if the machine does not say."""
        idle, total = self._read()
        before_idle, before_total = self._before
        if total <= before_total:
            return 0.0
        self._before = idle, total
        return (idle - before_idle) / (total - before_total) * (os.cpu_count() or 1)

    def _read(self) -> tuple[int, int]:
        """Return the idle and all ticks of all cores. Waiting for a disk is idle: the core could do something else."""
        try:
            fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return 0, 0
        # user, nice, system, idle, iowait, irq, softirq, steal (proc_stat(5)); guest time is part of user time.
        return fields[3] + fields[4], sum(fields)
