"""Latency at a rate: `python -m bench.workloads.open_loop WORKLOAD.jsonl --rate 64 --rate 128`.

Offers a proxy a fixed number of requests a second, and measures how late their responses are.

A closed loop sends the next call when the last one was answered, so a slow proxy gets fewer calls and looks better
than it is. Here requests are due at fixed times. A request that cannot be sent when it is due counts from then on.

Each request is the next call of a rollout that waits for none; if there is no such rollout, another one begins. The
rollouts are those of the workload, over and over, under new names. One cached run goes first, so nearly all of them
are hits. If `answered/s` stays below the rate, either the proxy or this client is at its limit.
"""

import asyncio
import contextlib
import secrets
import time
from argparse import ArgumentParser
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx

from bench.machine import console, table
from forkpoint.client import OVERHEAD_S
from proxy.cli.replay.report import percentile
from proxy.cli.replay.runner import ReplayNames, call, connector, replay
from proxy.cli.replay.show import proxy_at
from proxy.cli.replay.workload import RecordedRollout, RecordedTask, Workload, WorkloadRequest, read_workload, safe_name


@dataclass(frozen=True, slots=True)
class RateFigures:
    """What one rate showed.

    Attributes:
        offered: Requests that were due a second.
        answered: Requests that were answered a second, until the last answer.
        p50_ms, p95_ms, p99_ms: Percentiles of the time from when a request was due to its response.
        hit_rate: Share of answers that no tool ran for, from 0 to 1.
        errors: Requests without an answer.
    """

    offered: float
    answered: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    hit_rate: float
    errors: int


@dataclass(slots=True)
class _OpenLoopRollout:
    """A rollout that is between two calls.

    Attributes:
        base: Path of the rollout below the proxy.
        control: Path of the rollout in the control plane.
        remaining: Its calls.
    """

    base: str
    control: str
    remaining: Iterator[WorkloadRequest]


@dataclass(slots=True)
class _Run:
    """One rate in progress: clients and rollouts that wait for nothing, rollouts that began, and the answers."""

    clients: deque[httpx.AsyncClient] = field(default_factory=deque)
    ready: deque[_OpenLoopRollout] = field(default_factory=deque)
    begun: list[_OpenLoopRollout] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    hits: int = 0
    errors: int = 0


async def offer(
    connect: Callable[[], httpx.AsyncClient], workload: Workload, names: ReplayNames, *, rate: float, during_s: float
) -> RateFigures:
    """Offer requests at one rate, and return the figures.

    Args:
        connect: Makes a client of the proxy; each request in flight has one of its own.
        workload: The recorded calls; its tasks were put.
        names: Names of the tasks; rollouts get a number beyond their suffix.
        rate: Requests a second.
        during_s: For how long requests are due, in seconds.
    """
    run = _Run()
    async with AsyncExitStack() as stack:
        fresh, began = _walkers(workload, names, rate), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(round(rate * during_s)):
                due = began + number / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                walker, request = _next(run, fresh)
                client = run.clients.pop() if run.clients else await stack.enter_async_context(connect())
                group.create_task(_send(run, client, walker, request, due))
        whole_s = time.perf_counter() - began
        await _finish(run, await stack.enter_async_context(connect()))
    ascending = sorted(run.seconds)
    p50, p95, p99 = (percentile(ascending, share) * 1e3 for share in (0.5, 0.95, 0.99))
    answers = len(ascending)
    return RateFigures(
        rate, answers / whole_s if whole_s else 0.0, p50, p95, p99, run.hits / answers if answers else 0.0, run.errors
    )


def _walkers(workload: Workload, names: ReplayNames, rate: float) -> Iterator[_OpenLoopRollout]:
    for number in count():
        for task in workload.tasks:
            for rollout in task.rollouts:
                if rollout.requests:
                    yield _walker(task, rollout, names, f"{names.rollout_suffix}-{rate:g}-{number}")


def _walker(task: RecordedTask, rollout: RecordedRollout, names: ReplayNames, suffix: str) -> _OpenLoopRollout:
    at = names.task(task), safe_name(rollout.name, suffix)
    return _OpenLoopRollout(
        "/t/{}/r/{}/".format(*at), "/api/v1/tasks/{}/rollouts/{}".format(*at), iter(rollout.requests)
    )


def _next(run: _Run, fresh: Iterator[_OpenLoopRollout]) -> tuple[_OpenLoopRollout, WorkloadRequest]:
    while run.ready:
        walker = run.ready.popleft()
        request = next(walker.remaining, None)
        if request is not None:
            return walker, request
    walker = next(fresh)
    run.begun.append(walker)
    return walker, next(walker.remaining)


async def _send(
    run: _Run, client: httpx.AsyncClient, walker: _OpenLoopRollout, request: WorkloadRequest, due: float
) -> None:
    try:
        outcome = await call(client, walker.base, request, patience_s=OVERHEAD_S)
    except httpx.TransportError:
        run.errors += 1
        await client.aclose()
        return
    if outcome.answer is None:
        run.errors += 1
    else:
        run.seconds.append(time.perf_counter() - due)
        run.hits += outcome.outcome in {"hit", "wait"}
    run.clients.append(client)
    run.ready.append(walker)


async def _finish(run: _Run, client: httpx.AsyncClient) -> None:
    """Finish the rollouts, so that their sandboxes are free for the next rate. A failure changes no figure."""
    for walker in run.begun:
        with contextlib.suppress(httpx.TransportError):
            await client.delete(walker.control)


async def measure(url: str, workload: Workload, rates: Sequence[float], during_s: float) -> list[RateFigures]:
    """Make a cached run, then offer each rate."""
    suffix = f"-{secrets.token_hex(3)}"
    names, trust_env = ReplayNames(suffix, suffix), False
    await replay(url, workload, cached=True, names=names, at_once=8, on_call=lambda _: None, trust_env=trust_env)
    connect = connector(url, trust_env=trust_env)
    return [await offer(connect, workload, names, rate=rate, during_s=during_s) for rate in rates]


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", type=Path, nargs="+", help="JSONL files, as `forkpoint replay` reads them")
    parser.add_argument("--url", help="a running proxy; default: a private one")
    parser.add_argument("--rate", type=float, action="append", required=True, help="requests a second; repeatable")
    parser.add_argument("--rate-s", type=float, default=10.0, help="seconds for which each rate is offered")
    options = parser.parse_args()
    workload = read_workload(options.workload)
    with proxy_at(options.url) as proxy:
        url = proxy if isinstance(proxy, str) else proxy.url
        figures = asyncio.run(measure(url, workload, options.rate, options.rate_s))
    shown = table(
        "Latency at a rate", "requests/s due", "answered/s", "p50 ms", "p95 ms", "p99 ms", "hit rate", "errors"
    )
    for each in figures:
        numbers = (f"{value:,.2f}" for value in (each.p50_ms, each.p95_ms, each.p99_ms))
        shown.add_row(f"{each.offered:g}", f"{each.answered:,.1f}", *numbers, f"{each.hit_rate:.1%}", str(each.errors))
    console.print(shown)


if __name__ == "__main__":
    main()
