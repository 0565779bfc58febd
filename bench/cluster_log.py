"""What a line of a cluster's log costs, for `bench.cluster`: one writer, and many, beside an fsync of the same disk.

A line cannot be faster than an fsync, which PostgreSQL waits for at each commit. So its time is printed first; it is
that of the folder of the benchmark, which should be on the database's disk.
"""

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path

from bench.machine import console, cpu_seconds, median, table
from proxy.cluster.postgres.database import ClusterDatabase

WRITERS = {1: 400, 64: 50, 500: 20}
"""How many rows are written by each of so many writers. A writer is a task with many rollouts."""
LINE = os.urandom(600)
"""About what a record of a short call takes."""


def fsync_ms(folder: Path, count: int = 50) -> float:
    """Return the median time of writing 8 kB to a disk, in milliseconds."""
    times, path = [], folder / "fsync"
    with path.open("wb", buffering=0) as file:
        file.write(bytes(8192))
        for _ in range(count):
            began = time.perf_counter()
            os.pwrite(file.fileno(), os.urandom(8192), 0)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    path.unlink()
    return median(times) * 1000


def postgres_seconds() -> float:
    """Return the CPU time of all PostgreSQL processes of this machine, in seconds."""
    total = 0.0
    for entry in Path("/proc").iterdir():
        # Processes of others end meanwhile.
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(b"postgres:"):
                total += cpu_seconds(int(entry.name))
    return total


async def _write(database: ClusterDatabase, writers: int, rows: int) -> list[float]:
    """Write rows of as many tasks as there are writers; return how long each row took, in milliseconds."""
    times, name = [], f"{writers}-{time.monotonic_ns()}"

    async def write(task: str) -> None:
        for row in range(1, rows + 1):
            began = time.perf_counter()
            assert await database.append(task, row, LINE)
            times.append((time.perf_counter() - began) * 1000)

    await asyncio.gather(*(write(f"{name}-{number}") for number in range(writers)))
    return times


def show_log(dsn: str, secret: bytes, folder: Path, rounds: int) -> None:
    """Measure rows from one process, in turn for each number of writers."""
    shown = table("A row of the log", "writers", "p50 ms", "p90 ms", "CPU us", "PostgreSQL's CPU us", "rows a second")

    async def measure() -> None:
        database = ClusterDatabase(dsn, secret)
        await database.join("bench-log", "127.0.0.1:1", None)
        measured: dict[int, list[list[float]]] = {writers: [] for writers in WRITERS}
        for _ in range(rounds):
            for writers, rows in WRITERS.items():
                before = time.process_time(), postgres_seconds(), time.perf_counter()
                times = sorted(await _write(database, writers, rows))
                after = time.process_time(), postgres_seconds(), time.perf_counter()
                own, server, seconds = (b - a for a, b in zip(before, after, strict=True))
                count, most = len(times), len(times) * 9 // 10
                costs = [own / count * 1e6, server / count * 1e6, count / seconds]
                measured[writers].append([median(times), times[most], *costs])
        await database.aclose()
        for writers, results in measured.items():
            p50, p90, own, server, per_s = (median(values) for values in zip(*results, strict=True))
            shown.add_row(str(writers), f"{p50:.2f}", f"{p90:.2f}", f"{own:.0f}", f"{server:.0f}", f"{per_s:,.0f}")

    before = fsync_ms(folder)
    asyncio.run(measure())
    console.print(shown)
    console.print(f"An fsync of 8 kB takes {before:.2f} ms before, and {fsync_ms(folder):.2f} ms afterwards.")
