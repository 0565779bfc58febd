"""One worker beside two, on the same machine in the same run: `python -m bench.workers`.

All proxies run at once and are measured in turn, so that other load affects all of them. CPU time is that of the
proxy's processes without its sandboxes. The clients run on the same cores, so on two cores the rate cannot double; CPU
time per call says what a worker more costs.

1. Hits of two tasks, on connections of one task each.
2. Misses of the same tasks: calls that change a file, all new to the tree.
"""

import os
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

import httpx

from bench.client import Server, measure, post, walk
from bench.hotpath import READ_ONLY
from bench.machine import console, cpu_seconds, median, table
from forkpoint.ephemeral_proxy import ephemeral_proxy
from proxy.shares import Share

CONNECTIONS, CLIENTS = 16, 4
"""For each task: connections with hits, and clients with misses."""
TASKS = tuple(next(f"task-{n}" for n in count() if Share(worker, 2).has(f"task-{n}")) for worker in range(2))
"""One task of each of two workers."""


def processes(pid: int) -> list[int]:
    """Return the proxy's processes: the workers and their parent, or the only one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    # Workers are forks of their parent, and sandboxes' processes are other programs.
    own = Path(f"/proc/{pid}/cmdline").read_bytes()
    return [pid, *(int(child) for child in children if Path(f"/proc/{child}/cmdline").read_bytes() == own)]


def cpu_us(server: Server, work: Callable[[], float]) -> tuple[float, float]:
    """Return what some work returns, calls a second, and the proxy's CPU time of a call."""
    pids, began = processes(server.pid), time.perf_counter()
    before = sum(map(cpu_seconds, pids))
    per_s = work()
    seconds = time.perf_counter() - began
    return per_s, (sum(map(cpu_seconds, pids)) - before) / (per_s * seconds) * 1e6


def read(server: Server, task: str, number: int) -> bytes:
    return post(server, f"/t/{task}/r/{number}/shell/exec", b'{"command": "%b"}' % READ_ONLY.encode())


def hits(server: Server, groups: Sequence[Sequence[bytes]], seconds: float) -> float:
    """Return hits a second, of a client for each group of requests."""
    connections = CONNECTIONS * len(TASKS) // len(groups)
    with ThreadPoolExecutor(len(groups)) as pool:
        runs = [pool.submit(measure, server, group, connections=connections, seconds=seconds) for group in groups]
        return sum(run.result().per_s for run in runs)


def misses(server: Server, mark: str, seconds: float) -> float:
    """Return misses a second."""
    until = time.perf_counter() + seconds

    def client(task: str, number: int) -> int:
        done = 0
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
            while time.perf_counter() < until:
                body = {"command": f"echo {mark}.{number}.{done} >> log"}
                http.post(f"/t/{task}/r/m{number}/shell/exec", json=body).raise_for_status()
                done += 1
        return done

    with ThreadPoolExecutor(CLIENTS * len(TASKS)) as pool:
        runs = [pool.submit(client, task, number) for task in TASKS for number in range(CLIENTS)]
        return sum(run.result() for run in runs) / seconds


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each measurement")
    options = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        servers = {}
        for number in (1, 2):
            proxy = stack.enter_context(ephemeral_proxy(settings={"workers": number}))
            servers[f"{number} worker{'s' if number > 1 else ''}"] = server = Server(proxy.url, proxy.pid)
            for task in TASKS:
                walk(server, [read(server, task, each) for each in range(CONNECTIONS)])
        for round_ in range(options.rounds):
            for name, server in servers.items():
                groups = [[read(server, task, each) for each in range(CONNECTIONS)] for task in TASKS]
                works = {
                    "hits": partial(hits, server, groups, options.seconds),
                    "misses": partial(misses, server, str(round_), options.seconds),
                }
                for what, work in works.items():
                    found.setdefault((what, name), []).append(cpu_us(server, work))
    shown = table(
        f"One worker beside two, on {os.cpu_count()} cores", "", "", "calls/s", "CPU us a call", "CPU, 1 worker = 1"
    )
    for (what, name), results in found.items():
        base = found[what, "1 worker"]
        ratio = median([own[1] / other[1] for own, other in zip(results, base, strict=True)])
        per_s, cpu = median([result[0] for result in results]), median([result[1] for result in results])
        shown.add_row(what, name, f"{per_s:,.0f}", f"{cpu:,.0f}", f"{ratio:.2f}")
    console.print(shown)


if __name__ == "__main__":
    main()
