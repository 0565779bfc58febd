"""Programs through a proxy and in private sandboxes, and the comparison of their answers, for `bench.differential`.

Each distinct program of a group runs once in a private sandbox, and a share of them twice. The second runs give the
noise floor. An answer of the proxy that differs from the private one gets more private runs, which decide:

1. A private run gives the proxy's answer: the answer depends on timing.
2. No private run gives it, and the private runs agree: the answer is wrong.
3. No private run gives it, and the private runs differ: the answer is random or unclear, and is shown.
"""

import json
import random
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.programs import Group, Program
from tests.machine import Served

CALL_S = 180.0
"""A call that has no answer after this long, retries included, counts as lost."""
MOST_RUNS = 6
"""Private runs of a program whose answer differs, before the answer is called wrong."""
RETRIED = {429, 503, 507}
MOVES = 0.2
"""Share of the calls before which an agent goes to another member of a cluster."""

Answer = tuple[Any, ...]
"""What an agent sees of a response, without the order of lines on standard error."""


@dataclass(slots=True)
class Difference:
    """An answer of the proxy that no private run gave.

    Attributes:
        position: The call's position in its program.
        how: How the proxy answered: the value of `cache-status`.
    """

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
        compared: Answers that were compared with those of private runs.
        timing: Answers that only a later private run gave.
        wrong: Answers that no private run gave although they agree, and values that a rollout read differently.
        unclear: Answers that no private run gave, where the private runs differ from each other.
        recalled: Random values that a rollout of its own read again.
        twice: Answers of programs that ran twice in private sandboxes.
        noise: Those of them that differ.
        hidden: Answers that were recorded and lost with a killed proxy's connection.
        lost: Rollouts that ended with an error, by kind.
        endings: The program of each rollout that ended with an error, up to the call that got it.
        sources: Answers by how the proxy gave them.
        strikes: Faults by kind.
    """

    programs: int = 0
    compared: int = 0
    timing: int = 0
    recalled: int = 0
    twice: int = 0
    noise: int = 0
    hidden: int = 0
    wrong: list[Difference] = field(default_factory=list)
    unclear: list[Difference] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    endings: list[tuple[str, Program]] = field(default_factory=list)
    strikes: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class Run:
    """The answers of one rollout; None for a hidden one. Shorter than the program if the rollout was lost."""

    answers: tuple[Answer | None, ...]
    sources: tuple[str, ...] = ()


def texts(program: Program) -> tuple[str, ...]:
    """Return the texts of a program's calls. Programs with equal texts are the same program."""
    return tuple(call.text for call in program)


class LostRolloutError(Exception):
    """A rollout received an error that no retry mends. The text is its kind."""


def visible(body: dict[str, Any]) -> Answer:
    """Return what can be compared of a response body: no pids, and standard error without its order."""
    if "stdout" in body:
        stdout = re.sub(r"/proc/\d+", "/proc/PID", body["stdout"])
        return stdout, sorted(body["stderr"].splitlines()), body["exit_code"], body["timed_out"]
    return (json.dumps(body, sort_keys=True),)


