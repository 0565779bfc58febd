"""What every benchmark prints about its machine, and shared helpers."""

import os
import platform
import statistics
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 110)


def machine() -> str:
    """Return cores, kernel, Python and current load: figures from a busy machine are comparable only within a table."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, load {load:.1f}"


def table(title: str, *columns: str) -> Table:
    """Print the title and the machine, and return an empty table: a column of names, then columns of numbers."""
    console.print(f"\n[bold]{title}[/bold]\n{machine()}")
    made = Table()
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", no_wrap=True)
    return made


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process so far, over all threads."""
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123 - a file of the kernel, one read
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
