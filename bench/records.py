"""What a recorded call costs beside its sandbox: `python -m bench.records`.

Calls are recorded with the in-memory driver, so only the proxy's own work is measured: memory (traced by tracemalloc),
bytes written to the disk, and CPU time of a call. Then the store is opened by another engine, which reads the tree back
while a timer measures for how long the event loop works on end, so that a hit has to wait.
"""

import asyncio
import gc
import logging
import tempfile
import time
import tracemalloc
from argparse import ArgumentParser, Namespace
from pathlib import Path

import structlog

from bench.machine import console, table
from proxy.engine import Engine
from snapshots.policy import Reuse
from tests.proxy.rig import ask, engine

TICK_S = 0.001


async def record(running: Engine, count: int, *, writes: bool, offset: int) -> None:
    """Record new calls of ten rollouts. One in twenty changes the state, or all of them."""
    rollouts = [await running.tasks.rollout("task", f"r{number}") for number in range(10)]
    for number in range(offset, offset + count):
        command = f"echo {number} > /root/x" if writes or number % 20 == 0 else f"cat /root/seed {number}"
        await ask(running, rollouts[number % 10], command)


def written_bytes() -> int:
    """Return the bytes that this process has written to disks so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])


async def recorded(folder: Path, options: Namespace, *, writes: bool) -> tuple[float, float, float, float]:
    """Return bytes of memory, bytes written, bytes of the store, and CPU µs, of a recorded call."""
    count = options.records
    async with engine(folder, reuse=Reuse(0.0, 1e9)) as running:
        await record(running, 200, writes=writes, offset=0)
        gc.collect()
        before, cpu_s, store_bytes = written_bytes(), time.process_time(), running.store.database.size_bytes()
        await record(running, count, writes=writes, offset=200)
        cpu_s, written = time.process_time() - cpu_s, written_bytes() - before
        grown = running.store.database.size_bytes() - store_bytes
        tracemalloc.start()
        await record(running, options.traced, writes=writes, offset=200 + count)
        gc.collect()
        memory = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    return memory / options.traced, written / count, grown / count, cpu_s / count * 1e6


async def read_back(folder: Path) -> tuple[float, float, float]:
    """Return the seconds to open the engine and to read the tree, and the longest CPU time in ms between two ticks."""
    began = time.perf_counter()
    async with engine(folder) as running:
        opened_s = time.perf_counter() - began
        longest_s, done = 0.0, False

        async def tick() -> None:
            nonlocal longest_s
            while not done:
                # CPU time of this thread: what other processes of the machine take is no wait for the proxy.
                before = time.thread_time()
                await asyncio.sleep(TICK_S)
                longest_s = max(longest_s, time.thread_time() - before)

        ticking = asyncio.ensure_future(tick())
        began = time.perf_counter()
        await running.tasks.open("task")
        done = True
        await ticking
        return opened_s, time.perf_counter() - began, longest_s * 1e3


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--traced", type=int, default=3000, help="further records, whose memory is traced")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    columns = ("", "memory", "written", "store", "CPU µs", "open s", "tree s", "busy ms")
    shown = table(
        f"A recorded call, of {options.records:,}: bytes, and the longest time that reading back blocks", *columns
    )
    for name, writes in (("one call in 20 changes the state", False), ("every call changes it", True)):
        with tempfile.TemporaryDirectory(prefix="forkpoint-bench-", dir="/var/tmp") as folder:
            memory, written, grown, cpu_us = asyncio.run(recorded(Path(folder), options, writes=writes))
            opened_s, back_s, longest_ms = asyncio.run(read_back(Path(folder)))
        shown.add_row(
            name, f"{memory:,.0f}", f"{written:,.0f}", f"{grown:,.0f}", f"{cpu_us:,.0f}",
            f"{opened_s:.2f}", f"{back_s:.2f}", f"{longest_ms:.1f}",
        )  # fmt: skip
    console.print(shown)


if __name__ == "__main__":
    main()
