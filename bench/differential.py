"""Random programs through the proxy and in private, uncached sandboxes: `python -m bench.differential`.

Groups of interleaved rollouts run through a proxy, calmly, with tiny budgets, and under `kill -9` of the proxy, its
launcher, sandboxes and CRIU. Each program also runs twice in private sandboxes of a second proxy (`cache: never`).
The two private runs give the noise floor: where they differ, nothing can be compared. Where they agree and the proxy's
answer is another, more private runs decide between timing and a wrong answer. Exits with 1 if an answer was wrong.
"""

import json
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import Any

import httpx

from bench.machine import console, table
from bench.programs import Group, Program, shell_group, shell_spec, sql_group
from tests.dockerd import Dockerd, dockerd
from tests.machine import Process, Proxy, data_directory, is_sandbox, process, served
from tests.proxy import test_transparency_postgres as postgres_calls
from tests.proxy import test_transparency_sqlite as sqlite_calls
from tests.sandboxes.docker import make_bash_image
from tests.sandboxes.postgres_cluster import cluster
from tests.sandboxes.sqlite_files import make

CALL_S = 180.0
"""A call that has no answer after this long, retries included, counts as lost."""
MORE_RUNS = 4
"""Private runs that a differing answer gets before it is called wrong."""
TINY = {"snapshot_bytes": "200000", "checkpoint_bytes": "2000000", "sandbox_idle_s": "1", "warm_sandboxes": "1"}
"""Budgets under which nearly every state is evicted, and reached by replay."""
RETRIED = {429, 503, 507}
MODES = ("calm", "tiny", "kills")

Answer = tuple[Any, ...]
"""What an agent sees of a response, without the order of lines on standard error."""


@dataclass(slots=True)
class Difference:
    """An answer of the proxy that no private run gave, although two private runs agreed."""

    group: int
    rollout: int
    position: int
    program: Program
    expected: Answer
    actual: Answer
    how: str


@dataclass(slots=True)
class Tally:
    """The figures of a run.

    Attributes:
        compared: Answers where the two private runs agree.
        noise: Answers where the two private runs differ.
        timing: Answers that only a later private run gave.
        wrong: Answers that no private run gave, and values that a rollout read differently.
        hidden: Answers that were recorded and lost with a killed proxy's connection.
        lost: Rollouts that ended with an error, by kind.
    """

    programs: int = 0
    compared: int = 0
    noise: int = 0
    timing: int = 0
    recalled: int = 0
    hidden: int = 0
    wrong: list[Difference] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class Run:
    """The answers of one rollout; None for a hidden one. Shorter than the program if the rollout was lost."""

    answers: tuple[Answer | None, ...]
    sources: tuple[str, ...] = ()


class LostRolloutError(Exception):
    """A rollout received an error that no retry mends. The text is its kind."""


def visible(body: dict[str, Any]) -> Answer:
    """Return what can be compared of a response body."""
    if "stdout" in body:
        return body["stdout"], sorted(body["stderr"].splitlines()), body["exit_code"], body["timed_out"]
    return (json.dumps(body, sort_keys=True),)


