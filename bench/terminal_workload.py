"""Groups of rollouts of a terminal-like workload, with and without the cache: `python -m bench.terminal_workload`.

The shape is recorded, the tools are not: rollouts are resampled from the API traces (`bench.traces`: which calls follow
which, which of them change the state, how often a rollout does what no other did), eight to a task. Each call becomes a
shell command that sleeps 0.5 to 5 s, as a build, test or install would (log-uniform by a digest of the call, so that
equal calls take equally long); one in eight takes no time. A call that changes the state writes a build's output and
the state's name into files, any other reads the name. An agent thinks between its calls (exponential, the mean is an
option); the rollouts of a group run side by side.

Both passes send the same calls, with the same thinking, to one proxy: without the cache each rollout runs every call in
a sandbox of its own (`cache = "never"`). What a call takes is measured by the client, from sending it to its answer.
Answers are compared: the cache must give what running gave.
"""

import asyncio
import random
import shlex
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import httpx
import orjson

from bench.machine import console, median, table
from bench.traces import WORKLOADS, Move, Traces, hit_share, read_traces, resampled, share
from forkpoint.ephemeral_proxy import ephemeral_proxy

SIZE = 8
INSTANT_SHARE = 1 / 8
SETUP = ("mkdir -p /work", "echo start > /work/state")


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of a call: its duration, its source and its output."""

    seconds: float
    source: str
    output: str
    tool_s: float


def command_of(move: Move) -> str:
    """Return the shell command that simulates a recorded call."""
    digest = blake2b(move.call.encode(), digest_size=6).hexdigest()
    seconds = 0.0 if share("instant", move.call) < INSTANT_SHARE else move.seconds
    work = f"sleep {seconds:.2f}" if seconds else "true"
    if move.reads:
        return f"{work}; cat /work/state # {digest}"
    state = shlex.quote(blake2b(move.after.encode(), digest_size=6).hexdigest())
    return f"{work}; head -c 200000 /dev/zero > /work/built; echo {state} > /work/state; echo done # {digest}"


async def follow(
    client: httpx.AsyncClient, task: str, rollout: str, moves: Sequence[Move], thinks: Sequence[float]
) -> list[Answered]:
    """Make a rollout's calls, thinking before each."""
    answers = []
    for move, think_s in zip(moves, thinks, strict=True):
        await asyncio.sleep(think_s)
        began = time.perf_counter()
        response = await client.post(f"/t/{task}/r/{rollout}/shell/exec", json={"command": command_of(move)})
        seconds = time.perf_counter() - began
        response.raise_for_status()
        source = response.headers["cache-status"].removeprefix("forkpoint; ")
        answers.append(Answered(seconds, source, response.json()["stdout"], move.seconds))
    await client.delete(f"/api/v1/tasks/{task}/rollouts/{rollout}")
    return answers


async def group(
    url: str, task: str, rollouts: Sequence[Sequence[Move]], *, cached: bool, think_s: float, batch: int
) -> list[list[Answered]]:
    """Run a task's group concurrently."""
    spec = {"setup": list(SETUP), "cache": "always" if cached else "never"}
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        (await client.put(f"/api/v1/tasks/{task}", json=spec)).raise_for_status()
        if cached:
            (await client.post(f"/api/v1/tasks/{task}/warm", json={"count": 1})).raise_for_status()
        dice = random.Random(f"{task.partition('-')[2]}{batch}")  # noqa: S311 - dice of a benchmark
        thinks = [[dice.expovariate(1 / think_s) for _ in moves] for moves in rollouts]
        return await asyncio.gather(
            *(
                follow(client, task, f"b{batch}r{number}", moves, thinks[number])
                for number, moves in enumerate(rollouts)
            )
        )


@dataclass(frozen=True, slots=True)
class Passed:
    """The answers of a pass, by batch."""

    plain: list[Answered]
    cached: list[Answered]


