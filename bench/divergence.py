"""How long a diverging call waits for its sandbox: `python -m bench.divergence`.

A rollout follows a recorded path with hits and then makes a new call. The time is measured inside the engine, from the
arrival of the call until a sandbox is in the right state (before it executes the call), for files only:

- *warm*: the rollout pauses before the call, as a model does, and a warm fork is ready;
- *restored*: warm forks are off and no sandbox is idle; the nearest snapshot is restored.

The state has some files, made by the first call; `--files` says how many. The duration of the whole call is shown
too. Each run is a new rollout that leaves the path at a node with a new call, and its answer is checked. Both ways
alternate, each with its own engine on the same machine.
"""

import asyncio
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.machine import console, median, table
from proxy.engine import Engine, build_engine
from proxy.settings import Settings
from proxy.tree.keys import call_key
from proxy.tree.rollout import Rollout
from sandboxes.calls import ToolCall
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from snapshots.criu.checkpoints import CriuCheckpointer

DEPTH = 6
TARGETS_MS = {"warm": 5.0, "restored": 20.0}


def shell(command: str) -> ToolCall:
    return ToolCall("shell", "exec", {"command": command, "session": "main", "timeout_s": 30.0})


@asynccontextmanager
async def running(folder: Path, warm: int) -> AsyncIterator[Engine]:
    """Run an engine with the local driver."""
    settings = Settings(data=folder, default_spec=EnvironmentSpec(), warm_sandboxes=warm)
    engine = build_engine(settings, {"local": LocalDriver(folder / "local", CriuCheckpointer(folder / "local"))})
    await engine.open()
    try:
        yield engine
    finally:
        await engine.aclose()


async def ask(engine: Engine, rollout: Rollout, call: ToolCall) -> float:
    """Make a call and return its duration in seconds; 0 for a hit."""
    key = call_key(call)
    if engine.step.known(rollout, key) is not None:
        return 0.0
    began = time.perf_counter()
    await engine.step.run(rollout, call, key)
    return time.perf_counter() - began


async def diverge(engine: Engine, number: int, pause_s: float, files: int) -> tuple[float, float, bool]:
    """Walk to a node and leave the tree; return ms to the sandbox, ms in total, and whether it was warm."""
    rollout = await engine.tasks.rollout("task", f"r{number}")
    depth = 1 + number % DEPTH
    for call in first_step(files):
        await ask(engine, rollout, call)
    for step in range(depth):
        await ask(engine, rollout, shell(f"echo {step} >> /root/path"))
    await asyncio.sleep(pause_s)
    used = engine.counts.warm_used
    stood: list[float] = []
    restorer, lease_at = engine.restorer, engine.restorer.lease_at
    call = shell(f"wc -l < /root/path; echo {number} > /root/own; cat /root/own")
    began = time.perf_counter()

    @asynccontextmanager
    async def timed(*arguments: object) -> AsyncIterator[object]:
        async with lease_at(*arguments) as slot:  # type: ignore[arg-type]
            stood.append(time.perf_counter() - began)
            yield slot

    restorer.lease_at = timed  # type: ignore[method-assign,assignment]
    try:
        total_s = await ask(engine, rollout, call)
    finally:
        restorer.lease_at = lease_at  # type: ignore[method-assign]
    result = engine.store.records.result(rollout.node.origin).body if rollout.node.origin else b""
    if f'"stdout":"{depth}\\n{number}\\n"'.encode() not in result.replace(b" ", b""):
        raise RuntimeError(f"rollout {number} stood at a wrong state: {result!r}")
    await engine.tasks.rollouts.finish(rollout)
    return stood[0] * 1e3, total_s * 1e3, engine.counts.warm_used > used


def first_step(files: int) -> list[ToolCall]:
    """Return the calls that make the files of the state."""
    parts = [(first, min(first + 5_000, files)) for first in range(0, files, 5_000)]
    program = (
        'import os\nos.makedirs("/root/files", exist_ok=True)\n'
        'for n in range({}, {}):\n open(f"/root/files/{{n}}", "w").write(str(n))'
    )
    return [shell(f"python3 -c '{program.format(*part)}'") for part in parts]


async def measure(folder: Path, rounds: int, pause_s: float, files: int) -> dict[str, list[tuple[float, float, bool]]]:
    """Return the times of all divergences, by way."""
    results: dict[str, list[tuple[float, float, bool]]] = {"warm": [], "restored": []}
    async with running(folder / "warm", 8) as warm, running(folder / "cold", 0) as cold:
        engines = {"warm": warm, "restored": cold}
        for engine in engines.values():
            first = await engine.tasks.rollout("task", "first")
            for call in first_step(files):
                await ask(engine, first, call)
            for step in range(DEPTH):
                await ask(engine, first, shell(f"echo {step} >> /root/path"))
                await asyncio.sleep(0.05)
            await engine.tasks.rollouts.finish(first)
        for number in range(rounds):
            for way, engine in engines.items():
                if way == "restored":
                    # An idle sandbox of an earlier rollout would make the restore unnecessary.
                    await engine.capture.drain()
                    await engine.pool.close_where(lambda _: True)
                results[way].append(await diverge(engine, number, pause_s, files))
    return results


def show(results: dict[str, list[tuple[float, float, bool]]], files: int) -> None:
    shown = table(
        f"From a diverging call's arrival to its sandbox at a state of {files:,} files: ms",
        "", "runs", "median", "p95", "max", "target", "with the call", "warm forks used",
    )  # fmt: skip
    for way, runs in results.items():
        stood = sorted(run[0] for run in runs)
        shown.add_row(
            way, str(len(runs)), f"{median(stood):.2f}", f"{stood[int(0.95 * (len(stood) - 1))]:.2f}",
            f"{stood[-1]:.2f}",
            f"< {TARGETS_MS[way]:.0f}", f"{median([run[1] for run in runs]):.2f}", f"{sum(run[2] for run in runs)}",
        )  # fmt: skip
    console.print(shown)
    ratio = median([run[0] for run in results["restored"]]) / median([run[0] for run in results["warm"]])
    console.print(f"a warm fork is {ratio:.0f} times as quick as a restore")


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--pause", type=float, default=0.3, help="seconds that the model thinks before the diverging call"
    )
    parser.add_argument("--files", default="0,100,2500,10000,50000", help="files of the states")
    parser.add_argument("--data", type=Path, help="directory of the sandboxes; default: a temporary directory")
    options = parser.parse_args()
    for files in map(int, options.files.split(",")):
        with tempfile.TemporaryDirectory(dir=options.data, prefix="forkpoint-bench-") as folder:
            show(asyncio.run(measure(Path(folder), options.rounds, options.pause, files)), files)


if __name__ == "__main__":
    main()