class Runner:
    """Runs groups through a proxy and privately, and compares."""

    def __init__(self, subject: Proxy, private: Proxy, tally: Tally, client: httpx.Client) -> None:
        self._subject, self._private, self._tally, self._client = subject, private, tally, client

    def group(self, number: int, group: Group) -> None:
        """Run one group in both ways and add its comparison to the tally."""
        task, alone = f"d{number}", f"p{number}"
        self._put(self._subject, task, group.spec)
        with ThreadPoolExecutor(len(group.programs)) as threads:
            runs = list(
                threads.map(
                    lambda at: self._walk(self._subject, task, f"r{at}", group.programs[at]), range(len(group.programs))
                )
            )
        self._put(self._private, alone, group.spec | {"cache": "never"})
        known: dict[tuple[str, ...], list[Run]] = {}
        for at, (program, run) in enumerate(zip(group.programs, runs, strict=True)):
            texts = tuple(call.text for call in program)
            if texts not in known:
                known[texts] = [self._alone(alone, program) for _ in range(2)]
            self._compare(number, at, program, run, known[texts], alone)
        for proxy, name in (self._subject, task), (self._private, alone):
            self._request(proxy, "DELETE", f"/api/v1/tasks/{name}")

    def _compare(self, group: int, at: int, program: Program, run: Run, private: list[Run], alone: str) -> None:
        with self._tally.lock:
            self._tally.programs += 1
            self._tally.hidden += run.answers.count(None)
            self._tally.sources.update(run.sources)
        for position, answer in enumerate(run.answers):
            if answer is None:
                continue
            call = program[position]
            if call.recalls is not None and (first := run.answers[call.recalls]) is not None:
                with self._tally.lock:
                    self._tally.recalled += 1
                    if answer[0] != first[0]:
                        self._tally.wrong.append(
                            Difference(group, at, position, program, first, answer, run.sources[position])
                        )
                continue
            expected = _answers(private, position)
            if len(expected) < 2 or any(one != expected[0] for one in expected):
                with self._tally.lock:
                    self._tally.noise += 1
                continue
            while answer not in expected and len(expected) < 2 + MORE_RUNS:
                private.append(self._alone(alone, program))
                expected = _answers(private, position)
            with self._tally.lock:
                self._tally.compared += 1
                if answer not in expected:
                    how = run.sources[position]
                    self._tally.wrong.append(Difference(group, at, position, program, expected[0], answer, how))
                elif answer != expected[0]:
                    self._tally.timing += 1

    def _alone(self, task: str, program: Program) -> Run:
        return self._walk(self._private, task, secrets.token_hex(6), program)

    def _walk(self, proxy: Proxy, task: str, rollout: str, program: Program) -> Run:
        answers: list[Answer | None] = []
        sources: list[str] = []
        try:
            for number, call in enumerate(program):
                response = self._call(
                    proxy, f"/t/{task}/r/{rollout}/{call.path}", call.arguments, (task, rollout, number)
                )
                answers.append(None if response is None else visible(response.json()))
                sources.append("" if response is None else response.headers["cache-status"].removeprefix("forkpoint; "))
        except LostRolloutError as error:
            with self._tally.lock:
                self._tally.lost[str(error)] += 1
        self._request(proxy, "DELETE", f"/api/v1/tasks/{task}/rollouts/{rollout}")
        return Run(tuple(answers), tuple(sources))

    def _call(self, proxy: Proxy, path: str, arguments: Any, at: tuple[str, str, int]) -> httpx.Response | None:
        """Repeat a call until it is answered; None if it was recorded and its answer was lost with the connection."""
        deadline, unsure, problem = time.monotonic() + CALL_S, False, "no answer in time"
        task, rollout, number = at
        while time.monotonic() < deadline:
            try:
                if unsure:
                    shown = self._client.get(f"{proxy.url}/api/v1/tasks/{task}/rollouts/{rollout}?limit=1")
                    if shown.is_success and int(shown.json()["calls"]) > number:
                        return None
                    unsure = shown.status_code in RETRIED
                    if unsure:
                        continue
                response = self._client.post(proxy.url + path, json=arguments)
            except httpx.TransportError:
                unsure = True
                time.sleep(0.1)
                continue
            if response.is_success:
                return response
            problem = f"{response.status_code} {response.json()['type'].rpartition(':')[2]}"
            if response.status_code not in RETRIED:
                break
            time.sleep(0.2)
        raise LostRolloutError(problem)

    def _put(self, proxy: Proxy, task: str, spec: dict[str, Any]) -> None:
        response = self._request(proxy, "PUT", f"/api/v1/tasks/{task}", spec)
        if response is None or not response.is_success:
            raise RuntimeError(f"the task {task} is refused: {response and response.text}")

    def _request(self, proxy: Proxy, method: str, path: str, body: Any = None) -> httpx.Response | None:
        deadline = time.monotonic() + CALL_S
        while time.monotonic() < deadline:
            try:
                response = self._client.request(method, proxy.url + path, json=body)
            except httpx.TransportError:
                time.sleep(0.1)
                continue
            if response.status_code not in RETRIED:
                return response
            time.sleep(0.2)
        return None


