"""Forgetting while rollouts stand there: they go on as alone, after restarts too, and then nothing is left."""

import asyncio
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from proxy.execution.forgetting import ForgetResult
from tests.proxy.rig import alone, ask, engine

COMMANDS = ["echo 1 >> f", "echo 2 >> f", "X=1", "cat f", "rm f", "cd /tmp"]


@given(
    st.lists(st.lists(st.sampled_from(COMMANDS), min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.sampled_from(COMMANDS), max_size=4),
    st.lists(st.integers(0, 20), min_size=1, max_size=3),
)
def test_forgetting_keeps_running_rollouts_transparent(
    tmp_path_factory: object, before: list[list[str]], after: list[str], forgotten: list[int]
) -> None:
    """Whatever nodes are forgotten, each running rollout gets the answers of a sandbox of its own."""
    folder = tmp_path_factory.mktemp("data")  # type: ignore[attr-defined]

    async def go() -> None:
        async with engine(folder) as running:
            task = await running.tasks.open("task")
            rollouts = [
                running.tasks.rollouts.begin(task, f"r{n}", task.tree, task.tree.root) for n in range(len(before))
            ]
            answers = [
                [(await ask(running, r, c))[0] for c in commands] for r, commands in zip(rollouts, before, strict=True)
            ]
            for number in forgotten:
                nodes = [node for node in task.tree.nodes.values() if node is not task.tree.root]
                if nodes:
                    await running.forgetting.forget(task.tree, nodes[number % len(nodes)], end_rollouts=False)
                    task.tree.check()
            for at, rollout in enumerate(rollouts):
                answers[at] += [(await ask(running, rollout, command))[0] for command in after]
            task.tree.check()
        assert answers == [await alone(commands + after) for commands in before]

    asyncio.run(go())


def test_a_forgotten_node_outlasts_a_restart(tmp_path: Path) -> None:
    """A rollout at a forgotten node goes on after a restart. When it has ended, the sweep deletes the nodes."""

    async def go() -> None:
        async with engine(tmp_path) as running:
            task = await running.tasks.open("task")
            rollout = running.tasks.rollouts.begin(task, "r", task.tree, task.tree.root)
            for command in ("echo 1 >> f", "echo 2 >> f"):
                await ask(running, rollout, command)
            (top,) = [record.target for record in task.tree.root.records.values()]
            assert await running.forgetting.forget(task.tree, top, end_rollouts=False) == ForgetResult(2, [], ["r"])
        async with engine(tmp_path) as again:
            task = await again.tasks.open("task")
            rollout = task.rollouts["r"]
            assert (await ask(again, rollout, "cat f"))[0]["stdout"] == "1\n2\n"
            assert task.tree.root.records == {}
            assert await again.forgetting.sweep() == 0
            await again.tasks.rollouts.finish(rollout)
            assert await again.forgetting.sweep() == 2
            assert list(task.tree.nodes.values()) == [task.tree.root]
            assert again.store.database.tables.table("nodes").count == 1
            task.tree.check()

    asyncio.run(go())
