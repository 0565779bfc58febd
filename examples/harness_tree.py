"""Branching GRPO and best-of-n with an agent inside its sandbox: rollouts begin at the turns of another one.

    python examples/harness_tree.py TASK MODEL GRADE

TASK has a `harness` (docs/agents/harness.md). The model of a rollout is at MODEL/{rollout}, so that the trainer knows
whose tokens it samples. GRADE is a shell command that prints a rollout's reward.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean, pstdev

from forkpoint.client import Client, Task


@dataclass(frozen=True)
class Branch:
    """A rollout, with the turn at which it leaves its parent, its reward, and its advantage among its siblings."""

    name: str
    parent: str | None
    turn: int | None
    reward: float
    advantage: float = 0.0


def run(task: Task, name: str, model: str, grade: str, parent: str | None = None, turn: int | None = None) -> Branch:
    """Run a rollout to its end, and label it with its reward."""
    rollout = task.rollout(name)
    rollout.harness(f"{model}/{name}", parent=parent, turn=turn)
    reward = float(rollout.exec(grade).stdout)
    rollout.label(reward=reward, parent=parent or "", turn=-1 if turn is None else turn)
    rollout.finish()
    return Branch(name, parent, turn, reward)


def siblings(task: Task, model: str, grade: str, parent: str, turn: int, count: int) -> list[Branch]:
    """Run rollouts that leave a parent at one turn. Their advantage is against one another: they share all before."""
    names = [f"{parent}-{turn}-{number}" for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        branches = list(pool.map(lambda name: run(task, name, model, grade, parent, turn), names))
    rewards = [branch.reward for branch in branches]
    mean, spread = fmean(rewards), pstdev(rewards) or 1.0
    return [Branch(b.name, b.parent, b.turn, b.reward, (b.reward - mean) / spread) for b in branches]


def branching_grpo(task: Task, model: str, grade: str, turns: list[int], count: int) -> list[Branch]:
    """Return a first rollout and, for each of these turns, a group of rollouts that leave it there."""
    first = run(task, "first", model, grade)
    return [first] + [each for turn in turns for each in siblings(task, model, grade, first.name, turn, count)]


def best_of(task: Task, model: str, grade: str, parent: str, turn: int, count: int) -> Branch:
    """Return the best of some rollouts that leave a parent at a turn."""
    return max(siblings(task, model, grade, parent, turn, count), key=lambda branch: branch.reward)


if __name__ == "__main__":
    name, model, grade = sys.argv[1:]
    with Client() as client:
        for branch in branching_grpo(client.task(name), model, grade, turns=[1, 2], count=4):
            print(
                f"{branch.name:12} leaves at {branch.turn}: reward {branch.reward:g}, advantage {branch.advantage:+.2f}"
            )
