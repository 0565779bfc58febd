"""Members of a cluster as processes on this machine, and agents whose every answer is compared with a model."""

import asyncio
import itertools
import random
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg

from proxy.cluster.lines import decode
from proxy.storage.copies import RecordCopy
from tests.machine import Served, until

REPOSITORY = Path(__file__).parents[3]
SECRET = "the secret of the tests"
PATIENT = "tests.proxy.cluster.patient"
"""The module of a member whose leases and links outlast any pause of a busy machine."""
MORTAL = {"module": PATIENT, "TESTS_LEASE_S": "12"}
"""Options of such a member for tests in which it is killed: others take its tasks over 12 s later."""
OUTSIDE = "tests.proxy.cluster.outside"
"""The module of a member whose sandboxes reach a host of the test."""
SLOW_STORE = "tests.proxy.cluster.slow_store"
"""The module of a member whose store is slow while a file exists."""
READ = "SELECT group_concat(value, '') AS history FROM entry"
"""Reads what a rollout has written."""
WITNESS = f"SELECT hex(randomblob(8)) AS witness, ({READ})"
"""Reads it with a random number: only a record of this very execution, of one rollout, can have the same."""


@dataclass
class Node(Served):
    """`forkpoint serve --cluster`: one member, whose data lies in a directory of its name.

    Attributes:
        module: What is run: `forkpoint`, or a module of the tests, such as `PATIENT`.
    """

    name: str
    dsn: str
    options: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    module: str = "forkpoint"

    @property
    def data(self) -> Path:
        return self.folder / self.name

    @property
    def log_file(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def command(self) -> list[str]:
        command = [sys.executable, "-m", self.module, "serve", "--cluster", self.dsn, "--node", self.name]
        command += ["--store", str(self.folder / "store"), "--port", str(self.port), "--data", str(self.data)]
        return [*command, *self.arguments]

    @property
    def settings(self) -> dict[str, str]:
        settings = {"FORKPOINT_CLUSTER_SECRET": SECRET, "FORKPOINT_DRIVERS": '["sqlite"]', "FORKPOINT_LOG": "json"}
        settings |= {"PYTHONPATH": str(REPOSITORY)} if self.module != "forkpoint" else {}
        return settings | self.options


@contextmanager
def nodes(
    folder: Path, dsn: str, names: str, *arguments: str, module: str = "forkpoint", **options: str
) -> Iterator[dict[str, Node]]:
    """Run a member for each character of names, with further arguments, and options as environment variables."""
    members = {name: Node(folder, name, dsn, options, arguments, module) for name in names}
    try:
        for node in members.values():
            node.launch()
        for node in members.values():
            node.await_ready()
        yield members
    finally:
        for node in members.values():
            if node.process is not None and node.process.poll() is None:
                node.kill()


def put_task(node: Node, task: str, **options: Any) -> None:
    """Create a task whose rollouts write into an empty table; options are further members of its spec."""
    source = node.folder / "empty.sqlite"
    if not source.exists():
        with sqlite3.connect(source) as connection:
            connection.execute("CREATE TABLE entry (value TEXT)")
        connection.close()
    spec = {"driver": "sqlite", "databases": {"main": {"source": str(source)}}, **options}
    url, ending = f"{node.url}/api/v1/tasks/{task}", time.monotonic() + 60
    # On a busy machine, or right after a fault, a member may not reach the database for a while, and says so by 503.
    while (response := httpx.put(url, json=spec, timeout=60)).status_code == 503 and time.monotonic() < ending:
        time.sleep(0.1)
    assert response.is_success, response.text


@dataclass
class Truth:
    """The answers that all agents received.

    Attributes:
        witnesses: The random numbers that were answered, each with its task.
        answers: How many answers were compared.
        wrong: What was wrong with an answer.
        slowest_s: The longest time from a call to its answer, retries included.
        refused: How many calls were refused for now, by the agent's name.
    """

    witnesses: list[tuple[str, str]] = field(default_factory=list)
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)


