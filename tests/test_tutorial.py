"""The lines of the page of trainers train: with a stand-in for TRL here, and with TRL itself where it is installed."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from forkpoint.trl import ForkpointShell
from tests.agents.clients import run
from tests.agents.serving import real_proxy
from tests.machine import require_sandboxes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "agents" / "trainers.md"
COMMANDS = [["pwd", "touch done"], ["pwd", "ls"], ["pwd", "touch done"]]
REWARDS: list[float] = []


class GRPOTrainer:
    """Does with environments what TRL 1.16 does in a step: one for each rollout, reset with the row's columns."""

    def __init__(
        self, model: str, reward_funcs: Callable[..., list[float]], args: Any, train_dataset: list[dict[str, Any]],
        *, environment_factory: type[ForkpointShell],
    ) -> None:  # fmt: skip
        assert (model, args.num_generations, args.max_steps) == ("Qwen/Qwen3-0.6B", 8, 1)
        self.reward, self.rows, self.factory = reward_funcs, train_dataset, environment_factory

    def train(self) -> None:
        environments = []
        for row, commands in zip(self.rows, COMMANDS, strict=False):
            environment = self.factory()
            environment.reset(**row)
            for command in commands:
                environment.bash(command)
            environments.append(environment)
        state, prompts = SimpleNamespace(global_step=0), [row["prompt"] for row in self.rows]
        REWARDS.extend(self.reward(environments=environments, prompts=prompts, trainer_state=state))
        for environment in environments:
            environment._end()


def block() -> str:
    return PAGE.read_text().split("```python\n")[1].split("```")[0]


def test_tutorial_takes_at_most_ten_lines() -> None:
    assert len([line for line in block().splitlines() if line.strip()]) <= 10


def test_tutorial_trains_on_cached_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    require_sandboxes()
    trl, datasets = ModuleType("trl"), ModuleType("datasets")
    trl.GRPOTrainer, trl.GRPOConfig = GRPOTrainer, SimpleNamespace  # type: ignore[attr-defined]
    datasets.Dataset = SimpleNamespace(from_list=list)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    with real_proxy() as proxy:
        monkeypatch.setenv("FORKPOINT_URL", proxy.url)
        exec(compile(block(), str(PAGE), "exec"), {})  # noqa: S102 - what the page shows
        rollouts = proxy.client.get("/api/v1/tasks/first/rollouts").json()["items"]
        outcomes = [proxy.outcomes("first", row["rollout"]) for row in rollouts]
    assert REWARDS == [1.0, 0.0, 1.0]
    assert [row["labels"] for row in rollouts] == [{"step": 0, "reward": value} for value in REWARDS]
    # The last `ls` of each is the reward's: in the second rollout its agent has made that call at the same state.
    assert outcomes == [["miss"] * 3, ["hit", "miss", "hit"], ["hit"] * 3]


def test_tutorial_trains_with_trl(tmp_path: Path) -> None:
    """A step of GRPO with TRL, torch on the CPU and a small random model: its group calls tools, and shares calls."""
    python = os.environ.get("FORKPOINT_TRL_PYTHON")
    if not python:
        pytest.skip("FORKPOINT_TRL_PYTHON names no Python with trl, torch, jmespath and httpx; `.ci/trl` makes one")
    require_sandboxes()
    with real_proxy() as proxy:
        more = {"FORKPOINT_URL": proxy.url, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
        result = run(ROOT, "trl_client.py", str(tmp_path / "model"), "1", python=python, env=more, within_s=600)
        [task] = proxy.client.get("/api/v1/tasks").json()["items"]
    [step] = result["steps"]
    assert step["tools/call_frequency"] > 1
    assert step["tools/failure_frequency"] == 0
    # Eight rollouts, and the reward's call in each.
    assert task["calls"] == 8 * step["tools/call_frequency"] + 8
    assert task["hit_rate"] > 0.3