async def measure(url: str, traces: Sequence[Traces], *, at_once: int, think_s: float) -> list[Passed]:
    """Run the groups of every task, some tasks concurrently, first without the cache and then with it."""
    passes = []
    for batch, groups in enumerate(traces):
        passed = Passed([], [])
        for names in (list(groups)[start : start + at_once] for start in range(0, len(groups), at_once)):
            both = []
            for cached in (False, True):
                prefix = "cached" if cached else f"plain{batch}"
                answers_of = await asyncio.gather(
                    *(
                        group(url, f"{prefix}-{name}", groups[name], cached=cached, think_s=think_s, batch=batch)
                        for name in names
                    )
                )
                both.append([answer for rollouts in answers_of for answers in rollouts for answer in answers])
            wrong = sum(plain.output != cached.output for plain, cached in zip(*both, strict=True))
            if wrong:
                raise RuntimeError(f"{wrong} answers differ with the cache and without it")
            passed.plain.extend(both[0])
            passed.cached.extend(both[1])
            console.print(f"batch {batch + 1}: {len(passed.plain)} calls", end="\r")
        passes.append(passed)
    return passes


def show(passes: Sequence[Passed]) -> None:
    """Print the seconds per call of each batch and of all batches together."""
    shown = table(
        f"Tool-call seconds of a terminal-like workload, groups of {SIZE}",
        "", "calls", "median", "p95", "mean", "hits", "shared", "median, with = 1",
    )  # fmt: skip
    every = Passed([a for p in passes for a in p.plain], [a for p in passes for a in p.cached])
    rows = [(f"batch {number}", passed) for number, passed in enumerate(passes, 1)]
    for name, passed in rows if len(rows) == 1 else [*rows, ("all", every)]:
        fast = median([answer.seconds for answer in passed.cached])
        for how, answers in (("without", passed.plain), ("with", passed.cached)):
            seconds = sorted(answer.seconds for answer in answers)
            sources = Counter(answer.source for answer in answers)
            shown.add_row(
                f"{name}, {how} the cache", str(len(seconds)), f"{median(seconds):.4f}",
                f"{seconds[int(0.95 * (len(seconds) - 1))]:.2f}", f"{sum(seconds) / len(seconds):.2f}",
                f"{sources['hit'] / len(seconds):.0%}", f"{sources['fwd=miss; collapsed'] / len(seconds):.0%}",
                f"{median(seconds) / fast:.1f}",
            )  # fmt: skip
    console.print(shown)


def workload(files: Sequence[Path], tasks: int, batches: int) -> list[Traces]:
    """Return batches of groups of the same tasks, spread over the files."""
    recorded = {f"{file.stem}.{task}": moves for file in files for task, moves in read_traces(file).items()}
    chosen = random.Random(1).sample(sorted(recorded), min(tasks, len(recorded)))  # noqa: S311
    picked = {f"{number}": recorded[name] for number, name in enumerate(chosen)}
    size = round(sum(map(len, picked.values())) / len(picked))
    console.print(
        f"{len(picked)} tasks. Calls that one by one would hit: {hit_share(picked):.0%} in the recorded groups of "
        f"{size}, {hit_share(resampled(picked, size=size, seed=0)):.0%} in resampled ones of {size}, "
        f"{hit_share(resampled(picked, size=SIZE, seed=0)):.0%} in resampled ones of {SIZE}"
    )
    return [resampled(picked, size=SIZE, seed=batch) for batch in range(batches)]


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=Path, default=WORKLOADS, help="directory of recorded API traces")
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--batches", type=int, default=1, help="number of groups of each task, one after another")
    parser.add_argument("--at-once", type=int, default=4, help="concurrent tasks")
    parser.add_argument("--think", type=float, default=3.0, help="mean seconds between calls")
    parser.add_argument("--json", type=Path, help="file for the seconds of every call")
    options = parser.parse_args()
    files = sorted(options.workloads.glob("api-*.jsonl"))
    if not files:
        parser.error(f"no api-*.jsonl in {options.workloads}: name a directory of recorded traces")
    traces = workload(files, options.tasks, options.batches)
    with ephemeral_proxy() as proxy:
        passes = asyncio.run(measure(proxy.url, traces, at_once=options.at_once, think_s=options.think))
        totals = httpx.get(f"{proxy.url}/api/v1/stats", trust_env=False).json()
    show(passes)
    console.print(
        f"warm forks: {totals['warm_made']} made, {totals['warm_used']} used; snapshots: {totals['snapshots_taken']}, "
        f"restores: {totals['restores']}; replayed: {totals['replayed_s']:.1f} s, "
        f"divergences: {totals['divergences']}; errors: {totals['errors']}"
    )
    if options.json is not None:
        seconds = [[[a.seconds, b.seconds, b.source] for a, b in zip(p.plain, p.cached, strict=True)] for p in passes]
        options.json.write_bytes(orjson.dumps(seconds))


if __name__ == "__main__":
    main()