def _answers(runs: list[Run], position: int) -> list[Answer]:
    """Return what runs answered to one call, without those that ended before."""
    answers = [run.answers[position] for run in runs if position < len(run.answers)]
    return [answer for answer in answers if answer is not None]


class Strikes:
    """Kills what belongs to a proxy, again and again, until the block ends."""

    def __init__(self, proxy: Proxy, daemon: Dockerd | None, dice: random.Random, every_s: float, tally: Tally) -> None:
        self._proxy, self._daemon, self._dice, self._every_s, self._tally = proxy, daemon, dice, every_s, tally
        self._over = threading.Event()

    @contextmanager
    def falling(self) -> Iterator[None]:
        """Strike from another thread for the duration of the block."""
        thread = threading.Thread(target=self._go)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _go(self) -> None:
        while not self._over.wait(self._dice.uniform(0.3, 1.7) * self._every_s):
            self._tally.kills[self._strike()] += 1

    def _strike(self) -> str:
        kind = self._dice.choices(
            ("process", "gc", "proxy", "stop", "dockerd"), (6, 4, 1, 1, 1 if self._daemon else 0)
        )[0]
        if kind == "process":
            return self._kill_process()
        if kind == "gc":
            httpx.post(f"{self._proxy.url}/api/v1/gc", timeout=60)
        elif kind == "dockerd":
            assert self._daemon is not None
            self._daemon.kill()
            time.sleep(self._dice.uniform(0, 0.5))
            self._daemon.start()
        else:
            self._proxy.kill() if kind == "proxy" else self._proxy.stop()
            self._proxy.start()
        return kind

    def _kill_process(self) -> str:
        """Kill one of our own processes: a launcher, a pid 1, an anchor, CRIU or a worker; never one of the agent's."""
        own = [(candidate, name) for candidate in sorted(self._proxy.processes()) if (name := _role(candidate))]
        if not own:
            return "nothing to kill"
        (pid, began), role = self._dice.choice(own)
        if process(pid) == (pid, began):
            os.kill(pid, signal.SIGKILL)
        return role


def _role(candidate: Process) -> str:
    """Return what a process of the proxy is; an empty string for the processes of agents."""
    try:
        arguments = Path(f"/proc/{candidate[0]}/cmdline").read_bytes().split(b"\0")
        inner = [
            line for line in Path(f"/proc/{candidate[0]}/status").read_text().splitlines() if line.startswith("NSpid:")
        ]
    except OSError:
        return ""
    if is_sandbox(candidate[0]):
        return "pid 1"
    if arguments[0] == b"anchor":
        return "anchor"
    if arguments[0].endswith(b"criu"):
        return "criu"
    return "launcher or worker" if inner and len(inner[0].split()) == 2 else ""


def report(driver: str, mode: str, seed: int, tally: Tally, seconds: float) -> None:
    shown = table(f"Differential run: {driver}, {mode}", "", "")
    hits = sum(count for how, count in tally.sources.items() if how.startswith("hit"))
    for name, value in {
        "seed": str(seed),
        "programs": f"{tally.programs}",
        "answers compared": f"{tally.compared}",
        "hits among all answers": f"{hits} of {tally.sources.total()}",
        "wrong": f"{len(tally.wrong)}",
        "only a later private run gave the answer": f"{tally.timing}",
        "own random values read again": f"{tally.recalled}",
        "noise floor: two private runs differ": f"{tally.noise}",
        "answers lost with a killed proxy": f"{tally.hidden}",
        "lost rollouts": ", ".join(f"{kind}: {count}" for kind, count in tally.lost.most_common()) or "0",
        "strikes": ", ".join(f"{kind}: {count}" for kind, count in tally.kills.most_common()) or "0",
        "seconds": f"{seconds:.0f}",
    }.items():
        shown.add_row(name, value)
    console.print(shown)
    for wrong in tally.wrong[:10]:
        console.print(f"group {wrong.group}, rollout {wrong.rollout}, call {wrong.position}, {wrong.how}", markup=False)
        for number, call in enumerate(wrong.program[: wrong.position + 1]):
            console.print(f"  {number:2} {call.text}", markup=False, highlight=False)
        for line in unified_diff(_lines(wrong.expected), _lines(wrong.actual), "private", "proxy", lineterm="", n=1):
            console.print(f"  {line}", markup=False, highlight=False)


