"""Where the memory of recorded calls goes: `python -m bench.memory`.

Rollouts of one task make calls that are all new and change a file, with real sandboxes. First the growth of the
process's private memory (`RssAnon`) is measured, then further calls are traced by tracemalloc, and their allocations
that stay are counted by the part of the proxy that made them. The two differ because allocators round up to size
classes, and because freed memory is used again, for which the process does not grow. Needs what the `local` driver
needs.
"""

import asyncio
import gc
import tempfile
import tracemalloc
from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path

from bench.divergence import ask, running, shell
from bench.machine import console, table
from proxy.engine import Engine

ROOT = Path(__file__).parent.parent
PARTS = {
    "the tree: nodes, records, keys, digests of states": (
        "proxy/tree/", "proxy/execution/executor.py", "sandboxes/ipc/codec.py", "sandboxes/guest/",
    ),
    "URLs of calls, up to 8,192": ("proxy/http/address.py", "proxy/dataplane/"),
    "answers that were sent lately, up to their budget": ("proxy/http/",),
    "snapshots and layers, until they are evicted": ("snapshots/", "sandboxes/local/", "/secrets.py", "/uuid.py"),
    "rollouts: steps, times, labels": ("proxy/step.py", "proxy/telemetry/", "proxy/tasks/", "proxy/execution/"),
    "numbers of rows, and trees that were imported or read back": ("proxy/storage/",),
}  # fmt: skip
"""Parts by the source files that allocate for them; the first match counts."""
ROLLOUT_CALLS = 50
"""Calls of a rollout, before the next rollout begins."""
WARM_UP = 600
"""Calls before anything is measured: caches of statements and patterns fill, and freed memory is used again."""


async def record(engine: Engine, first: int, count: int) -> None:
    """Make calls that are all new and change a file."""
    for number in range(first, first + count):
        rollout = await engine.tasks.rollout("task", f"r{number // ROLLOUT_CALLS}")
        await ask(engine, rollout, shell(f"echo {number} >> /root/path; wc -l < /root/path"))
    # What follows from the last calls: freezes, and removals of directories.
    await asyncio.sleep(1)
    gc.collect()


def private_bytes() -> int:
    """Return the bytes of this process's memory that are no pages of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) << 10


def part_of(path: str) -> str:
    """Return the part of the proxy that a source file belongs to."""
    name = path.removeprefix(f"{ROOT}/")
    return next((part for part, names in PARTS.items() if any(one in name for one in names)), "other")


async def measure(folder: Path, options: Namespace) -> tuple[float, Counter[str]]:
    """Return the growth of private memory in bytes for each call, and the traced bytes by part."""
    async with running(folder, 0) as engine:
        await record(engine, 0, WARM_UP)
        before = private_bytes()
        await record(engine, WARM_UP, options.calls)
        grown = (private_bytes() - before) / options.calls
        tracemalloc.start(1)
        first = tracemalloc.take_snapshot()
        await record(engine, WARM_UP + options.calls, options.calls)
        last = tracemalloc.take_snapshot()
        tracemalloc.stop()
    parts: Counter[str] = Counter()
    for line in last.compare_to(first, "filename"):
        if (name := line.traceback[0].filename) != tracemalloc.__file__:
            parts[part_of(name)] += line.size_diff
    return grown, parts


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1500, help="calls that are measured, and again that are traced")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o711)
        grown, parts = asyncio.run(measure(Path(folder), options))
    shown = table(f"Memory of a recorded call that changes a file, of {options.calls}", "part", "bytes")
    for part in [*PARTS, "other"]:
        shown.add_row(part, f"{parts[part] / options.calls:,.0f}")
    traced = parts.total() / options.calls
    shown.add_row("all that was traced", f"{traced:,.0f}")
    shown.add_row("growth of the private memory", f"{grown:,.0f}")
    console.print(shown)


if __name__ == "__main__":
    main()
