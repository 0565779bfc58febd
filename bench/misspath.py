"""What a miss costs, beside other ways to run a command: `python -m bench.misspath`.

One run prints these tables. All contenders of a table take turns in it, so that other load affects all of them.

1. A call that changes files and one that only reads: CPU time of all processes, calls a second, latency. Each runs an
   external program. Forkpoint's calls are all new to the tree. The proxy's loop thread is shown by itself. Its
   sandboxes are of this machine's own system, and of an image.
2. Latency of a file call with many rollouts that think between their calls.
3. Latency of hits alone and beside rollouts that miss. The client that makes the hits has a high priority, so that
   the proxy's delay is measured and not the client's.
4. Latency of a call that leaves the tree without a pause, by the depth at which it does. The next rollout leaves
   `--between` seconds later.
5. Start, freeze and restore of a sandbox (`bench.sandboxes`).

CPU time needs a writable `cpuacct` control group (cgroup version 1). Elsewhere it is the whole machine's.
"""

import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench import sandboxes
from bench.client import Server, post
from bench.machine import console, median, table
from bench.shells import CpuGroup, alternatives
from proxy.priority import raise_session
from tests.machine import Proxy, data_directory
from tests.sandboxes.image_archives import bash_image

CORES = os.cpu_count() or 1
KINDS = {"file call": "wc -c /etc/passwd >> /tmp/{name} # {tag}", "read-only call": "wc -c /etc/passwd # {tag}"}
EVERYTHING = "calls,think,hits,depths,sandboxes"
ON_IMAGE = "Forkpoint, an image"
PAUSE_S = 0.002
"""Pause between two hits of a client."""


@dataclass(frozen=True, slots=True)
class Response:
    """The answer to a call. restore_ms: what the proxy reports about its way to a sandbox in the right state."""

    hit: bool
    seconds: float
    restore_ms: float
    body: bytes


class Client:
    """A connection that makes the calls of one rollout."""

    def __init__(self, server: Server, rollout: str, task: str = "misspath") -> None:
        self._server, self._path = server, f"/t/{task}/r/{rollout}/shell/exec"
        self._socket = socket.create_connection(server.address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, command: str) -> Response:
        """Make a call.

        Raises:
            RuntimeError: The status was not 200, or the command failed.
        """
        request = post(self._server, self._path, json.dumps({"command": command}).encode())
        began = time.perf_counter()
        self._socket.sendall(request)
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._receive()
        head = data[:end].lower()
        size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        while len(data) < end + 4 + size:
            data += self._receive()
        took = time.perf_counter() - began
        body = data[end + 4 :]
        if not head.startswith(b"http/1.1 200") or b'"exit_code":0' not in body.replace(b" ", b""):
            raise RuntimeError(f"{command!r}: {data[:500]!r}")
        waited = re.findall(rb"(?:restore|replay);dur=([0-9.]+)", head)
        return Response(b"forkpoint; hit" in head, took, sum(map(float, waited)), body)

    def _receive(self) -> bytes:
        part = self._socket.recv(1 << 16)
        if not part:
            raise RuntimeError("the proxy closed the connection")
        return part

    def close(self) -> None:
        self._socket.close()


@contextmanager
def served(cpu: CpuGroup, **options: str) -> Iterator[tuple[Server, Proxy]]:
    """Run a proxy in a control group and stop it in order."""
    with data_directory() as folder:
        proxy = Proxy(folder, options, wrapper=cpu.wrapper)
        proxy.start()
        assert proxy.process is not None
        try:
            yield Server(proxy.url, proxy.process.pid), proxy
        finally:
            proxy.stop()


