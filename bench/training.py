"""GRPO with and without the cache: `python -m bench.training --tasks steady --seeds 1 2 --out FILE`. Needs ffmpeg.

All arms train the same transformer (`bench.policy`) from the same seeds on the same tasks (`bench.training_tasks`). In
the arm `cached`, tools run behind Forkpoint; in the arm `uncached`, tasks have `"cache": "never"`, and each call is
executed. Tools of `steady` tasks are deterministic, so both arms must be equal. Those of `noisy` tasks are not: there
the arm `repeated` is `uncached` once more, and shows how much chance alone changes. In the arm `once`, answers that are
random are recorded for all rollouts too (`"volatile": "once"`).

With `steady` tasks, the proxy is stopped after each epoch and started on the same data. `bench.results` makes the
tables and plots of the results. Runs of other seeds that FILE has are kept.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

import forkpoint
from bench.machine import machine
from bench.policy import Policy, Text
from bench.training_tasks import TURNS, TrainingTask, noisy, steady
from examples.make_clip import make
from forkpoint.client import Client
from forkpoint.errors import ForkpointError
from forkpoint.results import CallResult

GROUP, EPOCHS, SCENE_S, SLOW_S, TRIES = 8, 16, 1.0, 0.05, 5
ARMS = {"steady": ("cached", "uncached"), "noisy": ("cached", "uncached", "repeated", "once")}
_NEVER = {"cache": "never"}
_SPECS: Mapping[str, Mapping[str, str]] = {
    "cached": {}, "uncached": _NEVER, "repeated": _NEVER, "once": {"volatile": "once"},
}  # fmt: skip
"""What the specs of tasks have beside their environment, by arm."""


@dataclass(frozen=True)
class Called:
    """A call as the trainer saw it. seconds: from the request to the response. digest: of what the policy saw."""

    kind: str
    seconds: float
    tool_s: float
    hit: bool
    digest: str


@dataclass
class Played:
    """A rollout that has ended. lost: how often it was begun again, because a random state could not be reached."""

    text: Text
    calls: list[Called] = field(default_factory=list)
    reward: float = 0.0
    lost: int = 0


@dataclass
class Arm:
    """One training run. weights: a digest of the policy at its end."""

    epochs: list[dict[str, float]] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    weights: str = ""

    def summary(self) -> dict[str, Any]:
        kinds = sorted({call.kind for call in self.calls})
        of = {kind: [call for call in self.calls if call.kind == kind] for kind in kinds}
        return {
            "epochs": self.epochs,
            "weights": self.weights,
            "wall_s": sum(epoch["wall_s"] for epoch in self.epochs),
            "tool_s": sum(call.tool_s for call in self.calls),
            "calls": {kind: len(calls) for kind, calls in of.items()},
            "hit_rate": {kind: statistics.mean(call.hit for call in calls) for kind, calls in of.items()},
            "median_call_s": {kind: statistics.median(call.seconds for call in calls) for kind, calls in of.items()},
            "mean_call_s": {kind: statistics.mean(call.seconds for call in calls) for kind, calls in of.items()},
            "median_tool_s": {kind: statistics.median(call.tool_s for call in calls) for kind, calls in of.items()},
        }


def play(client: Client, policy: Policy, task: TrainingTask, number: int, seed: Sequence[int]) -> Played:
    """Play one rollout. If its state is lost (409), it begins again, as a trainer's would."""
    for lost in range(TRIES):
        try:
            return replace(_play(client, policy, task, number, seed), lost=lost)
        except ForkpointError as error:
            if error.slug != "state-lost" or lost == TRIES - 1:
                raise
    raise AssertionError


def _play(client: Client, policy: Policy, task: TrainingTask, number: int, seed: Sequence[int]) -> Played:
    """Play one rollout once. Its random numbers depend on its seed alone, and not on which thread is first."""
    generator, played = np.random.default_rng(seed), Played(Text([number]))
    labels: dict[str, str | float] = {"run": f"seed-{seed[0]}", "epoch": seed[1]}
    calls: list[str] = []

    def call(text: str) -> str:
        began = time.perf_counter()
        result, output = task.call(rollout, text)
        played.calls.append(_called(task, time.perf_counter() - began, result, output))
        return output

    with client.task(task.name).rollout(labels=labels) as rollout:
        for _ in range(TURNS):
            written = policy.write(number, played.text, generator)
            calls.append(" ".join(words[word] for words, word in zip(task.slots, written, strict=True)))
            played.text.tokens += policy.tokenizer.read(call(calls[-1]))
        played.reward = task.reward(calls, call(task.grade) if task.grade is not None else "")
    return played


def _called(task: TrainingTask, seconds: float, result: CallResult, output: str) -> Called:
    digest = sha256(output.encode()).hexdigest()
    return Called(task.kind, seconds, 0.0 if result.hit else result.tool_s, result.hit, digest)


