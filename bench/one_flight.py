"""200 concurrent rollouts of a task with the same 20 calls: `python -m bench.one_flight`.

Every other call prints a random number and does not change the state; the other calls write files. If each distinct
call runs once, all rollouts see the same random numbers, and the proxy counts 20 misses. Exits with 1 otherwise.
"""

import asyncio
import sys
from argparse import ArgumentParser
from collections import Counter
from contextlib import nullcontext

from bench.machine import console, table
from proxy.cli.replay.report import ReplayRun, errors_of, figures
from proxy.cli.replay.runner import ReplayNames, replay
from proxy.cli.replay.show import proxy_at
from proxy.cli.replay.workload import RecordedRollout, RecordedTask, Workload, WorkloadRequest
from sandboxes.spec import EnvironmentSpec

RANDOM = "cat /proc/sys/kernel/random/uuid"


def commands(count: int) -> list[str]:
    """Return `count` calls, alternately a call that changes files and a call with a random answer."""
    return [
        f"echo {number} > /tmp/step-{number}" if number % 2 == 0 else f"{RANDOM} # {number}" for number in range(count)
    ]


def workload(rollouts: int, calls: int) -> Workload:
    requests = tuple(
        WorkloadRequest(index, "shell/exec", {"command": command}, command)
        for index, command in enumerate(commands(calls))
    )
    together = tuple(RecordedRollout(f"r{number}", requests) for number in range(rollouts))
    return Workload((RecordedTask("one-flight", EnvironmentSpec(), together),))


def executions(run: ReplayRun) -> Counter[int]:
    """Return for each call how many rollouts report that it was executed for them."""
    return Counter(call.index for call, outcome in run.outcomes.items() if outcome.outcome == "miss")


def answers(run: ReplayRun) -> dict[int, int]:
    """Return for each call the number of different answers."""
    seen: dict[int, set[str]] = {}
    for call, outcome in run.outcomes.items():
        if outcome.answer is not None:
            seen.setdefault(call.index, set()).add(outcome.answer.stdout)
    return {index: len(different) for index, different in seen.items()}


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--url", help="a running proxy; default: a private one")
    options = parser.parse_args()
    work = workload(options.rollouts, options.calls)
    names = ReplayNames("", "") if options.url is None else ReplayNames(f"-{id(work):x}", "")
    with proxy_at(options.url) if options.url is None else nullcontext(options.url) as proxy:
        url = proxy if isinstance(proxy, str) else proxy.url
        run = asyncio.run(
            replay(
                url, work, cached=True, names=names, at_once=options.rollouts, on_call=lambda _: None, trust_env=False
            )
        )
    totals, ran, different = figures(run), executions(run), answers(run)
    shown = table("One execution of each distinct call", "", "")
    for name, value in {
        "rollouts x calls": f"{options.rollouts} x {options.calls}",
        "executed, as reported to clients": f"{sum(ran.values())}",
        "executed, as the proxy counts": f"{run.spent['misses']:.0f}",
        "most executions of one call": f"{max(ran.values(), default=0)}",
        "most different answers to one call": f"{max(different.values(), default=0)}",
        "waits / hits": f"{totals['waits']:.0f} / {totals['hits']:.0f}",
        "whole run, s": f"{totals['wall_s']:.2f}",
        "errors": f"{totals['errors']:.0f}",
    }.items():
        shown.add_row(name, value)
    console.print(shown)
    for line in errors_of(run)[:10]:
        console.print(line, markup=False)
    once = set(ran.values()) == {1} and len(ran) == options.calls and run.spent["misses"] == options.calls
    same = set(different.values()) == {1} and len(different) == options.calls
    if not (once and same and not totals["errors"]):
        sys.exit("Some call did not run exactly once, or not every rollout was answered.")


if __name__ == "__main__":
    main()