def loop_seconds(pid: int) -> float:
    """Return the CPU time of a process's first thread, which has the event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


@dataclass
class Contender:
    """A way to run commands, and what was measured of it, by kind of call. Lists have one entry for each turn."""

    name: str
    cpu: CpuGroup
    run: Callable[[int, str], object]
    cpu_ms: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    loop_ms: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    per_s: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    latencies_s: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def turn(self, kind: str, number: int, *, sessions: int, calls: int, proxy: int) -> None:
        """Make new calls in all sessions at once, and note what they took."""

        def session(own: int) -> list[float]:
            latencies = []
            for call in range(calls):
                command = KINDS[kind].format(name=f"bench-{own}", tag=f"{own} {number} {call}")
                began = time.perf_counter()
                self.run(own, command)
                latencies.append(time.perf_counter() - began)
            return latencies

        cpu_s, loop_s = self.cpu.seconds(), loop_seconds(proxy)
        latencies, took_s = at_once(session, sessions)
        self.cpu_ms[kind].append((self.cpu.seconds() - cpu_s) / len(latencies) * 1e3)
        self.loop_ms[kind].append((loop_seconds(proxy) - loop_s) / len(latencies) * 1e3)
        self.per_s[kind].append(len(latencies) / took_s)
        self.latencies_s[kind] += latencies


def at_once(work: Callable[[int], list[float]], count: int) -> tuple[list[float], float]:
    """Run work(number) in as many threads; return all results and the seconds that they took together."""
    with ThreadPoolExecutor(count) as threads:
        began = time.perf_counter()
        results = [result for results in threads.map(work, range(count)) for result in results]
        return results, time.perf_counter() - began


def measure_calls(options: Namespace) -> None:
    """Print table 1."""
    count = options.concurrency
    with ExitStack() as stack:
        ways = stack.enter_context(alternatives(count, options.beside.split(",")))
        cpu = CpuGroup("proxy")
        stack.callback(cpu.close)
        server, proxy = stack.enter_context(served(cpu))
        clients = [Client(server, f"calls-{number}") for number in range(count)]
        contenders = [Contender("Forkpoint", cpu, lambda number, command: clients[number].run(command))]
        if "image" in options.bases.split(","):
            put_task(proxy, "image", spec_of("image"))
            inside = [Client(server, f"inside-{number}", "image") for number in range(count)]
            contenders.append(Contender(ON_IMAGE, cpu, lambda number, command: inside[number].run(command)))
            clients += inside
        contenders += [Contender(way.name, way.cpu, way.run) for way in ways]
        for contender in contenders:
            for number in range(count):
                # The first call of each session starts its sandbox, which is not measured here.
                contender.run(number, "true")
        for turn in range(options.rounds):
            for kind in KINDS:
                for contender in contenders:
                    contender.turn(kind, turn, sessions=count, calls=options.calls, proxy=server.pid)
        for client in clients:
            client.close()
    for kind in KINDS:
        show_calls(kind, contenders, count)


def show_calls(kind: str, contenders: Sequence[Contender], count: int) -> None:
    ours = contenders[0]
    group = "" if ours.cpu.exact else ", CPU of the whole machine"
    columns = ("", "CPU ms", "loop ms", "calls/s", "p50 ms", "p99 ms", "CPU, ours = 1", "rate")
    shown = table(f"1. A {kind}, {count} sessions at once, medians of {len(ours.per_s[kind])} turns{group}", *columns)
    for contender in contenders:
        cpu = [other / own for other, own in zip(contender.cpu_ms[kind], ours.cpu_ms[kind], strict=True)]
        rate = [other / own for other, own in zip(contender.per_s[kind], ours.per_s[kind], strict=True)]
        latencies = contender.latencies_s[kind]
        shown.add_row(
            contender.name, f"{median(contender.cpu_ms[kind]):.2f}",
            f"{median(contender.loop_ms[kind]):.2f}" if contender is ours else "-",
            f"{median(contender.per_s[kind]):,.0f}", f"{median(latencies) * 1e3:.1f}", f"{p99(latencies):.1f}",
            f"{median(cpu):.2f}", f"{median(rate):.2f}",
        )  # fmt: skip
    console.print(shown)


def spec_of(base: str) -> dict[str, str]:
    """Return the environment of sandboxes of the host's system, or of an image of its programs."""
    return {"image": bash_image()} if base == "image" else {"base": base}


def put_task(proxy: Proxy, name: str, spec: dict[str, str]) -> None:
    httpx.put(f"{proxy.url}/api/v1/tasks/{name}", json=spec, timeout=60).raise_for_status()


