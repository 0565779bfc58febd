"""The shims for veRL and TRL run as their trainers run them. The trainers are too heavy to install here.

The stand-in for veRL has the interfaces of the wheel of 0.9.1 (`verl/tools/base_tool.py`, `schemas.py`) and calls like
its `tool_agent_loop.py`. TRL's calls are the calls of `grpo_trainer.py` of 1.16.
"""

import asyncio
import gc
import importlib.util
import inspect
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from forkpoint import ForkpointError
from forkpoint.results import ShellResult
from forkpoint.trl import ForkpointShell, labelled
from proxy.tree.rollout import Outcome
from tests.proxy.serving import Running, serving

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path) as running:
        yield running


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BaseTool:
    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config, self.tool_schema = config, tool_schema

    async def create(self, instance_id: str | None = None, **_: Any) -> tuple[str, Any]:
        return instance_id or str(uuid.uuid4()), SimpleNamespace(text=None)

    async def release(self, instance_id: str, **_: Any) -> None: ...


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    base, schemas = ModuleType("verl.tools.base_tool"), ModuleType("verl.tools.schemas")
    base.BaseTool, schemas.ToolResponse = BaseTool, SimpleNamespace  # type: ignore[attr-defined]
    for module in (ModuleType("verl"), ModuleType("verl.tools"), base, schemas):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return loaded("verl_tool")


async def _verl_calls(tool: Any, rollout: str, *commands: str) -> list[str]:
    """Run commands as the tool agent loop does, with an instance for each call; return their outputs."""
    outputs = []
    for command in commands:
        instance, _ = await tool.create(create_kwargs={"task": "t"})
        agent_data = SimpleNamespace(request_id=rollout)
        response, reward, _ = await tool.execute(instance, {"command": command}, agent_data=agent_data)
        await tool.release(instance)
        assert reward == 0.0
        outputs.append(response.text)
    return outputs


def test_verl_group_shares_its_prefix(proxy: Running, verl: ModuleType) -> None:
    """Three trajectories begin with the same commands and diverge; two of them hit twice."""

    async def go() -> list[list[str]]:
        tool = verl.ForkpointShell({"url": str(proxy.client.base_url)}, None)
        async with tool._client:
            prefix = ("echo one > f", "cat f")
            return [await _verl_calls(tool, f"r{n}", *prefix, f"echo {n} >> f", "cat f") for n in range(3)]

    assert asyncio.run(go()) == [["", "one\n", "", f"one\n{n}\n"] for n in range(3)]
    assert proxy.engine.counts.outcomes[Outcome.HIT] == 4


def test_failed_verl_call_raises(proxy: Running, verl: ModuleType) -> None:
    """The tool agent loop expects an exception and makes an observation of it."""

    async def go() -> None:
        tool = verl.ForkpointShell({"url": str(proxy.client.base_url)}, None)
        async with tool._client:
            await _verl_calls(tool, "r" * 300, "true")

    with pytest.raises(ForkpointError, match=r"4[0-9][0-9]"):
        asyncio.run(go())


def test_trl_group_shares_its_prefix_until_reset(proxy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three environments begin with the same commands and diverge. A reset begins a new rollout at the root."""
    monkeypatch.setenv("FORKPOINT_URL", str(proxy.client.base_url))
    group = [ForkpointShell() for _ in range(3)]
    for environment in group:
        environment.reset(task="t", prompt=[])
        assert [environment.bash("echo one > f"), environment.bash("cat f")] == ["", "one\n"]
    assert proxy.engine.counts.outcomes[Outcome.HIT] == 4
    for n, environment in enumerate(group):
        environment.bash(f"echo {n} >> f")
        assert environment.bash("cat f") == f"one\n{n}\n"
    group[0].reset(task="t", prompt=[])
    assert group[0].bash("cat f") == "cat: f: No such file or directory\n[exit code 1]\n"
    for environment in group:
        environment._end()


def test_trl_labels_rollouts_and_finishes_the_last(proxy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKPOINT_URL", str(proxy.client.base_url))
    monkeypatch.setenv("FORKPOINT_RUN", "r7")
    group = [ForkpointShell(), ForkpointShell()]
    for environment in group:
        environment.reset(task="t", prompt=[], id=5)
    state = SimpleNamespace(global_step=3)
    assert (
        labelled(lambda environments, **_: [float(len(e.bash("false"))) for e in environments])(
            environments=group, prompts=[[], []], trainer_state=state
        )
        == [len("[exit code 1]\n")] * 2
    )
    # Another function has no value for these rollouts, and leaves theirs.
    assert labelled(lambda environments, **_: [None] * len(environments))(environments=group) == [None, None]
    # What happens when the process exits.
    del environment, group
    gc.collect()
    rows = proxy.client.get("/api/v1/tasks/t/rollouts").json()["items"]
    assert [row["finished"] for row in rows] == [True, True]
    wanted = {"run": "r7", "row": "5", "step": 3, "reward": 14.0}
    assert [row["labels"] for row in rows] == [wanted, wanted]


def test_trl_says_that_a_command_timed_out() -> None:
    environment = ForkpointShell()
    result = ShellResult(stdout="begun\n", stderr="", exit_code=124, timed_out=True)
    environment._running = [cast("Any", SimpleNamespace(exec=lambda _: result, finish=lambda: None))]
    assert environment.bash("echo begun; sleep 600") == "begun\n[timed out]\n"
    environment._end()


def test_trl_sees_one_described_tool() -> None:
    tools = [
        n for n, _ in inspect.getmembers(ForkpointShell, inspect.isfunction) if n != "reset" and not n.startswith("_")
    ]
    assert tools == ["bash"]
    assert "Args:" in (inspect.getdoc(ForkpointShell.bash) or "")
    assert inspect.signature(ForkpointShell.bash).parameters["command"].annotation is str
