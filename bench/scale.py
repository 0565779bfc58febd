"""How a proxy with default settings does as its use grows: `python -m bench.scale`. It looks for bends of the curves.

- **live**: rollouts make a call that changes a file, then think, as agents do. More and more of them live at once.
- **room**: the same number of rollouts, with room for all, for half and for a quarter of them (`max_sandboxes`).
- **burst**: rollouts that begin at the same moment. Each makes the same first call, and then one of its own.
- **states**: rollouts that write 200 kB with each call and do not think, with a budget for few of their states. Then
  each of them is followed half its way by another, which leaves it there and reads what it was told of.
- **steady**: groups of rollouts that begin, make 25 calls and end, for a long time, with small budgets for states and
  trees. What the proxy takes is printed each minute; only the history of rollouts and records may grow.

Each row has a proxy and a data directory of its own. `--quick` runs small sizes.
"""

import asyncio
import json
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.client import Server, post
from bench.machine import console, median, table
from bench.shells import CpuGroup
from tests.machine import Proxy, data_directory

GROUP = 8
"""Rollouts of one task."""
PATIENCE_S = 300.0


@dataclass
class Tally:
    """What a row has seen: milliseconds of each answered call, and answers other than 200 by their status."""

    ms: list[float] = field(default_factory=list)
    refused: dict[int, int] = field(default_factory=dict)

    def note(self, status: int, begun: float) -> None:
        """Count an answer to a call that began at this time of the performance counter."""
        if status == httpx.codes.OK:
            self.ms.append((time.perf_counter() - begun) * 1e3)
        else:
            self.refused[status] = self.refused.get(status, 0) + 1

    def percentile(self, share: float) -> float:
        return sorted(self.ms)[int(share * (len(self.ms) - 1))] if self.ms else float("nan")


@contextmanager
def measured(options: Namespace, **settings: str) -> Iterator[tuple[Proxy, CpuGroup]]:
    """Run a proxy whose CPU time is counted."""
    cpu = CpuGroup("scale")
    with data_directory(options.data) as folder:
        folder.chmod(0o711)
        proxy = Proxy(folder, settings, wrapper=cpu.wrapper)
        proxy.start()
        try:
            yield proxy, cpu
        finally:
            proxy.stop()
            cpu.close()


async def call(client: httpx.AsyncClient, number: int, command: str, tally: Tally) -> None:
    """Make a call of a rollout."""
    begun = time.perf_counter()
    answer = await client.post(_path(number), json={"command": command})
    tally.note(answer.status_code, begun)


def _path(number: int) -> str:
    return f"/t/scale-{number // GROUP}/r/{number}/shell/exec"


