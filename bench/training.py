"""GRPO with and without the cache: `python -m bench.training --out docs/results/training.json`. Needs ffmpeg.

Both arms train the same policy from the same seeds on the same tasks (`bench.training_tasks`). In the arm `cached`,
tools run behind Forkpoint; in the arm `uncached`, tasks have `"cache": "never"`, and each call is executed. The proxy
is stopped after each epoch and started on the same data. `bench.results` makes the tables and plots of the result.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

import forkpoint
from bench.machine import machine
from bench.policy import Policy, Turn
from bench.training_tasks import MOVES, TURNS, TrainingTask, tasks
from examples.make_clip import make
from forkpoint.client import Client

GROUP, EPOCHS, SCENE_S = 8, 12, 1.0


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
    """A rollout that has ended."""

    turns: list[Turn] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    reward: float = 0.0


@dataclass
class Arm:
    """One training run."""

    epochs: list[dict[str, float]] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        kinds = sorted({call.kind for call in self.calls})
        of = {kind: [call for call in self.calls if call.kind == kind] for kind in kinds}
        return {
            "epochs": self.epochs,
            "wall_s": sum(epoch["wall_s"] for epoch in self.epochs),
            "tool_s": sum(call.tool_s for call in self.calls),
            "calls": {kind: len(calls) for kind, calls in of.items()},
            "hit_rate": {kind: statistics.mean(call.hit for call in calls) for kind, calls in of.items()},
            "median_call_s": {kind: statistics.median(call.seconds for call in calls) for kind, calls in of.items()},
            "mean_call_s": {kind: statistics.mean(call.seconds for call in calls) for kind, calls in of.items()},
            "median_tool_s": {kind: statistics.median(call.tool_s for call in calls) for kind, calls in of.items()},
        }


def play(client: Client, policy: Policy, task: TrainingTask, number: int, seed: Sequence[int]) -> Played:
    """Play one rollout. Its random numbers depend on its seed alone, and not on which thread is first."""
    generator, played = np.random.default_rng(seed), Played()
    labels: dict[str, str | float] = {"run": f"seed-{seed[0]}", "epoch": seed[1]}
    with client.task(task.name).rollout(labels=labels) as rollout:
        last, output = None, ""
        for turn in range(TURNS):
            seen = policy.look(number, turn, last, output)
            chances = policy.probabilities(seen)
            last = int(generator.choice(MOVES, p=chances))
            began = time.perf_counter()
            result, output = task.call(rollout, task.moves[last])
            _note(played, task, began, result, output)
            played.turns.append(Turn(seen, last, float(chances[last])))
        began = time.perf_counter()
        played.reward, graded = task.reward(rollout, [turn.move for turn in played.turns])
        for result, text in graded:
            _note(played, task, began, result, text)
    return played


def _note(played: Played, task: TrainingTask, began: float, result: Any, output: str) -> None:
    digest = sha256(output.encode()).hexdigest()
    seconds = time.perf_counter() - began
    played.calls.append(Called(task.kind, seconds, 0.0 if result.hit else result.tool_s, result.hit, digest))


def epoch(client: Client, policy: Policy, chosen: Sequence[TrainingTask], seed: int, number: int) -> list[Played]:
    """Play a group of each task and learn from all of them; return the rollouts in their order."""
    played: list[Played] = []
    learned: list[Turn] = []
    with ThreadPoolExecutor(GROUP) as threads:
        for index, task in enumerate(chosen):
            seeds = [(seed, number, index, one) for one in range(GROUP)]
            group = list(threads.map(lambda each, i=index, t=task: play(client, policy, t, i, each), seeds))
            rewards = np.array([one.reward for one in group])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for one, advantage in zip(group, advantages, strict=True):
                learned += [replace(turn, advantage=float(advantage)) for turn in one.turns]
            played += group
    policy.learn(learned)
    return played


def run(arm: str, chosen: Sequence[TrainingTask], seed: int, epochs: int, data: Path) -> Arm:
    """Train a policy from a seed."""
    policy, done = Policy(len(chosen), TURNS, MOVES, seed), Arm()
    for number in range(epochs):
        with forkpoint.local(data, drivers=["local", "sqlite", "video"]) as client:
            if number == 0:
                more = {"cache": "never"} if arm == "uncached" else {}
                for task in chosen:
                    client.task(task.name).put({**task.spec, **more})
            began = time.perf_counter()
            played = epoch(client, policy, chosen, seed, number)
            wall_s = time.perf_counter() - began
        calls = [call for one in played for call in one.calls]
        done.calls += calls
        done.epochs.append({
            "reward": statistics.mean(one.reward for one in played),
            "kl": policy.kl([turn for one in played for turn in one.turns]),
            "hit_rate": statistics.mean(call.hit for call in calls),
            "tool_s": sum(call.tool_s for call in calls),
            "wall_s": wall_s,
        })  # fmt: skip
        print(f"seed {seed} {arm} epoch {number}: {done.epochs[-1]}", file=sys.stderr)
    return done


def compared(arms: dict[str, Arm]) -> dict[str, Any]:
    """Return where two arms are equal, call by call and epoch by epoch."""
    pairs = list(zip(arms["cached"].calls, arms["uncached"].calls, strict=True))
    both = list(zip(arms["cached"].epochs, arms["uncached"].epochs, strict=True))
    return {
        "outputs": len(pairs),
        "equal_outputs": sum(a.digest == b.digest for a, b in pairs),
        "equal_rewards": all(a["reward"] == b["reward"] for a, b in both),
        "equal_kl": all(a["kl"] == b["kl"] for a, b in both),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    began_on = machine()
    runs = []
    with tempfile.TemporaryDirectory(prefix="forkpoint-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        make(folder / "clip.mp4", SCENE_S)
        chosen = tasks(folder / "clip.mp4", folder / "shop.sqlite")
        for seed in options.seeds:
            # At once, so that both meet the same load of the machine; each has its own data and its own proxy.
            order = ("cached", "uncached")
            with ThreadPoolExecutor(len(order)) as threads:
                each = threads.map(
                    lambda arm, n=seed: run(arm, chosen, n, options.epochs, folder / f"{arm}-{n}"), order
                )
                arms = dict(zip(order, each, strict=True))
            summaries = {arm: done.summary() for arm, done in sorted(arms.items())}
            runs.append({"seed": seed, "arms": summaries, **compared(arms)})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    command = f"python -m bench.training --seeds {' '.join(map(str, options.seeds))} --epochs {options.epochs}"
    settings = {"group": GROUP, "epochs": options.epochs, "turns": TURNS, "tasks": [[t.name, t.kind] for t in chosen]}
    result = {"command": command, "machine": began_on, "settings": settings, "runs": runs}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