class Comparison:
    """Runs groups through a proxy and privately, and compares.

    Args:
        subjects: The proxy whose answers are compared, or all members of a cluster.
        private: The proxy that gives each rollout sandboxes of its own.
        clients: One of them makes the calls of a rollout.
        twice: The share of programs that run twice in private sandboxes, for the noise floor.
        in_turn: Whether a rollout begins when the one before has made its calls, and all stay open until the last ends.
    """

    def __init__(
        self,
        subjects: Sequence[Served],
        private: Served,
        tally: Tally,
        clients: Sequence[httpx.Client],
        twice: float,
        *,
        in_turn: bool = False,
    ) -> None:
        self._subjects, self._private, self._tally, self._clients = subjects, [private], tally, clients
        self._twice, self._in_turn = twice, in_turn

    def group(self, number: int, group: Group) -> None:
        """Run one group in both ways at the same time, and add its comparison to the tally."""
        task, alone = f"d{number}", f"p{number}"
        self._put(self._subjects[0], task, group.spec)
        self._put(self._private[0], alone, group.spec | {"cache": "never"})
        dice = random.Random(number)  # noqa: S311 - dice of a test
        # Half of the rollouts begin when others have ended, and find what those recorded.
        at_once = 1 if self._in_turn else -(-len(group.programs) // 2)
        with ThreadPoolExecutor(at_once) as cached, ThreadPoolExecutor(at_once) as threads:
            walks = [
                cached.submit(self._walk, self._subjects, task, f"r{at}", program)
                for at, program in enumerate(group.programs)
            ]
            distinct = {texts(program): program for program in group.programs}
            private = {
                name: [threads.submit(self._alone, alone, program) for _ in range(1 + (dice.random() < self._twice))]
                for name, program in distinct.items()
            }
            known = {name: [run.result() for run in runs] for name, runs in private.items()}
            for words, runs in known.items():
                self._count_noise(distinct[words], runs)
            for at, (program, walk) in enumerate(zip(group.programs, walks, strict=True)):
                self._compare(number, at, program, walk.result(), known[texts(program)], alone)
        for proxies, name in (self._subjects, task), (self._private, alone):
            self._request(proxies[0], "DELETE", f"/api/v1/tasks/{name}")

    def _count_noise(self, program: Program, runs: list[Run]) -> None:
        """Add the noise floor of one program that ran twice; a program that ran once has none."""
        if len(runs) < 2:
            return
        for call, one, other in zip(program, *(run.answers for run in runs), strict=False):
            if not call.random and call.recalls is None:
                with self._tally.lock:
                    self._tally.twice += 1
                    self._tally.noise += one != other

    def _compare(self, group: int, at: int, program: Program, run: Run, private: list[Run], alone: str) -> None:
        with self._tally.lock:
            self._tally.programs += 1
            self._tally.hidden += run.answers.count(None)
            self._tally.sources.update(run.sources)
        for position, answer in enumerate(run.answers):
            call = program[position]
            if answer is None or call.random:
                continue
            if call.recalls is not None:
                if (first := run.answers[call.recalls]) is not None:
                    with self._tally.lock:
                        self._tally.recalled += 1
                        if answer[0] != first[0]:
                            how = run.sources[position]
                            self._tally.wrong.append(Difference(group, at, position, program, first, answer, how))
                continue
            while answer not in _answers(private, position) and len(private) < MOST_RUNS:
                private.append(self._alone(alone, program))
            expected = _answers(private, position)
            with self._tally.lock:
                if not expected:
                    continue
                self._tally.compared += 1
                if answer not in expected:
                    agree = all(other == expected[0] for other in expected)
                    found = self._tally.wrong if agree else self._tally.unclear
                    found.append(Difference(group, at, position, program, expected[0], answer, run.sources[position]))
                elif answer != expected[0]:
                    self._tally.timing += 1

    def _alone(self, task: str, program: Program) -> Run:
        return self._walk(self._private, task, secrets.token_hex(6), program)

    def _walk(self, proxies: Sequence[Served], task: str, rollout: str, program: Program) -> Run:
        answers: list[Answer | None] = []
        sources: list[str] = []
        dice = random.Random(f"{task}/{rollout}")  # noqa: S311 - dice of a test
        proxy, client = dice.choice(proxies), dice.choice(self._clients)
        try:
            for number, call in enumerate(program):
                if dice.random() < MOVES:
                    proxy = dice.choice(proxies)
                response = self._call(
                    client, proxy, f"/t/{task}/r/{rollout}/{call.path}", call.arguments, (task, rollout, number)
                )
                answers.append(None if response is None else visible(response.json()))
                sources.append("" if response is None else response.headers["cache-status"].removeprefix("forkpoint; "))
        except LostRolloutError as error:
            kind = f"{'private: ' if proxies is self._private else ''}{error}"
            with self._tally.lock:
                self._tally.lost[kind] += 1
                self._tally.endings.append((f"{kind}, {task}/{rollout}", program[: len(answers) + 1]))
        if not self._in_turn:
            self._request(proxy, "DELETE", f"/api/v1/tasks/{task}/rollouts/{rollout}")
        return Run(tuple(answers), tuple(sources))

    def _call(
        self, client: httpx.Client, proxy: Served, path: str, arguments: Any, at: tuple[str, str, int]
    ) -> httpx.Response | None:
        """Repeat a call until it is answered; None if it was recorded and its answer was lost with the connection."""
        deadline, unsure, problem = time.monotonic() + CALL_S, False, "no answer in time"
        task, rollout, number = at
        while time.monotonic() < deadline:
            try:
                if unsure:
                    shown = client.get(f"{proxy.url}/api/v1/tasks/{task}/rollouts/{rollout}?limit=1")
                    if shown.is_success and int(shown.json()["calls"]) > number:
                        return None
                    unsure = shown.status_code in RETRIED
                    if unsure:
                        continue
                response = client.post(proxy.url + path, json=arguments)
            except httpx.TransportError:
                unsure = True
                time.sleep(0.1)
                continue
            if response.is_success:
                return response
            if response.headers.get("content-type") != "application/problem+json":
                # The web server's own answer: the proxy failed, and may have recorded the call.
                unsure, problem = True, f"{response.status_code} without problem details"
                with self._tally.lock:
                    self._tally.strikes[f"answered {problem}"] += 1
                continue
            problem = f"{response.status_code} {response.json()['type'].rpartition(':')[2]}"
            if response.status_code not in RETRIED:
                break
            time.sleep(0.2)
        raise LostRolloutError(problem)

    def _put(self, proxy: Served, task: str, spec: dict[str, Any]) -> None:
        response = self._request(proxy, "PUT", f"/api/v1/tasks/{task}", spec)
        if response is None or not response.is_success:
            raise RuntimeError(f"the task {task} is refused: {response and response.text}")

    def _request(self, proxy: Served, method: str, path: str, body: Any = None) -> httpx.Response | None:
        deadline = time.monotonic() + CALL_S
        while time.monotonic() < deadline:
            try:
                response = self._clients[0].request(method, proxy.url + path, json=body)
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