def p99(seconds: Sequence[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))] * 1e3


def measure_think(options: Namespace) -> None:
    """Print table 2."""
    first: list[float] = []
    cpu = CpuGroup("think")
    with served(cpu, max_sandboxes=str(options.rollouts + 16)) as (server, _):

        def work(number: int) -> list[float]:
            dice = random.Random(number)  # noqa: S311 - think times
            client = Client(server, f"think-{number}")
            latencies = []
            for call in range(options.think_calls + 1):
                time.sleep(dice.uniform(0.5, 1.5) * options.think)
                latencies.append(
                    client.run(KINDS["file call"].format(name=f"think-{number}", tag=f"{number} {call}")).seconds
                )
            client.close()
            first.append(latencies[0])
            return latencies[1:]

        latencies, _ = at_once(work, options.rollouts)
    cpu.close()
    shown = table(f"2. A file call, {options.rollouts} rollouts that think {options.think:g} s", "", "p50 ms", "p99 ms")
    shown.add_row("first call of a rollout", f"{median(first) * 1e3:.1f}", f"{p99(first):.1f}")
    shown.add_row("later calls", f"{median(latencies) * 1e3:.1f}", f"{p99(latencies):.1f}")
    console.print(shown)


def hits_client(url: str, seconds: float) -> None:
    """Make hits for a while with a pause between them, and print their latencies. Runs in a session of its own."""
    raise_session()
    with suppress(OSError):
        os.nice(-10)
    client = Client(Server(url, 0), "hits")
    deadline = time.monotonic() + seconds
    latencies = []
    while time.monotonic() < deadline:
        response = client.run("echo a hit")
        if response.hit:
            latencies.append(response.seconds)
        time.sleep(PAUSE_S)
    json.dump(latencies, sys.stdout)


def measure_hits(options: Namespace) -> None:
    """Print table 3."""
    results: dict[str, list[float]] = {}
    rates: list[float] = []
    cpu = CpuGroup("hits")
    with served(cpu) as (server, _):
        client = Client(server, "hits")
        client.run("echo a hit")
        client.close()
        missing = [Client(server, f"beside-{number}") for number in range(options.missing)]
        at_once(lambda number: [missing[number].run("true").seconds], options.missing)
        command = [sys.executable, "-m", "bench.misspath", "--hits-of", server.url, "--seconds", str(options.seconds)]
        for turn in range(options.rounds):
            for name in ("alone", f"beside {options.missing} missing rollouts"):
                stop = threading.Event()

                def work(number: int, stop: threading.Event = stop, turn: int = turn) -> list[float]:
                    latencies: list[float] = []
                    while not stop.is_set():
                        tag = f"{number} {turn} {len(latencies)}"
                        latencies.append(
                            missing[number].run(KINDS["file call"].format(name=f"b-{number}", tag=tag)).seconds
                        )
                    return latencies

                with ThreadPoolExecutor(max(1, options.missing)) as threads:
                    works = [] if name == "alone" else [threads.submit(work, n) for n in range(options.missing)]
                    began = time.perf_counter()
                    try:
                        run = subprocess.run(
                            command, capture_output=True, text=True, check=True, start_new_session=True
                        )
                    finally:
                        stop.set()
                    calls = sum(len(done.result()) for done in works)
                    if works:
                        rates.append(calls / (time.perf_counter() - began))
                results.setdefault(name, []).extend(json.loads(run.stdout))
        for client in missing:
            client.close()
    cpu.close()
    title = f"3. Hits with {PAUSE_S * 1e3:g} ms between them; beside them {median(rates):,.0f} misses/s"
    shown = table(title, "", "hits", "p50 ms", "p99 ms", "over 5 ms")
    for name, latencies in results.items():
        late = sum(latency > 0.005 for latency in latencies) / len(latencies)
        shown.add_row(
            name, f"{len(latencies):,}", f"{median(latencies) * 1e3:.2f}", f"{p99(latencies):.2f}", f"{late:.1%}"
        )
    console.print(shown)