class Agent:
    """An agent: it writes one of two values, then reads, and so on. A call that fails is sent again.

    A call that failed may have been taken or not, so several histories are possible until the next answer.
    """

    def __init__(
        self, name: str, task: str, homes: Sequence[Node], truth: Truth, seed: int, pause_s: float = 0.0
    ) -> None:
        """Create an agent; with several homes it changes its node after each answer. It pauses before each write."""
        self.name, self.task, self.truth = name, task, truth
        # The same walk for the same seed, and no secret.
        self.random, self.nodes, self.homes = random.Random(seed), homes, itertools.cycle(homes)  # noqa: S311
        self.home, self.answers, self._pause_s = next(self.homes), 0, pause_s
        self.possible = {""}

    async def run(self, client: httpx.AsyncClient, stop: asyncio.Event, turns: int = 1 << 30) -> None:
        """Make calls until it is stopped."""
        for _ in range(turns):
            if stop.is_set():
                return
            await asyncio.sleep(self._pause_s)
            value = self.random.choice("ab")
            write = f"INSERT INTO entry VALUES ('{value}'); {READ}"
            for tool, sql, written in (("script", write, value), ("query", READ, ""), ("query", WITNESS, "")):
                row = await self._call(client, tool, {"sql": sql}, written, stop)
                if row is None:
                    return
                self._compare(row[-1])
                witness = row[0]
            self.truth.witnesses.append((self.task, witness))
            self.home = next(self.homes)

    async def _call(
        self, client: httpx.AsyncClient, tool: str, call: dict[str, Any], written: str, stop: asyncio.Event
    ) -> list[str] | None:
        """Return the row that answers a call; None if the agent is stopped before it has one."""
        began = asyncio.get_running_loop().time()
        before = set(self.possible)
        self.possible = {history + written for history in before}
        while True:
            url = f"{self.home.url}/t/{self.task}/r/{self.name}/sql/{tool}"
            try:
                response = await client.post(url, json=call, timeout=60)
            except httpx.TransportError:
                pass
            else:
                if response.status_code == 200:
                    self.truth.slowest_s = max(self.truth.slowest_s, asyncio.get_running_loop().time() - began)
                    (row,) = response.json()["rows"]
                    return list(row)
                if response.status_code not in (503, 429):
                    self.truth.wrong.append(f"{self.name}: {response.status_code} {response.text}")
                    return None
                self.truth.refused[self.name] += 1
                if "retry-after" not in response.headers:
                    self.truth.wrong.append(f"{self.name}: {response.status_code} without Retry-After")
            if stop.is_set():
                return None
            # It was taken, or it was not.
            self.possible |= {history + written for history in self.possible}
            await asyncio.sleep(0.05)

    def _compare(self, history: str) -> None:
        self.truth.answers += 1
        self.answers += 1
        if history not in self.possible:
            self.truth.wrong.append(f"{self.name} is at {history!r}, and could only be at {sorted(self.possible)}")
        self.possible = {history}


async def until_answered(agents: Sequence[Agent]) -> None:
    """Wait until each agent has received one more answer."""
    before = [agent.answers for agent in agents]
    await until(lambda: all(agent.answers > seen for agent, seen in zip(agents, before, strict=True)))


@dataclass
class LogReading:
    """What is wrong with the logs of all tasks: answers that they lack, and calls that they have twice."""

    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)


def read_logs(dsn: str, truth: Truth) -> LogReading:
    """Compare each task's log with the answers that agents received: it has each answer, and no call twice."""
    logged: dict[str, set[bytes]] = {}
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT task, body FROM forkpoint.lines ORDER BY task, row").fetchall()
    calls, reading = set(), LogReading()
    for task, body in rows:
        for line in decode(body or b""):
            if isinstance(line, RecordCopy):
                call = (task, line.tree, line.source, line.key)
                if call in calls:
                    reading.twice.append(f"recorded twice: {line}")
                calls.add(call)
                logged.setdefault(task, set()).add(line.answer)
    for task, witness in truth.witnesses:
        answers = [answer for answer in logged.get(task, ()) if witness.encode() in answer]
        if len(answers) != 1:
            reading.lost.append(f"{witness} was answered in {task}, and is in the log {len(answers)} times")
    return reading


def check_log(dsn: str, truth: Truth) -> None:
    """Assert that the logs have each answer that an agent received, and no call twice."""
    assert read_logs(dsn, truth) == LogReading()