def epoch(client: Client, policy: Policy, chosen: Sequence[TrainingTask], seed: int, number: int) -> list[Played]:
    """Play a group of each task and learn from all of them; return the rollouts in their order."""
    played: list[Played] = []
    with ThreadPoolExecutor(GROUP) as threads:
        for index, task in enumerate(chosen):
            seeds = [(seed, number, index, one) for one in range(GROUP)]
            group = list(threads.map(lambda each, i=index, t=task: play(client, policy, t, i, each), seeds))
            rewards = np.array([one.reward for one in group])
            for one, advantage in zip(group, (rewards - rewards.mean()) / (rewards.std() + 1e-4), strict=True):
                one.text.advantage = float(advantage)
            played += group
    policy.learn([one.text for one in played])
    return played


def run(arm: str, chosen: Sequence[TrainingTask], seed: int, epochs: int, data: Path, *, restarts: bool = True) -> Arm:
    """Train a policy from a seed; restarts: whether each epoch has a new proxy process, on the same data."""
    policy, done = Policy([task.slots for task in chosen], TURNS, seed), Arm()
    drivers = sorted({str(task.spec.get("driver", "local")) for task in chosen})
    with ExitStack() as process:
        for number in range(epochs):
            if number == 0 or restarts:
                process.close()
                client = process.enter_context(forkpoint.local(data, drivers=drivers))
            if number == 0:
                for task in chosen:
                    client.task(task.name).put({**task.spec, **_SPECS[arm]})
            began = time.perf_counter()
            played = epoch(client, policy, chosen, seed, number)
            wall_s = time.perf_counter() - began
            calls = [call for one in played for call in one.calls]
            done.calls += calls
            done.epochs.append({
                "reward": statistics.mean(one.reward for one in played),
                # After the epoch's update.
                "kl": policy.kl([one.text for one in played]),
                "hit_rate": statistics.mean(call.hit for call in calls),
                "tool_s": sum(call.tool_s for call in calls),
                "wall_s": wall_s,
                "lost": sum(one.lost for one in played),
            })  # fmt: skip
            print(f"seed {seed} {arm} epoch {number}: {done.epochs[-1]}", file=sys.stderr)
    done.weights = policy.digest()
    return done


def compared(cached: Arm, uncached: Arm) -> dict[str, Any]:
    """Return where two arms are equal, call by call and epoch by epoch."""
    pairs = list(zip(cached.calls, uncached.calls, strict=True))
    both = list(zip(cached.epochs, uncached.epochs, strict=True))
    return {
        "outputs": len(pairs),
        "equal_outputs": sum(a.digest == b.digest for a, b in pairs),
        "equal_rewards": all(a["reward"] == b["reward"] for a, b in both),
        "equal_kl": all(a["kl"] == b["kl"] for a, b in both),
        "equal_weights": cached.weights == uncached.weights,
        "slow": {kind: _slow(pairs, kind) for kind in sorted({call.kind for call in cached.calls})},
    }


def _slow(pairs: Sequence[tuple[Called, Called]], kind: str) -> dict[str, float]:
    """Return the median seconds of calls in both arms, of those whose tool was slow without the cache."""
    slow = [pair for pair in pairs if pair[0].kind == kind and pair[1].tool_s >= SLOW_S]
    medians = [statistics.median(call.seconds for call in arm) for arm in zip(*slow, strict=True)] or [0.0, 0.0]
    return {"calls": len(slow), "cached_s": medians[0], "uncached_s": medians[1]}


def train(kind: str, seed: int, epochs: int, folder: Path) -> dict[str, Any]:
    """Train all arms from a seed, at once, so that they meet the same load. Each has its own data and its own proxy."""
    names, database = ARMS[kind], folder / "shop.sqlite"
    if kind == "steady":
        make(folder / "clip.mp4", SCENE_S)
        chosen = steady(folder / "clip.mp4", database)
    else:
        chosen = noisy(database)

    def train_arm(arm: str) -> Arm:
        return run(arm, chosen, seed, epochs, folder / arm, restarts=kind == "steady")

    with ThreadPoolExecutor(len(names)) as threads:
        done = dict(zip(names, threads.map(train_arm, names), strict=True))
    more = compared(done["cached"], done["uncached"]) if kind == "steady" else {}
    return {"seed": seed, "arms": {name: arm.summary() for name, arm in done.items()}, **more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", choices=list(ARMS), default="steady")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    settings = {"group": GROUP, "epochs": options.epochs, "turns": TURNS}
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    runs = {run["seed"]: run for run in kept.get("runs", []) if kept["settings"] == settings}
    for seed in options.seeds:
        began_on = machine()
        with tempfile.TemporaryDirectory(prefix="forkpoint-bench-", dir="/var/tmp") as folder:
            runs[seed] = {"machine": began_on, **train(options.tasks, seed, options.epochs, Path(folder))}
        seeds = " ".join(map(str, sorted(runs)))
        command = f"python -m bench.training --tasks {options.tasks} --seeds {seeds} --epochs {options.epochs}"
        result = {"command": command, "settings": settings, "runs": [runs[each] for each in sorted(runs)]}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
