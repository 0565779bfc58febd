"""Promise 1 with speculation: each rollout gets the answers that it would get alone, whatever is executed ahead."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from snapshots.policy import Reuse
from tests.proxy.rig import KEEPS_ALL, SPEC, alone
from tests.proxy.speculation.rig import MeteredSandbox, speculating, think
from tests.proxy.test_transparency import Trouble, one_rollout, trajectories
from tests.sandboxes.memory_driver import MemoryDriver


class Pauses(Trouble):
    """Agents that think between their calls, in which time calls are executed ahead: to their end or only begun."""

    async def between_calls(self) -> None:
        await super().between_calls()
        running = self.engine
        assert running is not None
        if self.dice.random() < 0.6:
            await running.capture.drain()
            think(*running.tasks.rollouts.running.values())
            running.speculator.round()
            if self.dice.random() < 0.7:
                await running.speculator._tasks.wait()


async def together(rollouts: list[list[str]], trouble: Pauses, data: Path, **options: Any) -> tuple[list[Any], int]:
    trouble.driver = MemoryDriver(trouble.gate, MeteredSandbox)
    async with speculating(data, driver=trouble.driver, **options) as running:
        trouble.engine = running
        walks = [one_rollout(running, f"r{n}", trajectory, trouble) for n, trajectory in enumerate(rollouts)]
        answers = await asyncio.gather(*walks)
        await running.speculator._tasks.wait()
        await running.capture.drain()
        running.pool.roster.check()
        (await running.tasks.open("task")).tree.check()
        assert len(trouble.driver.live) <= running.settings.max_sandboxes
        return answers, running.counts.speculated


@settings(max_examples=20)
@given(
    trajectories, st.integers(), st.sampled_from([0, 0.1, 0.4]), st.sampled_from([0, 0.3]), st.sampled_from([0, 0.2]),
    st.sampled_from(["on", "off"]), st.sampled_from([2, 6, 64]), st.sampled_from([KEEPS_ALL, Reuse()]),
)  # fmt: skip
def test_each_rollout_is_answered_as_if_alone(
    rollouts: list[list[str]], seed: int, kill: float, evict: float, leave: float, merge: str, most: int, reuse: Reuse
) -> None:
    spec = SPEC.model_copy(update={"merge": merge})
    trouble = Pauses(seed, kill, evict, leave)
    with tempfile.TemporaryDirectory() as data:
        got, _ = asyncio.run(
            together(rollouts, trouble, Path(data), default_spec=spec, max_sandboxes=most, reuse=reuse)
        )
    for trajectory, answers in zip(rollouts, got, strict=True):
        truth = asyncio.run(alone(trajectory))
        assert answers == [None if answer is None else true for answer, true in zip(answers, truth, strict=True)]


def test_the_property_does_execute_ahead(tmp_path: Path) -> None:
    """The property above would hold without any speculation, too."""
    rollouts = [[f"echo {number} > f{number}", "ls", "cat seed", "pwd"] for number in range(5)]
    # Whether a rollout thinks where something is known depends on how freezes in threads take turns with calls.
    runs = (asyncio.run(together(rollouts, Pauses(seed, 0, 0, 0), tmp_path / str(seed)))[1] for seed in range(20))
    assert any(runs)
