"""What every benchmark prints about where it ran, and the small things that they share."""

import os
import platform
import statistics
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 110)


def machine() -> str:
    """Return cores, kernel, Python and the load just now: figures of a busy machine compare only within their table."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, load {load:.1f}"


def table(title: str, *columns: str) -> Table:
    """Print title and the machine, and return an empty table: the first column names, the others are numbers."""
    console.print(f"\n[bold]{title}[/bold]\n{machine()}")
    made = Table()
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", no_wrap=True)
    return made


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def cpu_seconds(pid: int) -> float:
    """Return the user and system time that a process has used so far, all its threads together."""
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123 - a file of the kernel, one read
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
