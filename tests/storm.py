"""A kill storm: rollouts run while sandboxes, the proxy and dockerd are killed at random."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.dockerd import Dockerd
from tests.machine import Process, Proxy, alive, is_sandbox, leftovers, process, unnamed
from tests.sandboxes.docker import BASH_IMAGE
from tests.sandboxes.image_archives import bash_image
from tests.trajectories import SETUP, WORK, Turn, choices, trajectory

CALL_S = 180.0
"""A call without an answer after this long, retries included, counts as given up."""
_AGAIN = {429, 503, 507}
_WEIGHTS = {"sandbox": 8, "proxy": 2, "dockerd": 1, "both": 1}


@dataclass(frozen=True, slots=True)
class Wrong:
    """An answer that differs from the model of the trajectory."""

    rollout: str
    turn: int
    expected: Turn
    actual: Any
    how: str


class GivenUp(Exception):  # noqa: N818 - names how a rollout ended
    """A rollout got no answer."""


@dataclass
class Storm:
    """A storm over one proxy.

    Attributes:
        rollouts: Number of rollouts by the driver of their tasks; `image` is `local` on an image.
        hidden: Recorded calls whose answer was lost because the proxy was killed.
        errors: Number of errors of each kind.
        kills: Number of kills of each kind.
        gone_s: Seconds from the last restart until no earlier process ran any more.
        remains: What dockerd itself left behind; it cannot be asked to remove it.
    """

    proxy: Proxy
    dockerd: Dockerd | None
    rollouts: dict[str, int]
    seed: int
    every_s: float = 1.0
    length: int = 10
    at_once: int = 12
    tasks: int = 3
    calls: int = 0
    hidden: int = 0
    wrong: list[Wrong] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    processes: set[Process] = field(default_factory=set)
    groups: set[Path] = field(default_factory=set)
    gone_s: float = 0.0
    remains: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)  # noqa: S311 - dice of a test
        self._lock, self._over = threading.Lock(), threading.Event()
        self._client = httpx.Client(base_url=self.proxy.url, timeout=120, trust_env=False)

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all rollouts in the storm; then repeat every trajectory without kills."""
        with self._client:
            for driver in self.rollouts:
                for number in range(self.tasks):
                    self._put(f"{driver}-{number}", driver)
            walks = [
                (f"{driver}-{number % self.tasks}", self.seed + number % self.tasks, choices(number, self.length))
                for driver, count in self.rollouts.items()
                for number in range(count)
            ]
            self._dice.shuffle(walks)
            with ThreadPoolExecutor(self.at_once) as threads:
                walking = [threads.submit(self._walk, f"r{number}", *walk) for number, walk in enumerate(walks)]
                try:
                    while wait(walking, timeout=self._dice.uniform(0.2, 1.8) * self.every_s).not_done:
                        self._strike()
                except BaseException:
                    self._over.set()
                    raise
                for walk in walking:
                    walk.result()
                again = sorted(set(walks))
                walking = [threads.submit(self._walk, f"again{number}", *walk) for number, walk in enumerate(again)]
                for walk in walking:
                    walk.result()

    def _put(self, task: str, driver: str) -> None:
        spec = {"driver": driver, "workdir": WORK, "setup": SETUP}
        if driver == "image":
            spec |= {"driver": "local", "image": bash_image() if self.dockerd is None else BASH_IMAGE}
        self._client.put(f"/api/v1/tasks/{task}", json=spec).raise_for_status()

    def _walk(self, rollout: str, task: str, seed: int, chosen: Sequence[int]) -> None:
        for number, turn in enumerate(trajectory(seed, chosen)):
            try:
                self._check(rollout, number, turn, self._ask(task, rollout, number, turn))
            except GivenUp as reason:
                with self._lock:
                    self.given_up.append(f"{task}/{rollout}, call {number}, {turn.command!r}: {reason}")
                return

    def _check(self, rollout: str, number: int, turn: Turn, answer: httpx.Response | None) -> None:
        with self._lock:
            self.calls += 1
            if answer is None:
                self.hidden += 1
                return
            how = answer.headers["cache-status"]
            self.sources[how.removeprefix("forkpoint; ")] += 1
            actual = answer.json()
            if (actual["stdout"], actual["stderr"], actual["exit_code"]) != (turn.out, "", turn.code):
                self.wrong.append(Wrong(rollout, number, turn, actual, how))

    def _ask(self, task: str, rollout: str, number: int, turn: Turn) -> httpx.Response | None:
        """Repeat a call until it is answered; None if it was recorded and its answer was lost with the connection."""
        deadline, unsure, problem = time.monotonic() + CALL_S, False, ""
        while time.monotonic() < deadline and not self._over.is_set():
            try:
                if unsure and self._taken(task, rollout) > number:
                    return None
                unsure = False
                answer = self._client.post(f"/t/{task}/r/{rollout}/shell/exec", json={"command": turn.command})
            except httpx.TransportError:
                self._count("connection")
                unsure = True
                # Not sooner: the clients take the CPU with which the proxy starts again.
                time.sleep(0.2)
                continue
            if answer.is_success:
                return answer
            problem = answer.text
            is_problem = answer.headers.get("content-type") == "application/problem+json"
            kind = answer.json()["type"].rpartition(":")[2] if is_problem else "without problem details"
            self._count(f"{answer.status_code} {kind}")
            # The web server's own answer: the proxy had no memory left for one, and may have recorded the call.
            unsure = not is_problem
            if is_problem and answer.status_code not in _AGAIN:
                break
            time.sleep(0.2)
        raise GivenUp(problem)

    def _taken(self, task: str, rollout: str) -> int:
        """Return the number of the rollout's calls that the proxy recorded."""
        shown = self._client.get(f"/api/v1/tasks/{task}/rollouts/{rollout}?limit=1")
        if shown.status_code in _AGAIN:
            raise httpx.ReadError("not ready yet")
        return int(shown.json()["calls"]) if shown.status_code != 404 else 0

    def _count(self, error: str) -> None:
        with self._lock:
            self.errors[error] += 1

    # -- kills -------------------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        kinds = [kind for kind in _WEIGHTS if self.dockerd is not None or kind in ("sandbox", "proxy")]
        kind = self._dice.choices(kinds, [_WEIGHTS[kind] for kind in kinds])[0]
        if kind == "sandbox":
            self._kill_sandbox()
        if kind in ("dockerd", "both"):
            assert self.dockerd is not None
            self.dockerd.kill()
        if kind in ("proxy", "both"):
            self.kill_proxy()
        if kind in ("dockerd", "both"):
            assert self.dockerd is not None
            # While the daemon is down, requests to it fail.
            time.sleep(self._dice.uniform(0, 0.5))
            self.dockerd.start()
        if kind in ("proxy", "both"):
            self.proxy.start()
        self.kills[kind] += 1

    def _kill_sandbox(self) -> None:
        if here := sorted(candidate for candidate in self.proxy.processes() if is_sandbox(candidate[0])):
            pid, began = self._dice.choice(here)
            if process(pid) == (pid, began):
                os.kill(pid, signal.SIGKILL)

    def kill_proxy(self) -> None:
        """Note the proxy's processes and control groups, and kill it."""
        self._note()
        self.proxy.kill()

    def _note(self) -> None:
        """Remember all processes and control groups, to look for them afterwards."""
        self.processes |= self.proxy.processes()
        self.groups |= set(self.proxy.groups())

    # -- afterwards --------------------------------------------------------------------------------------------------

    def leftovers(self, after_s: float) -> list[str]:
        """Kill and restart the proxy, wait at most `after_s` until all earlier processes are gone, and stop it.

        Returns:
            What is left behind.
        """
        self.kill_proxy()
        before = set(self.processes)
        self.proxy.start()
        ready = time.monotonic()
        remaining = [f"unreferenced: {path}" for path in unnamed(self.proxy)]
        # Without rollouts the proxy makes no sandboxes, so earlier processes end and are not replaced.
        while alive(before) and time.monotonic() < ready + after_s:
            time.sleep(0.1)
        self.gone_s = time.monotonic() - ready
        self._note()
        remaining += [f"earlier process {pid}" for pid, _ in alive(before)]
        self.proxy.stop()
        remaining += leftovers(self.proxy, self.processes, sorted(self.groups))
        if self.dockerd is not None:
            # One container keeps the image for as long as kept states need it. It was never started.
            kept = self.dockerd.ask("ps", "--all", "--format", "{{.Names}} {{.Status}}").splitlines()
            remaining += [f"container {line}" for line in kept if not line.startswith("forkpoint-pin-")]
            remaining += [f"container {line}" for line in kept[1:]]
            dangling = self.dockerd.ask("images", "--filter", "dangling=true", "--quiet").split()
            remaining += [f"image {image}" for image in dangling]
            self.dockerd.stop()
            remaining += self.dockerd.living()
            self.remains = self.dockerd.remains()
        return remaining
