"""A store with very many records: how long it takes to open, and how long hits wait: `python -m bench.large_store`.

The rows are written by the proxy's own storage, without running tools, and thousands of records are one transaction.
Each task has the same number of records, of rollouts that make 50 calls each, one of which in twenty changes the state.
The last task has as many as all others together. Then another engine opens the store. A timer measures for how long
its event loop works on end while it reads back the large tree, because a hit has to wait for that; calls of a new
rollout of this task are answered meanwhile.
"""

import asyncio
import gc
import logging
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import structlog

from bench.machine import console, table
from proxy.engine import Engine
from proxy.storage.journal_segments import JournalEntry
from proxy.tree.keys import call_key
from proxy.tree.rollout import Outcome
from proxy.tree.tree import Node, Record, Tree
from sandboxes.calls import ToolCall, ToolResult
from sandboxes.effects import Effect, StateDigest
from tests.proxy.rig import ask, engine, shell

TICK_S = 0.001
BATCH = 5000
"""Records in one transaction."""
ROLLOUT_CALLS = 50
CHANGES = 20
"""One call in so many changes the state."""


@contextmanager
def one_transaction(running: Engine) -> Iterator[None]:
    """Write everything that the block saves in one transaction."""
    database = running.store.database
    with database.transaction() as execute:

        @contextmanager
        def joined(*, durable: bool = False) -> Iterator[Any]:
            del durable
            yield execute

        database.transaction = joined  # type: ignore[method-assign]
        try:
            yield
        finally:
            del database.transaction


def made_by(number: int, turn: int) -> ToolCall:
    """Return a call of a rollout."""
    return shell(f"sed -n {turn},{turn + 40}p src/module_{number % 97}.py # {number}")


def write_rollout(running: Engine, tree: Tree, task: str, number: int) -> None:
    """Write a rollout of `ROLLOUT_CALLS` calls that are new to its tree."""
    store, node = running.store, tree.root
    rollout = store.rollouts.create(task, f"r{number}", tree.id, node.id)
    steps: list[JournalEntry] = []
    for turn in range(ROLLOUT_CALLS):
        call = made_by(number, turn)
        result = ToolResult(200, "application/json", f'{{"stdout":"{"text " * 30}{number} {turn}"}}'.encode())
        effect, target, made = Effect.NONE, node, None
        if turn % CHANGES == 0:
            digest = f"{task} {number} {turn}".encode().ljust(32)
            made = target = Node(store.records.new_node_id(), state=StateDigest(digest, digest))
            effect = Effect.FILES
        record = Record(store.records.new_record_id(), call_key(call), node, target, effect, 0.01, time.time())
        record.proven = True
        store.records.save(tree.id, record, made, call, result)
        steps.append(JournalEntry(rollout, turn, record.id, Outcome.MISS))
        node = target
    store.rollouts.fold(steps)
    store.rollouts.finish(rollout)


async def write(folder: Path, records: int, tasks: int) -> int:
    """Write a store; return its bytes."""
    async with engine(folder) as running:
        half = records // 2
        shares = [half // tasks] * tasks + [half]
        number = 0
        for task, share in enumerate(shares):
            tree = (await running.tasks.open(f"task-{task}")).tree
            # As after the first start of a sandbox.
            tree.set_root_state(StateDigest(bytes(32), bytes(32)))
            running.store.records.save_node(tree.root)
            done = 0
            while done < share:
                with one_transaction(running):
                    for _ in range(min(BATCH, share - done) // ROLLOUT_CALLS or 1):
                        write_rollout(running, tree, f"task-{task}", number)
                        number += 1
                        done += ROLLOUT_CALLS
                running.store.database.checkpoint()
        return running.store.database.size_bytes()


@asynccontextmanager
async def watched() -> AsyncIterator[list[float]]:
    """Measure for how long the event loop works on end; yields a list whose last value is the longest, in seconds."""
    longest = [0.0]

    async def tick() -> None:
        while True:
            # CPU time of this thread: what other processes of the machine take is no wait for the proxy.
            before = time.thread_time()
            await asyncio.sleep(TICK_S)
            longest[0] = max(longest[0], time.thread_time() - before)

    ticking = asyncio.ensure_future(tick())
    try:
        yield longest
    finally:
        ticking.cancel()


def private_bytes() -> int:
    """Return the bytes of this process's memory that are no pages of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) << 10


async def read_back(folder: Path, tasks: int, records: int) -> dict[str, str]:
    """Open the store and read back a small tree, then the large one; return what was measured."""
    began, cpu_s = time.perf_counter(), time.process_time()
    async with engine(folder) as running:
        shown = {"open, s": f"{time.perf_counter() - began:.2f}", "its CPU, s": f"{time.process_time() - cpu_s:.2f}"}
        began = time.perf_counter()
        await running.tasks.open("task-0")
        shown["a small tree, ms"] = f"{(time.perf_counter() - began) * 1e3:.1f}"
        gc.collect()
        before = private_bytes()
        async with watched() as longest:
            began, cpu_s = time.perf_counter(), time.process_time()
            last = records // ROLLOUT_CALLS - 1
            for turn in range(ROLLOUT_CALLS):
                rollout = await running.tasks.rollout(f"task-{tasks}", "new")
                assert (await ask(running, rollout, made_by(last, turn).arguments["command"]))[1] is Outcome.HIT
                shown.setdefault("the large task's first answer, ms", f"{(time.perf_counter() - began) * 1e3:.1f}")
            shown[f"its first {ROLLOUT_CALLS} answers, ms"] = f"{(time.perf_counter() - began) * 1e3:.1f}"
            await running.tasks.open(f"task-{tasks}")
            shown["the large tree, s"] = f"{time.perf_counter() - began:.2f}"
            shown["its CPU, s "] = f"{time.process_time() - cpu_s:.2f}"
        shown["longest block, ms"] = f"{longest[0] * 1e3:.1f}"
        gc.collect()
        shown["memory of a record, bytes"] = f"{(private_bytes() - before) / (records // 2):,.0f}"
    return shown


def measure(options: Namespace) -> None:
    """Write a store, open it, and print a table."""
    with tempfile.TemporaryDirectory(prefix="forkpoint-bench-", dir="/var/tmp") as folder:
        began = time.perf_counter()
        size_bytes = asyncio.run(write(Path(folder), options.records, options.tasks))
        written_s = time.perf_counter() - began
        results = asyncio.run(read_back(Path(folder), options.tasks, options.records))
    shown = table(f"A store of {options.records:,} records of {options.tasks + 1} tasks", "", "")
    shown.add_row("written in, s", f"{written_s:.0f}")
    shown.add_row("bytes of the file for each record", f"{size_bytes / options.records:,.0f}")
    for name, value in results.items():
        shown.add_row(name, value)
    console.print(shown)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--tasks", type=int, default=100, help="small tasks, which have half of the records")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