async def think_and_call(proxy: Proxy, rollouts: int, options: Namespace, cpu: CpuGroup) -> tuple[Tally, float]:
    """Let rollouts begin one after another, then call and think; return the calls, and the CPU seconds of all."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=proxy.url, timeout=PATIENCE_S, limits=limits, trust_env=False) as client:
        first, tally, spent = Tally(), Tally(), 0.0
        every = options.think / rollouts
        begun = time.monotonic()

        async def live(number: int) -> None:
            await asyncio.sleep(number * every)
            await call(client, number, f"echo {number} > own", first)
            for turn in range(options.turns):
                # Evenly over the time of thinking, so that the load is the same at each moment.
                due = begun + (turn + 1) * options.think + number * every
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await call(client, number, f"echo {turn} >> own; wc -l < own", tally)

        async def watch() -> float:
            await asyncio.sleep(options.think)
            return cpu.seconds()

        watched = asyncio.create_task(watch())
        await asyncio.gather(*(live(number) for number in range(rollouts)))
        spent = cpu.seconds() - await watched
        return tally, spent


async def begin_at_once(proxy: Proxy, rollouts: int) -> tuple[Tally, Tally]:
    """Let rollouts begin within ten seconds; return their first calls, which are equal, and their second ones."""
    # Connections of our own: httpx takes longer to choose one of 600 than the proxy to answer, and that would count.
    first, second = Tally(), Tally()
    assert proxy.process is not None
    server = Server(proxy.url, proxy.process.pid)

    async def live(number: int) -> None:
        await asyncio.sleep(number * 10 / rollouts)
        begun = time.perf_counter()
        reader, writer = await asyncio.open_connection(*server.address)
        commands = ("mkdir work && cd work && echo begun > log", f"echo {number} >> log; wc -l < log")
        for command, tally in zip(commands, (first, second), strict=True):
            writer.write(post(server, _path(number), json.dumps({"command": command}).encode()))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
            tally.note(int(head.split()[1]), begun)
            begun = time.perf_counter()
        writer.close()

    await asyncio.gather(*(live(number) for number in range(rollouts)))
    return first, second


def memory_mb(proxy: Proxy) -> float:
    """Return the private memory of the proxy and of all that it has started."""
    pids = [pid for pid, _ in proxy.processes()]
    if proxy.process is not None:
        pids.append(proxy.process.pid)
    return sum(map(_private_kb, pids)) / 1024


def _private_kb(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private"))


def _live_row(rollouts: int, options: Namespace, **settings: str) -> tuple[str, ...]:
    with measured(options, **settings) as (proxy, cpu):
        tally, spent_s = asyncio.run(think_and_call(proxy, rollouts, options, cpu))
        stats = proxy.view("stats")
        bound = f"{stats['sandboxes_budget']} ({stats['sandboxes_bounded_by']})"
        return (
            f"{median(tally.ms):.0f}", f"{tally.percentile(0.99):.0f}",
            f"{spent_s / max(1, len(tally.ms)) * 1e3:.1f}",
            f"{memory_mb(proxy) / rollouts:.1f}", str(sum(stats["sandboxes"].values())), bound,
            json.dumps(tally.refused) if tally.refused else "",
        )  # fmt: skip


_COLUMNS = ("miss p50 ms", "p99", "CPU ms a miss", "MB a rollout", "sandboxes", "of", "refused")


def live(options: Namespace, sizes: Iterable[int]) -> None:
    shown = table(f"live rollouts, {options.think:g} s of thinking", "rollouts", *_COLUMNS)
    for rollouts in sizes:
        console.print(f"live: {rollouts} rollouts …")
        shown.add_row(str(rollouts), *_live_row(rollouts, options))
    console.print(shown)


def room(options: Namespace, rollouts: int) -> None:
    shown = table(f"{rollouts} live rollouts, {options.think:g} s of thinking", "room for", *_COLUMNS)
    for share in (1, 2, 4):
        console.print(f"room: for {rollouts // share} of {rollouts} rollouts …")
        shown.add_row(str(rollouts // share), *_live_row(rollouts, options, max_sandboxes=str(rollouts // share)))
    console.print(shown)


def burst(options: Namespace, sizes: Iterable[int]) -> None:
    shown = table(
        "rollouts that begin within 10 s", "rollouts", "first call p50 ms", "p99", "second p50", "p99", "starts",
        "CPU ms a rollout", "refused",
    )  # fmt: skip
    for rollouts in sizes:
        console.print(f"burst: {rollouts} rollouts …")
        with measured(options) as (proxy, cpu):
            before = cpu.seconds()
            first, second = asyncio.run(begin_at_once(proxy, rollouts))
            spent_s = cpu.seconds() - before
            starts = proxy.view("stats")["starts"]
            shown.add_row(
                str(rollouts), f"{median(first.ms):.0f}", f"{first.percentile(0.99):.0f}", f"{median(second.ms):.0f}",
                f"{second.percentile(0.99):.0f}", str(starts), f"{spent_s / rollouts * 1e3:.1f}",
                json.dumps(first.refused | second.refused) if first.refused or second.refused else "",
            )  # fmt: skip
    console.print(shown)


STATE_CALLS = 25


async def fill(proxy: Proxy, options: Namespace) -> tuple[Tally, Tally, list[int]]:
    """Make states as fast as the proxy takes them; return these calls, those of followers, and the bytes kept."""
    async with httpx.AsyncClient(base_url=proxy.url, timeout=PATIENCE_S, trust_env=False) as client:
        made, followed, kept = Tally(), Tally(), [0]
        until, numbers = time.monotonic() + options.fill, iter(range(1 << 30))

        def write(number: int, turn: int) -> str:
            return f"head -c 200000 /dev/urandom > f{turn}; echo {number}"

        async def lead() -> None:
            while time.monotonic() < until:
                # Each is the first of a task of its own, so all its calls are misses.
                number = next(numbers) * GROUP
                for turn in range(STATE_CALLS):
                    await call(client, number, write(number, turn), made)
                for turn in range(STATE_CALLS // 2):
                    await call(client, number + 1, write(number, turn), followed)
                await call(client, number + 1, "cat f* | wc -c", followed)
                for rollout in (number, number + 1):
                    await client.delete(f"/api/v1/tasks/scale-{number // GROUP}/rollouts/{rollout}")

        async def watch() -> None:
            while time.monotonic() < until:
                await asyncio.sleep(1.0)
                kept.append((await client.get("/api/v1/stats")).json()["snapshot_bytes"])

        await asyncio.gather(watch(), *(lead() for _ in range(options.leaders)))
        return made, followed, kept


def states(options: Namespace) -> None:
    budget = 100 << 20
    shown = table(
        f"states of 200 kB for {options.fill:g} s, {options.leaders} at once, budget {budget >> 20} MiB",
        "calls", "a second", "p50 ms", "p99", "CPU ms", "MiB", "followers p50", "evicted", "not kept", "refused",
    )  # fmt: skip
    console.print(f"states: {options.fill:g} s …")
    with measured(options, snapshot_bytes=str(budget)) as (proxy, cpu):
        before = cpu.seconds()
        made, followed, kept = asyncio.run(fill(proxy, options))
        spent_s, stats = cpu.seconds() - before, proxy.view("stats")
        refused = made.refused | followed.refused
        calls = len(made.ms) + len(followed.ms)
        shown.add_row(
            str(calls), f"{len(made.ms) / options.fill:.0f}", f"{median(made.ms):.0f}",
            f"{made.percentile(0.99):.0f}", f"{spent_s / calls * 1e3:.1f}", f"{max(kept) >> 20}",
            f"{median(followed.ms):.1f}", str(stats["evictions"]), str(stats["hits_refused"]),
            json.dumps(refused) if refused else "",
        )  # fmt: skip
    console.print(shown)


async def keep_busy(proxy: Proxy, options: Namespace, report: Callable[[Tally], None]) -> None:
    """Let groups of rollouts begin, call and end until the time is over; report once a minute."""
    async with httpx.AsyncClient(base_url=proxy.url, timeout=PATIENCE_S, trust_env=False) as client:
        until, numbers, tally = time.monotonic() + options.steady, iter(range(1 << 30)), Tally()

        async def one(number: int) -> None:
            for turn in range(STATE_CALLS):
                # A quarter of the calls is the same in each rollout of a group.
                own = "" if turn % 4 == 0 else f" {number}"
                await call(client, number, f"head -c 20000 /dev/urandom > f{turn % 5}; echo {turn}{own} >> log", tally)
                await asyncio.sleep(options.pause)
            await client.delete(f"/api/v1/tasks/scale-{number // GROUP}/rollouts/{number}")

        async def group() -> None:
            while time.monotonic() < until:
                first = next(numbers) * GROUP
                await asyncio.gather(*(one(number) for number in range(first, first + GROUP)))

        async def watch() -> None:
            while time.monotonic() < until:
                await asyncio.sleep(60.0)
                await asyncio.to_thread(report, tally)
                tally.ms.clear()

        await asyncio.gather(watch(), *(group() for _ in range(options.groups)))


def steady(options: Namespace) -> None:
    shown = table(
        f"steady load for {options.steady:g} s", "calls", "p50 ms", "p99", "memory MB", "descriptors", "processes",
        "states MiB", "disk MiB", "B a call", "records", "refused",
    )  # fmt: skip
    calls = 0
    settings = {
        "snapshot_bytes": str(200 << 20), "tree_memory_records": "4000", "answer_memory_bytes": str(16 << 20),
        "sandbox_idle_s": "60",
    }  # fmt: skip
    with measured(options, **settings) as (proxy, _):
        seen_bytes = 0

        def report(tally: Tally) -> None:
            nonlocal calls, seen_bytes
            stats, made = proxy.view("stats"), len(tally.ms)
            assert proxy.process is not None
            calls += made
            disk = _disk_bytes(proxy.data) - stats["snapshot_bytes"]
            row = (
                str(calls), f"{median(tally.ms):.0f}", f"{tally.percentile(0.99):.0f}",
                f"{_private_kb(proxy.process.pid) / 1024:.0f}",
                str(len(list(Path(f"/proc/{proxy.process.pid}/fd").iterdir()))), str(len(proxy.processes())),
                str(stats["snapshot_bytes"] >> 20), str(disk >> 20), f"{(disk - seen_bytes) / max(1, made):.0f}",
                str(stats["misses"]), json.dumps(tally.refused) if tally.refused else "",
            )  # fmt: skip
            seen_bytes = disk
            console.print(" ".join(f"{value:>9}" for value in row))
            shown.add_row(*row)

        asyncio.run(keep_busy(proxy, options, report))
    console.print(shown)


def _disk_bytes(folder: Path) -> int:
    """Return the bytes that a directory takes on the disk; files that go meanwhile do not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(f"{place}/{name}").st_blocks * 512
    return total


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["live", "room", "burst", "states"], help="some of these")
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute in all")
    parser.add_argument("--live", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--room", type=int, default=100, help="rollouts for the rows of room")
    parser.add_argument("--burst", type=int, nargs="+", default=[100, 600])
    parser.add_argument("--fill", type=float, default=60.0, help="seconds for which states are made")
    parser.add_argument("--leaders", type=int, default=4, help="rollouts that make states at once")
    parser.add_argument("--steady", type=float, default=1800.0, help="seconds of steady load")
    parser.add_argument("--groups", type=int, default=4, help="groups of rollouts that are live in it")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds of thinking in it")
    parser.add_argument("--think", type=float, default=8.0, help="seconds from one call of a rollout to its next")
    parser.add_argument("--turns", type=int, default=4, help="calls of each rollout after its first")
    disk = Path("/var/tmp")  # noqa: S108 - a directory of its own is made in it
    parser.add_argument("--data", type=Path, default=disk, help="directory below which the data is")
    options = parser.parse_args()
    if options.quick:
        options.live, options.room, options.burst, options.think, options.turns = [5, 20], 16, [20], 2.0, 2
        options.fill, options.steady = 10.0, 60.0
    if "live" in options.parts:
        live(options, options.live)
    if "room" in options.parts:
        room(options, options.room)
    if "burst" in options.parts:
        burst(options, options.burst)
    if "states" in options.parts:
        states(options)
    if "steady" in options.parts:
        steady(options)


if __name__ == "__main__":
    main()