def _lines(answer: Answer) -> list[str]:
    return "\n".join(str(part) for part in answer).splitlines()


@contextmanager
def environment(driver: str) -> Iterator[tuple[dict[str, Any], dict[str, str], Dockerd | None]]:
    """Yield the spec of a driver's tasks, the settings of its proxies, and its Docker daemon if it has one."""
    settings = {"drivers": json.dumps([driver])}
    with ExitStack() as stack:
        if driver == "container":
            daemon = stack.enter_context(dockerd())
            os.environ["DOCKER_HOST"] = daemon.host
            make_bash_image()
            yield shell_spec(driver), settings, daemon
        elif driver == "sqlite":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            source = make(Path(folder) / "source.db", sqlite_calls.SCRIPT)
            yield {"driver": driver, "databases": {"shop": {"source": str(source)}}}, settings, None
        elif driver == "postgres":
            server = stack.enter_context(cluster())
            server.create("shop", postgres_calls.SOURCE)
            databases = {"shop": {"dsn": server.dsn, "source": "shop"}}
            yield {"driver": driver, "databases": databases}, settings, None
        else:
            yield shell_spec(driver), settings, None


def run(driver: str, mode: str, seed: int, programs: int, rollouts: int, length: int, every_s: float) -> Tally:
    """Compare at least a number of programs in one mode, and print the table."""
    tally, dice = Tally(), random.Random(f"{seed}:{driver}:{mode}")  # noqa: S311 - dice of a test
    began = time.monotonic()
    with ExitStack() as stack:
        spec, settings, daemon = stack.enter_context(environment(driver))
        folders = [stack.enter_context(data_directory()) for _ in range(2)]
        for folder in folders:
            folder.chmod(0o711)  # Any user in a container must be able to traverse this directory.
        budgets = {} if mode == "calm" else TINY
        subject = stack.enter_context(served(folders[0], **settings, **budgets, max_sandboxes="8"))
        private = stack.enter_context(served(folders[1], **settings, max_sandboxes="8"))
        make_group = sql_group if driver in ("sqlite", "postgres") else shell_group
        client = httpx.Client(timeout=120, trust_env=False, limits=httpx.Limits(max_connections=None))
        runner = Runner(subject, private, tally, stack.enter_context(client))
        if mode == "kills":
            strikes = Strikes(subject, daemon, random.Random(seed), every_s, tally)  # noqa: S311
            stack.enter_context(strikes.falling())
        groups = [make_group(dice, spec, rollouts, length) for _ in range(-(-programs // rollouts))]
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(runner.group, range(len(groups)), groups))
    report(driver, mode, seed, tally, time.monotonic() - began)
    return tally


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000, help="programs, over all drivers and modes")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--drivers", default="local,sqlite", help="of local, container, sqlite, postgres")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--rollouts", type=int, default=6, help="rollouts in a group")
    parser.add_argument("--length", type=int, default=10, help="calls of a group's first program")
    parser.add_argument("--every-s", type=float, default=1.0, help="mean seconds between strikes in the mode `kills`")
    options = parser.parse_args()
    drivers, modes = options.drivers.split(","), options.modes.split(",")
    share = -(-options.programs // (len(drivers) * len(modes)))
    tallies = [
        run(driver, mode, options.seed, share, options.rollouts, options.length, options.every_s)
        for driver in drivers
        for mode in modes
    ]
    if wrong := sum(len(tally.wrong) for tally in tallies):
        sys.exit(f"{wrong} answers were wrong.")


if __name__ == "__main__":
    main()
