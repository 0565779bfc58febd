"""Promise 1: each rollout gets the answers that it would get alone, whatever happens around it."""

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engine import Engine
from sandboxes.calls import ToolCall
from sandboxes.errors import SandboxError
from sandboxes.pool.pool import OverloadedError
from snapshots.policy import Reuse
from tests.proxy.rig import KEEPS_ALL, SPEC, alone, ask, engine
from tests.sandboxes.memory_driver import MemoryDriver

COMMANDS = (
    "cat a", "cat b", "cat seed", "ls", "pwd", "echo $X", "false", "nonsense",
    "echo one > a", "echo two > a", "echo one >> b", "rm a", "rm b", "mkdir d", "cd d", "cd ..", "cd /root",
    "X=1", "export X=2", "X=", "sleep 9 &", "echo z > a; rm a", "cd d; echo deep > f; cd ..", "X=3; exit 4",
)  # fmt: skip
trajectories = st.lists(st.lists(st.sampled_from(COMMANDS), max_size=9), min_size=1, max_size=5)


class Trouble:
    """Kills sandboxes, drops snapshots and leaves clients, as its dice say."""

    def __init__(self, seed: int, kill: float, evict: float, leave: float) -> None:
        self.dice = random.Random(seed)  # noqa: S311 - dice of a test
        self.kill, self.evict, self.leave = kill, evict, leave
        self.engine: Engine | None = None
        self.driver = MemoryDriver(self.gate)

    async def gate(self, _call: ToolCall) -> None:
        for _ in range(self.dice.randrange(3)):
            await asyncio.sleep(0)
        if self.dice.random() < self.kill:
            raise SandboxError("killed by the test")

    async def between_calls(self) -> None:
        for _ in range(self.dice.randrange(4)):
            await asyncio.sleep(0)
        assert self.engine is not None
        if self.dice.random() < self.kill and self.driver.live:
            self.dice.choice(list(self.driver.live.values())).kill()
        if self.dice.random() < self.evict:
            for snapshot in self.engine.snapshots:
                node = self.engine.trees.node(snapshot.tree, snapshot.node)
                if node is not None and self.dice.random() < 0.5 and not snapshot.leases:
                    self.engine.cache.drop(node)


async def one_rollout(running: Engine, name: str, trajectory: list[str], trouble: Trouble) -> list[Any]:
    """Walk a trajectory. An error is asked again, as an agent's client would; an answer nobody waited for is None."""
    answers: list[Any] = []
    for command in trajectory:
        await trouble.between_calls()
        rollout = await running.tasks.rollout("task", name)
        if trouble.dice.random() < trouble.leave:
            answers.append(await leave_early(running, name, command))
            continue
        for _ in range(200):
            try:
                answers.append((await ask(running, rollout, command))[0])
                break
            except (SandboxError, OverloadedError):
                continue
        else:
            pytest.fail("a call never got an answer")
    return answers


async def leave_early(running: Engine, name: str, command: str) -> Any:
    """Hang up in the middle of a call. Its step is taken all the same, once the sandbox is willing."""
    rollout = await running.tasks.rollout("task", name)
    before = rollout.calls
    waiting = asyncio.ensure_future(ask(running, rollout, command))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await running.step.calls.wait()
    while rollout.calls == before:
        try:
            await ask(running, rollout, command)
        except SandboxError:
            continue
    return None


async def together(rollouts: list[list[str]], trouble: Trouble, data: Path, **options: Any) -> list[list[Any]]:
    async with engine(data, trouble.driver, **options) as running:
        trouble.engine = running
        walks = [one_rollout(running, f"r{n}", trajectory, trouble) for n, trajectory in enumerate(rollouts)]
        answers = await asyncio.gather(*walks)
        await running.capture.drain()
        running.pool.roster.check()
        task = await running.tasks.open("task")
        task.tree.check()
        assert not trouble.driver.live or len(trouble.driver.live) <= running.pool.bound.most
    assert not trouble.driver.live
    return answers


@settings(max_examples=150)
@given(
    trajectories, st.integers(), st.sampled_from([0, 0.1, 0.4]), st.sampled_from([0, 0.3]), st.sampled_from([0, 0.2]),
    st.sampled_from(["on", "off"]), st.sampled_from([1, 2, 6, 64]), st.sampled_from(["always", "never"]),
    st.sampled_from([0, 8]), st.sampled_from([KEEPS_ALL, Reuse()]),
)  # fmt: skip
def test_each_rollout_is_answered_as_if_alone(
    rollouts: list[list[str]], seed: int, kill: float, evict: float, leave: float, merge: str, most: int, cache: str,
    warm: int, reuse: Reuse,
) -> None:  # fmt: skip
    spec = SPEC.model_copy(update={"merge": merge, "cache": cache})
    trouble = Trouble(seed, kill, evict, leave)
    with tempfile.TemporaryDirectory() as data:
        got = asyncio.run(
            together(
                rollouts, trouble, Path(data), default_spec=spec, max_sandboxes=most, warm_sandboxes=warm, reuse=reuse
            )
        )
    for trajectory, answers in zip(rollouts, got, strict=True):
        truth = asyncio.run(alone(trajectory))
        assert answers == [None if answer is None else true for answer, true in zip(answers, truth, strict=True)]
