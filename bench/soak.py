"""Mixed load for a long time, while the machine misbehaves: `python -m bench.soak --minutes M`.

Rollouts whose every answer a model predicts run beside hang-ups, deletes, PUTs, forks, imports, audits and collections.
Meanwhile the disk fills up, descriptors and memory run out, and processes are stopped or killed. The proxy's memory,
descriptors, mounts, processes and disk are sampled; the slopes of the second half say what grows, and with what. The
growth of its private memory is divided into parts that add up to it (`bench.resident`). `--traced` names the source
files behind them, and needs memory itself. `--hits` sends recorded calls only, without chores and faults: nothing may
grow. Exits with 1 if an answer was wrong or lost, or if something is left. Needs root.
"""

import json
import os
import random
import resource
import secrets
import shutil
import signal
import statistics
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import measured_serve
from bench.machine import console, table
from bench.memory import PARTS, ROOT
from bench.resident import TRACER, UNKNOWN
from tests.machine import Proxy, data_directory, is_sandbox, mounts_below, process, serving
from tests.storm import Storm
from tests.test_machine_faults import fill, small_disk
from tests.trajectories import choices

SAMPLE_S = 2.0
"""Interval of the samples."""
KEPT = {"snapshot_bytes": "20000000", "checkpoint_bytes": "60000000", "sandbox_idle_s": "5", "max_sandboxes": "16"}
"""Budgets that a few minutes of load exceed."""
FAULTS = ("disk", "descriptors", "memory", "stopped", "sandbox")
KNOWN = 8
"""Trajectories of each task that `--hits` repeats."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The proxy at one moment.

    Attributes:
        anonymous_bytes: Resident memory that is neither a file nor shared: heap and stacks.
        file_bytes: Resident pages of mapped files and shared memory, such as the journal and SQLite's files.
        processes: Descendants of the proxy.
        disk_bytes: Blocks of the data directory.
        calls: Calls that the proxy has answered since its start.
        recorded: Calls that it has recorded.
    """

    at_s: float
    anonymous_bytes: int
    file_bytes: int
    descriptors: int
    threads: int
    mounts: int
    processes: int
    disk_bytes: int
    calls: int
    recorded: int


