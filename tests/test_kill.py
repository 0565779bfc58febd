"""Promises 3 and 4 with real shells: a killed proxy loses no answer and no position, and leaves nothing behind."""

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandboxes.spec import EnvironmentSpec
from tests.machine import (
    Process,
    Proxy,
    alive,
    assert_nothing_left,
    data_directory,
    require_sandboxes,
    served,
    serving,
    wait_until,
)
from tests.sandboxes.box import local_driver, opened, run

ROLLOUTS = 4
KILLS = 3
STORED = "forkpoint; fwd=miss; stored"


@pytest.fixture
def folder() -> Iterator[Path]:
    require_sandboxes()
    with data_directory() as directory:
        yield directory


def trajectory(number: int) -> list[str]:
    """Return the commands of a rollout: all rollouts begin alike and then diverge."""
    calls = ["mkdir -p work; cd work", "echo start > log", "X=0; export Y=shared", "cat log; pwd; echo $X $Y"]
    calls += ["sleep 1000 > /dev/null 2>&1 &"] if number == 0 else ['f() { echo "f $1 $X"; }']
    for round_ in range(4):
        calls += [
            f"echo {number}.{round_} >> log",
            f"X={number}{round_}",
            "cat log; echo $X $Y",
            f"mkdir d{round_}; cd d{round_}; echo $X > x",
            "pwd; cat x ../log",
            "cd ..",
            "pgrep -c sleep" if number == 0 else f"f {round_}",
        ]
    return calls


@dataclass
class Load:
    """Rollouts that call without a pause, each in a thread, and continue after a restart of the proxy.

    Attributes:
        answers_of: The answers to each rollout; None if the proxy recorded the step and died before it answered.
    """

    proxy: Proxy
    answers_of: list[list[Any]] = field(default_factory=lambda: [[] for _ in range(ROLLOUTS)])
    answered: int = 0
    faults: list[BaseException] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def walk(self, number: int) -> None:
        try:
            with httpx.Client(base_url=self.proxy.url, timeout=60) as client:
                for turn, command in enumerate(trajectory(number)):
                    self.answers_of[number].append(self._step(client, f"r{number}", turn, command))
                    with self.changed:
                        self.answered += 1
                        self.changed.notify_all()
        except BaseException as fault:  # noqa: BLE001 - `wait_for` reports it
            with self.changed:
                self.faults.append(fault)
                self.changed.notify_all()

    def wait_for(self, answers: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.faults or self.answered >= answers, 180)
        assert not self.faults, self.faults

    def _step(self, client: httpx.Client, rollout: str, turn: int, command: str) -> Any:
        while True:
            try:
                if self._taken(client, rollout) > turn:
                    return None
                return exec_(client, rollout, command).raise_for_status().json()
            except httpx.TransportError:
                # The proxy is down. After its restart, `_taken` shows whether it recorded the call.
                time.sleep(0.05)

    def _taken(self, client: httpx.Client, rollout: str) -> int:
        """Return the number of the rollout's calls that the proxy recorded."""
        shown = client.get(f"/api/v1/tasks/task/rollouts/{rollout}?limit=1")
        return int(shown.json()["calls"]) if shown.status_code != 404 else 0


def exec_(client: httpx.Client, rollout: str, command: str) -> httpx.Response:
    return client.post(f"/t/task/r/{rollout}/shell/exec", json={"command": command})


async def alone(data: Path, number: int) -> list[Any]:
    async with opened(local_driver(data)) as driver:
        sandbox = await driver.start(EnvironmentSpec())
        answers = [await run(sandbox, command) for command in trajectory(number)]
    return [(answer.out, answer.err, answer.code) for answer in answers]


def plain(answer: Any) -> tuple[str, str, int]:
    return answer["stdout"], answer["stderr"], answer["exit_code"]


def test_kill_under_load_loses_no_answer(folder: Path) -> None:
    seed = random.randrange(1 << 32)  # noqa: S311 - dice of a test
    print(f"seed {seed}")
    calls = sum(len(trajectory(number)) for number in range(ROLLOUTS))
    moments = sorted(random.Random(seed).sample(range(5, calls - 10), KILLS))  # noqa: S311
    groups: list[Path] = []
    processes: set[Process] = set()
    with serving(Proxy(folder, module="tests.patient")) as proxy:
        load = Load(proxy)
        threads = [threading.Thread(target=load.walk, args=(number,), daemon=True) for number in range(ROLLOUTS)]
        for thread in threads:
            thread.start()
        for moment in moments:
            load.wait_for(moment)
            here = proxy.processes()
            groups += proxy.groups()
            proxy.kill()
            assert here
            wait_until(lambda here=here: not alive(here), f"{alive(here)} are still running after the kill")  # type: ignore[misc]
            proxy.start()
        load.wait_for(calls)
        for thread in threads:
            thread.join()
        for number, received in enumerate(load.answers_of):
            truth = asyncio.run(alone(folder / "alone", number))
            assert [None if answer is None else plain(answer) for answer in received] == [
                None if answer is None else true for answer, true in zip(received, truth, strict=True)
            ]
            assert received.count(None) <= KILLS
        with httpx.Client(base_url=proxy.url, timeout=60) as client:
            for number, received in enumerate(load.answers_of):
                # A state that died with the proxy before it was kept has no way back: its call is repeated once.
                for walk, expected in (
                    ("repeats", {"forkpoint; hit", STORED, f"{STORED}; detail=not-kept"}),
                    ("hits", {"forkpoint; hit"}),
                ):
                    again = [exec_(client, f"{walk}{number}", command) for command in trajectory(number)]
                    assert {answer.headers["cache-status"] for answer in again} <= expected
                    assert all(before in (None, answer.json()) for before, answer in zip(received, again, strict=True))
        processes |= proxy.processes()
        groups += proxy.groups()
        proxy.stop()
        assert_nothing_left(proxy, processes, groups)


def test_call_in_flight_is_answered_before_stop(folder: Path) -> None:
    with served(folder) as proxy, httpx.Client(base_url=proxy.url, timeout=60) as client:
        answers: list[httpx.Response] = []
        calling = threading.Thread(target=lambda: answers.append(exec_(client, "r", "sleep 2; echo done")))
        calling.start()
        # A busy machine may show the sandboxes only after the call.
        wait_until(
            lambda: bool(answers) or "leased" in [box["state"] for box in proxy.view("sandboxes")["items"]],
            "no call is in flight",
        )
        processes, groups = proxy.processes(), proxy.groups()
        proxy.stop()
        calling.join()
        assert answers[0].json()["stdout"] == "done\n"
        assert_nothing_left(proxy, processes, groups)
        assert "stopped" in proxy.log().splitlines()[-1], "the log says that the end was in order"
        proxy.start()
        assert exec_(client, "other", "sleep 2; echo done").headers["cache-status"] == "forkpoint; hit"
        proxy.stop()
