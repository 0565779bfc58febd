"""What a cluster costs on one machine: `python -m bench.cluster --cluster postgresql://…`, with an empty database.

1. A hit at a proxy of its own, at the owner of its task, and through another member. Measured in turn; ratios are
   medians over pairs.
2. A miss at a proxy of its own and at an owner, whose answer waits for the log.
3. The time from `kill -9` of an owner to the first answer of another member, for a rollout of that member.
4. With `--sandboxes`, which needs root: a call in a sandbox on another member, and its restore there.
5. With `--scale`: CPU of a call while one, two or four members are busy, each with a task of its own.
6. With `--log`: a row of the log, beside the time of an fsync.
"""

import os
import signal
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from bench.client import Server, measure, post
from bench.cluster_log import fsync_ms, show_log
from bench.machine import console, cpu_seconds, median, table
from forkpoint.ephemeral_proxy import EphemeralProxyError, ephemeral_proxy

CONNECTIONS = (1, 64)
TASK = "bench"
SECRET = "the secret of a benchmark"  # noqa: S105 - of processes that end with the benchmark
WRITE = "CREATE TABLE entry (value TEXT)"
BLOCK = 25
"""Misses of one way before the next one's turn."""
PACED = {"hit": ("SELECT 1", 75.0), "miss": ("INSERT INTO entry VALUES ('{}')", 10.0)}
"""Calls of the comparison of one, two and four busy members, and how many each of them gets in a second."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to an answer: the server that is asked, the processes that work for it, and the task."""

    name: str
    server: Server
    pids: tuple[int, ...]
    task: str = TASK


@dataclass(frozen=True, slots=True)
class Result:
    """A measurement. cpu_us: CPU time of all processes of the way for each request."""

    per_s: float
    p50_us: float
    cpu_us: float


@contextmanager
def members(dsn: str, folder: Path, count: int) -> Iterator[list[Server]]:
    """Run members of a cluster; those that were killed meanwhile are no error."""
    with ExitStack() as stack:
        started = []
        for number in range(count):
            settings = {
                "cluster": dsn, "cluster_secret": SECRET, "store": str(folder / "store"), "node": f"bench{number}",
                "drivers": ["sqlite"],
            }  # fmt: skip
            proxy = stack.enter_context(ephemeral_proxy(folder / f"data{number}", settings))
            started.append(Server(proxy.url, proxy.pid))
        yield started


def put(server: Server, source: Path, task: str = TASK) -> None:
    source.write_text(WRITE)
    spec = {"driver": "sqlite", "databases": {"main": {"source": str(source)}}}
    httpx.put(f"{server.url}/api/v1/tasks/{task}", json=spec, timeout=60).raise_for_status()


def call(server: Server, rollout: str, sql: str, task: str = TASK) -> httpx.Response:
    return httpx.post(f"{server.url}/t/{task}/r/{rollout}/sql/query", json={"sql": sql}, timeout=60).raise_for_status()


def hit(way: Way, connections: int, seconds: float) -> Result:
    """Measure a read-only call that the tree knows, each connection with a rollout of its own."""
    body = b'{"sql": "SELECT hex(zeroblob(900))"}'
    names = [f"{way.name.replace(' ', '-')}-{number}" for number in range(connections)]
    for name in names:
        call(way.server, name, "SELECT hex(zeroblob(900))", way.task)
    requests = [post(way.server, f"/t/{way.task}/r/{name}/sql/query", body) for name in names]
    before = sum(map(cpu_seconds, way.pids))
    measured = measure(way.server, requests, connections=connections, seconds=seconds)
    sent = measured.per_s * max(1, round(seconds))
    return Result(measured.per_s, measured.p50_us, (sum(map(cpu_seconds, way.pids)) - before) / sent * 1e6)