def measure_depths(options: Namespace) -> None:
    """Print table 4."""
    depths = [int(depth) for depth in options.depths.split(",")]
    shown = table(
        f"4. A call that leaves the tree without a pause, {options.between} s between two of them",
        "base",
        "depth",
        "runs",
        "p50 ms",
        "max ms",
        "to the state, p50 ms",
    )
    for base in options.bases.split(","):
        with closing(CpuGroup(f"depths-{base}")) as cpu, served(cpu) as (server, proxy):
            put_task(proxy, "depths", spec_of(base))
            length = max(depths) + options.divergences
            path = [f"echo {step} >> /tmp/path" for step in range(length)]
            client = Client(server, "first", "depths")
            for command in path:
                client.run(command)
            client.close()
            for depth in depths:
                took: list[float] = []
                restored: list[float] = []
                for number in range(depth, depth + options.divergences):
                    client = Client(server, f"r{depth}-{number}", "depths")
                    hits = [client.run(command).hit for command in path[:number]]
                    response = client.run(f"echo own {number} >> /tmp/path; wc -l < /tmp/path # {depth}")
                    client.close()
                    if not all(hits) or response.hit or f'"{number + 1}\\n"'.encode() not in response.body:
                        raise RuntimeError(f"a rollout left the tree at depth {number} at a wrong state: {response}")
                    took.append(response.seconds * 1e3)
                    restored.append(response.restore_ms)
                    httpx.delete(f"{proxy.url}/api/v1/tasks/depths/rollouts/r{depth}-{number}", timeout=60)
                    time.sleep(options.between)
                shown.add_row(
                    base,
                    f"{depth:,}",
                    f"{len(took)}",
                    f"{median(took):.1f}",
                    f"{max(took):.1f}",
                    f"{median(restored):.1f}",
                )
    console.print(shown)


def measure_sandboxes(options: Namespace) -> None:
    """Print table 5."""
    with tempfile.TemporaryDirectory(prefix="forkpoint-bench-", dir="/var/tmp") as folder:
        timings = asyncio.run(sandboxes.local(Path(folder), options.count))
    shown = table("5. A sandbox of the local driver: ms", "", "median", "p95")
    for what, values in timings.items():
        shown.add_row(what, f"{median(values):.2f}", f"{sorted(values)[int(0.95 * (len(values) - 1))]:.2f}")
    console.print(shown)


MEASUREMENTS = {
    "calls": measure_calls, "think": measure_think, "hits": measure_hits, "depths": measure_depths,
    "sandboxes": measure_sandboxes,
}  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=EVERYTHING, help=f"tables to print, of {EVERYTHING}")
    parser.add_argument("--beside", default="pipe,bwrap,docker,swerex", help="ways to compare with in table 1")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--concurrency", type=int, default=2 * CORES, help="sessions at once in table 1")
    parser.add_argument("--calls", type=int, default=40, help="calls of each session in each turn")
    parser.add_argument("--rollouts", type=int, default=64, help="rollouts in table 2")
    parser.add_argument("--think", type=float, default=1.0, help="mean seconds between two calls of a rollout")
    parser.add_argument("--think-calls", type=int, default=15, help="calls of each rollout in table 2, after the first")
    parser.add_argument("--missing", type=int, default=16, help="rollouts that miss in table 3")
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of each turn in table 3")
    parser.add_argument("--depths", default="1,10,100,1000")
    parser.add_argument("--between", type=float, default=0.0, help="seconds between two calls of table 4")
    parser.add_argument("--bases", default="host,image", help="what the sandboxes of tables 1 and 4 show")
    parser.add_argument("--divergences", type=int, default=10, help="divergences at each depth")
    parser.add_argument("--count", type=int, default=20, help="sandboxes of table 5")
    parser.add_argument("--hits-of", help="used by the benchmark itself: only make hits on this proxy")
    options = parser.parse_args(words)
    if options.hits_of:
        hits_client(options.hits_of, options.seconds)
        return
    for name in options.only.split(","):
        MEASUREMENTS[name](options)


if __name__ == "__main__":
    main()