def sample(proxy: Proxy, began: float) -> Sample:
    """Take a sample of a proxy."""
    assert proxy.process is not None
    here = Path(f"/proc/{proxy.process.pid}")
    status = dict(line.split(":", 1) for line in (here / "status").read_text().splitlines())
    kilobytes = {name: int(status[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem")}
    stats = proxy.view("stats")
    data = proxy.data
    blocks = 0
    for folder, _, names in os.walk(data):
        for name in names:
            with suppress(OSError):
                blocks += Path(folder, name).lstat().st_blocks
    return Sample(
        at_s=time.monotonic() - began,
        anonymous_bytes=kilobytes["RssAnon"] * 1024,
        file_bytes=(kilobytes["RssFile"] + kilobytes["RssShmem"]) * 1024,
        descriptors=len(list((here / "fd").iterdir())),
        threads=int(status["Threads"]),
        mounts=len(mounts_below(data)),
        processes=len(proxy.processes()),
        disk_bytes=blocks * 512,
        calls=stats["calls"],
        recorded=stats["misses"] + stats["bypasses"],
    )


@dataclass
class MeasuredProxy(Proxy):
    """A proxy that reports the parts of its memory, by source files if it is traced."""

    traced: bool = field(default=False, kw_only=True)

    @property
    def command(self) -> list[str]:
        """The command, with the module that measures."""
        return ["bench.measured_serve" if word == "forkpoint" else word for word in super().command]

    @property
    def settings(self) -> dict[str, str]:
        """The settings, and what the module needs."""
        own = {"PYTHONPATH": str(ROOT), measured_serve.FILE: str(self._parts)}
        return {**super().settings, **own, **({measured_serve.TRACED: "1"} if self.traced else {})}

    @property
    def _parts(self) -> Path:
        return self.folder / "parts.json"

    def parts(self) -> dict[str, int]:
        """Return the parts of the proxy's memory (`bench.resident.parts`); empty after a minute without an answer."""
        assert self.process is not None
        with suppress(OSError):
            self._parts.unlink(missing_ok=True)
            self.process.send_signal(signal.SIGUSR2)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                if self._parts.exists():
                    return dict(json.loads(self._parts.read_text()))
                time.sleep(0.1)
        return {}


@dataclass
class Soak(Storm):
    """A storm that lasts for a given time, with chores and faults beside it.

    Attributes:
        samples: Samples since the start.
        chores: Number of chores by kind and status code.
        disk: The mount point of the small file system with the data directory.
        memory: Where a `MeasuredProxy` has its memory, in the middle of the time and at its end.
        hits: Whether recorded calls alone are sent, without chores and faults.
    """

    disk: Path = Path("/nonexistent")
    minutes: float = 1.0
    samples: list[Sample] = field(default_factory=list)
    chores: dict[str, int] = field(default_factory=dict)
    memory: list[dict[str, int]] = field(default_factory=list)
    hits: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._calm = threading.Lock()

    def run(self) -> None:
        """Run load, chores and faults until the time is over; then repeat some trajectories without faults."""
        began = time.monotonic()
        end = began + self.minutes * 60
        with self._client:
            for number in range(self.tasks):
                self._put(f"local-{number}", "local")
            workers: list[Callable[[], None]] = [lambda: self._load(end)] * self.at_once
            if not self.hits:
                workers += [lambda: self._chore(end), lambda: self._fault(end)]
            with ThreadPoolExecutor(len(workers)) as threads:
                running = [threads.submit(worker) for worker in workers]
                while time.monotonic() < end:
                    with suppress(httpx.HTTPError, OSError):
                        self.samples.append(sample(self.proxy, began))
                    if not self.memory and time.monotonic() > (began + end) / 2:
                        self._note_memory()
                    time.sleep(SAMPLE_S)
                for worker in running:
                    worker.result()
            for number in range(self.tasks):
                self._walk(f"again{number}", f"local-{number}", self.seed + number, choices(number, self.length))
            self.samples.append(sample(self.proxy, began))
            self._note_memory()

    def _note_memory(self) -> None:
        if isinstance(self.proxy, MeasuredProxy):
            # A proxy without descriptors or memory cannot measure itself.
            with self._calm:
                self.memory.append(self.proxy.parts())

    def _load(self, end: float) -> None:
        """Run rollouts, one after another. Some end with DELETE, others are left behind."""
        while time.monotonic() < end:
            with self._lock:
                number = self._dice.randrange(1 << 40)
            dice = random.Random(number)  # noqa: S311 - dice of a test
            task, rollout = f"local-{number % self.tasks}", f"s{number}"
            chosen = number % KNOWN if self.hits else number
            self._walk(rollout, task, self.seed + number % self.tasks, choices(chosen, self.length))
            if self.hits or dice.random() < 0.8:
                with suppress(httpx.TransportError):
                    self._client.delete(f"/api/v1/tasks/{task}/rollouts/{rollout}")

    # -- chores ------------------------------------------------------------------------------------------------------

    def _chore(self, end: float) -> None:
        """Do what operators and careless clients do, on a task of its own, so that no predicted rollout is ended."""
        number, is_last = 0, False
        while not is_last:
            # The last round begins when all faults are over, so each chore succeeds once.
            is_last = time.monotonic() >= end
            for kind, method, path, body in self._round(number):
                with suppress(httpx.TransportError):
                    answer = self._client.request(method, path, json=body, timeout=0.05 if kind == "hang-up" else 60)
                    if kind == "export" and answer.is_success:
                        taken = self._client.post(f"/api/v1/tasks/copy{number % 3}/import", content=answer.content)
                        self._note_chore("import", taken)
                    self._note_chore(kind, answer)
                time.sleep(0.02)
            number += 1

    def _round(self, number: int) -> Iterator[tuple[str, str, str, Any]]:
        churn, rollout = "/api/v1/tasks/churn", f"c{number}"
        exec_ = f"/t/churn/r/{rollout}/shell/exec"
        with self._lock:
            node = f"n{self._dice.randrange(2, 60)}"
        yield "put", "PUT", churn, {"env": {"ROUND": str(number % 4)}}
        yield "call", "POST", exec_, {"command": f"echo {number % 7} > f"}
        yield "fork", "POST", f"{churn}/rollouts/{rollout}/fork", {"name": f"f{number}"}
        yield "call of a fork", "POST", f"/t/churn/r/f{number}/shell/exec", {"command": f"cat f; sleep 0.0{number % 9}"}
        yield "hang-up", "POST", exec_, {"command": "sleep 0.3; echo late >> f"}
        yield "call after a hang-up", "POST", exec_, {"command": "cat f"}
        yield "delete node", "DELETE", f"{churn}/nodes/{node}", None
        yield "verify", "POST", f"/api/v1/tasks/local-{number % self.tasks}/verify", {}
        yield "export", "GET", f"/api/v1/tasks/local-{number % self.tasks}/export?snapshots=true", None
        yield "delete copy", "DELETE", f"/api/v1/tasks/copy{number % 3}", None
        yield "collect", "POST", "/api/v1/gc", None
        yield "warm", "POST", f"{churn}/warm", {"count": 2}
        yield "delete rollout", "DELETE", f"{churn}/rollouts/{rollout}", None
        if number % 20 == 19:
            yield "delete task", "DELETE", churn, None

    def _note_chore(self, kind: str, answer: httpx.Response) -> None:
        name = f"{kind} {answer.status_code}"
        self.chores[name] = self.chores.get(name, 0) + 1

    # -- faults ------------------------------------------------------------------------------------------------------

    def _fault(self, end: float) -> None:
        """Let the machine fail for a moment, again and again."""
        actions = {
            "disk": self._full_disk, "descriptors": self._no_descriptors, "memory": self._no_memory,
            "stopped": self._stop_process, "sandbox": self._kill_sandbox,
        }  # fmt: skip
        while time.monotonic() < end - 10:
            time.sleep(self._dice.uniform(0.5, 1.5) * self.every_s)
            kind = self._dice.choice(FAULTS)
            with self._calm:
                actions[kind]()
            self.kills[kind] += 1
            self._note()

    def _full_disk(self) -> None:
        ballast = fill(self.disk)
        time.sleep(2)
        ballast.unlink()

    def _no_descriptors(self) -> None:
        with self._limited(resource.RLIMIT_NOFILE, 3):
            time.sleep(2)

    def _no_memory(self) -> None:
        assert self.proxy.process is not None
        pages = int(Path(f"/proc/{self.proxy.process.pid}/statm").read_text().split()[0])
        with self._limited(resource.RLIMIT_AS, pages * resource.getpagesize() + (1 << 20)):
            time.sleep(2)

    @contextmanager
    def _limited(self, kind: int, soft: int) -> Iterator[None]:
        assert self.proxy.process is not None
        pid = self.proxy.process.pid
        before = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (soft, before[1]))
        try:
            yield
        finally:
            resource.prlimit(pid, kind, before)

    def _stop_process(self) -> None:
        """Stop a launcher, a worker or the pid 1 of a sandbox for a moment."""
        own = [
            (pid, began) for pid, began in sorted(self.proxy.processes()) if is_sandbox(pid) or _is_outside(pid)
        ]  # fmt: skip
        if not own:
            return
        pid, began = self._dice.choice(own)
        if process(pid) == (pid, began):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self._dice.uniform(0.5, 3))
                if process(pid) == (pid, began):
                    os.kill(pid, signal.SIGCONT)


def _is_outside(pid: int) -> bool:
    """Return whether a process is in no pid namespace of a sandbox."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return len(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()) == 2


def slope(samples: list[Sample], name: str, of: str = "at_s") -> float:
    """Return how much a figure grows with another, by least squares."""
    xs = [float(getattr(one, of)) for one in samples]
    return (
        statistics.linear_regression(xs, [float(getattr(one, name)) for one in samples]).slope
        if len(set(xs)) > 1
        else 0.0
    )


def growth(memory: list[dict[str, int]]) -> dict[str, int]:
    """Return by how many bytes each part of a proxy's private memory has grown between two looks (pure).

    They add up to its whole growth. Empty without two looks.
    """
    if len(memory) < 2 or not all(memory):
        return {}
    first, last = memory[0], memory[-1]
    names = [*(name for name in PARTS if name in last), *(name for name in last if name not in PARTS)]
    return {name: last.get(name, 0) - first.get(name, 0) for name in names}


def report_memory(soak: Soak, calls: int) -> None:
    """Print what the growth of the second half consists of; calls: how many were made in it."""
    grown = growth(soak.memory)
    if not grown:
        return
    shown = table(
        "Growth of the proxy's private memory in the second half", "part", "bytes", "for each call", "at its end"
    )
    for name, size in grown.items():
        shown.add_row(name, f"{size:+,}", f"{size / max(1, calls):+,.0f}", f"{soak.memory[-1].get(name, 0):,}")
    whole = sum(grown.values())
    shown.add_row("all parts", f"{whole:+,}", f"{whole / max(1, calls):+,.0f}", f"{sum(soak.memory[-1].values()):,}")
    console.print(shown)
    own = whole - grown.get(TRACER, 0)
    console.print(
        f"Without what the bench itself takes: {own:+,} bytes, {own / max(1, calls):+,.0f} for each call. "
        f"Not explained: {abs(grown[UNKNOWN]) / max(1, abs(whole)):.1%} of the growth."
    )


def report(soak: Soak, left: list[str], settled: list[Sample]) -> None:
    shown = table("Figures of the proxy", "", "first", "half", "last", "highest", "a minute")
    middle = settled[0]
    for name in (
        "anonymous_bytes",
        "file_bytes",
        "descriptors",
        "threads",
        "mounts",
        "processes",
        "disk_bytes",
        "calls",
        "recorded",
    ):
        values = [getattr(one, name) for one in soak.samples]
        per_minute = f"{slope(settled, name) * 60:+,.1f}"
        shown.add_row(
            name, *(f"{value:,}" for value in (values[0], getattr(middle, name), values[-1], max(values))), per_minute
        )
    console.print(shown)
    grown = settled[-1].anonymous_bytes - middle.anonymous_bytes
    kind = "calls" if soak.hits else "recorded"
    calls = getattr(settled[-1], kind) - getattr(middle, kind)
    console.print(
        f"Second half: {calls:,} {'calls' if soak.hits else 'calls recorded'}, {grown:+,} bytes of private memory, "
        f"by least squares {slope(settled, 'anonymous_bytes', kind):+,.0f} bytes for each."
    )
    report_memory(soak, calls)
    shown = table("Soak", "", "")
    for name, value in {
        "seed": f"{soak.seed}",
        "answers compared": f"{soak.calls - soak.hidden}",
        "wrong": f"{len(soak.wrong)}",
        "lost": f"{len(soak.given_up)}",
        "answers lost with a connection": f"{soak.hidden}",
        "left over": f"{len(left)}",
    }.items():
        shown.add_row(name, value)
    console.print(shown)
    for title, counts in (
        ("faults", soak.kills),
        ("answered", soak.sources),
        ("errors", soak.errors),
        ("chores", soak.chores),
    ):
        listed = ", ".join(f"{name}: {count}" for name, count in sorted(counts.items()))
        console.print(f"{title}: {listed or 'none'}", markup=False, highlight=False)
    for line in [*(str(wrong) for wrong in soak.wrong), *soak.given_up, *left][:15]:
        console.print(line, markup=False, highlight=False)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every-s", type=float, default=10.0, help="mean seconds between faults")
    parser.add_argument("--disk-mb", type=int, default=1500, help="size of the file system with the data directory")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--traced", action="store_true", help="name the source files whose objects the memory holds")
    parser.add_argument("--hits", action="store_true", help="send recorded calls only, without chores and faults")
    parser.add_argument("--log", type=Path, help="file to which the proxy's log is copied")
    options = parser.parse_args()
    with data_directory() as folder, small_disk(folder, options.disk_mb) as disk:
        proxy = MeasuredProxy(disk, KEPT, traced=options.traced)
        with serving(proxy):
            soak = Soak(
                proxy, None, {"local": 0}, options.seed,
                every_s=options.every_s, length=20, disk=disk, minutes=options.minutes, hits=options.hits,
            )  # fmt: skip
            try:
                soak.run()
            finally:
                if options.log:
                    shutil.copy(disk / "serve.log", options.log)
            left = soak.leftovers(60.0)
            report(soak, left, soak.samples[len(soak.samples) // 2 :])
    if soak.wrong or soak.given_up or left:
        sys.exit("Some answer was wrong or lost, or something is left.")


if __name__ == "__main__":
    main()