def miss(server: Server, rollout: str, number: int, task: str = TASK) -> float:
    """Return the milliseconds of one miss that changes the state."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.get("/healthz")
        began = time.perf_counter()
        sql = {"sql": f"INSERT INTO entry VALUES ('{rollout}-{number}')"}
        client.post(f"/t/{task}/r/{rollout}/sql/query", json=sql).raise_for_status()
        return (time.perf_counter() - began) * 1000


def show_hits(ways: Sequence[Way], rounds: int, seconds: float) -> None:
    for connections in CONNECTIONS:
        results: dict[str, list[Result]] = {way.name: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                results[way.name].append(hit(way, connections, seconds))
        shown = table(
            f"A hit, connections: {connections}", "", "req/s", "p50 µs", "CPU µs", "p50, own = 1", "CPU, own = 1"
        )
        own = results[ways[0].name]
        for name, measured in results.items():
            pairs = list(zip(measured, own, strict=True))
            shown.add_row(
                name,
                f"{median([each.per_s for each in measured]):,.0f}",
                f"{median([each.p50_us for each in measured]):,.0f}",
                f"{median([each.cpu_us for each in measured]):,.0f}",
                f"{median([each.p50_us / other.p50_us for each, other in pairs]):.2f}",
                f"{median([each.cpu_us / other.cpu_us for each, other in pairs]):.2f}",
            )
        console.print(shown)


def show_misses(ways: Sequence[Way], count: int) -> None:
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    spent = dict.fromkeys(times, 0.0)
    # In blocks: the kernel shows CPU time in steps of 10 ms, and the owner works for two of the ways.
    for first in range(0, count, BLOCK):
        for way in ways:
            before = sum(map(cpu_seconds, way.pids))
            for number in range(first, min(count, first + BLOCK)):
                times[way.name].append(miss(way.server, f"{way.name.replace(' ', '-')}-miss", number))
            spent[way.name] += sum(map(cpu_seconds, way.pids)) - before
    shown = table("A miss that changes the state, one after the other", "", "p50 ms", "p90 ms", "CPU ms")
    for way in ways:
        cpu_ms = spent[way.name] / count * 1000
        ordered = sorted(times[way.name])
        shown.add_row(way.name, f"{median(ordered):.2f}", f"{ordered[int(count * 0.9)]:.2f}", f"{cpu_ms:.2f}")
    console.print(shown)


def paced(way: Way, rollout: str, sql: str, per_s: float, seconds: float) -> int:
    """Make calls at a steady rate for a while; return how many. `{}` in the SQL is the number of the call."""
    began, number = time.perf_counter(), 0
    with httpx.Client(base_url=way.server.url, timeout=60) as client:
        while (now := time.perf_counter() - began) < seconds:
            time.sleep(max(0.0, number / per_s - now))
            path, body = f"/t/{way.task}/r/{rollout}/sql/query", {"sql": sql.replace("{}", str(number))}
            client.post(path, json=body).raise_for_status()
            number += 1
    return number


def show_scale(servers: Sequence[Server], source: Path, rounds: int, seconds: float) -> None:
    """Show what a call costs while one, two or four of the members are busy, and what a member costs that is not.

    The load is far below what the cores can do, and each busy member has the same. With longer pauses between its
    calls, a process finds less in the caches of its core, which has nothing to do with the number of members.
    """
    ways = [Way(f"member {number}", server, (server.pid,), f"own-{number}") for number, server in enumerate(servers)]
    for way in ways:
        put(way.server, source, way.task)
        for kind, (sql, _) in PACED.items():
            paced(way, f"first-{kind}", sql, 20, 1)
    counts = [1 << power for power in range(len(ways).bit_length())]
    measured: dict[tuple[str, int], list[float]] = {(kind, count): [] for kind in PACED for count in counts}
    idle: list[float] = []

    def spent(chosen: Sequence[Way]) -> float:
        return sum(cpu_seconds(pid) for way in chosen for pid in way.pids)

    with ThreadPoolExecutor(len(ways)) as threads:
        for number in range(rounds):
            before = spent(ways)
            time.sleep(seconds)
            idle.append((spent(ways) - before) / seconds / len(ways))
            for (kind, count), costs in measured.items():
                sql, per_s = PACED[kind]
                before = spent(ways[:count])
                work = partial(paced, rollout=f"{kind}-{number}-{count}", sql=sql, per_s=per_s, seconds=seconds)
                calls = sum(threads.map(work, ways[:count]))
                costs.append((spent(ways[:count]) - before) / calls * 1e6)
    shown = table("CPU of a call by the number of busy members", "", "hit µs", "miss µs", "hit, 1 = 1", "miss, 1 = 1")
    for count in counts:
        row = [f"{median(measured[kind, count]):,.0f}" for kind in PACED]
        ratios = [[a / b for a, b in zip(measured[kind, count], measured[kind, 1], strict=True)] for kind in PACED]
        shown.add_row(str(count), *row, *(f"{median(each):.2f}" for each in ratios))
    console.print(shown)
    console.print(f"A member without calls takes {median(idle) * 1000:.1f} ms of CPU a second.")


def takeover(owner: Server, other: Server) -> float:
    """Return the seconds from the kill of an owner to an answer of another member."""
    call(other, "of-the-other", "SELECT 1")
    os.kill(owner.pid, signal.SIGKILL)
    began = time.perf_counter()
    while httpx.post(
        f"{other.url}/t/{TASK}/r/of-the-other/sql/query", json={"sql": "SELECT 1"}, timeout=60
    ).status_code == 503:  # fmt: skip
        pass
    return time.perf_counter() - began


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cluster", required=True, help="URL of an empty PostgreSQL database")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each measurement")
    parser.add_argument("--misses", type=int, default=200)
    parser.add_argument("--scale", action="store_true", help="only one, two and four busy members")
    parser.add_argument("--log", action="store_true", help="only rows of the log")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forkpoint-bench-", dir="/var/tmp") as directory:
        folder = Path(directory)
        if options.log:
            show_log(options.cluster, SECRET.encode(), folder, options.rounds)
            return
        if options.scale:
            with members(options.cluster, folder, 4) as servers:
                show_scale(servers, folder / "source.sql", options.rounds, options.seconds)
            return
        with ephemeral_proxy(settings={"drivers": ["sqlite"]}) as alone:
            single = Server(alone.url, alone.pid)
            put(single, folder / "source.sql")
            try:
                with members(options.cluster, folder, 2) as (owner, other):
                    put(owner, folder / "source.sql")
                    own = Way("proxy of its own", single, (single.pid,))
                    direct = Way("owner", owner, (owner.pid,))
                    through = Way("through another", other, (owner.pid, other.pid))
                    show_hits([own, direct, through], options.rounds, options.seconds)
                    show_misses([own, direct, through], options.misses)
                    console.print(f"An fsync of 8 kB on this disk takes {fsync_ms(folder):.2f} ms.")
                    console.print(f"\nTakeover after kill -9 of the owner: {takeover(owner, other):.2f} s")
            except EphemeralProxyError as error:
                console.print(str(error))


if __name__ == "__main__":
    main()
