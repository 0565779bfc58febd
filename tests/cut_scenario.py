"""The scenario whose writes are recorded for cuts of power, and what must hold on every disk that a cut may leave.

Two rollouts walk, their states are frozen, steps are folded and the store is checkpointed. The tree is exported and
imported under another name, and the proxy ends in order. It starts again, a node is forgotten, and rollouts walk until
the process ends without notice.
"""

import asyncio
import contextlib
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Literal, cast

from proxy.engine import Engine, build_engine
from proxy.refusals import RefusalError
from proxy.settings import Settings
from proxy.storage import journal as journal_module
from proxy.tree.rollout import Rollout
from snapshots import store as snapshot_module
from tests.power_cuts import report_mappings, tell
from tests.proxy.rig import KEEPS_ALL, SPEC, ask
from tests.sandboxes.memory_driver import MemoryDriver

WALK = ("echo 1 >> log", "mkdir d", "cat log", "cd d; pwd", "echo 2 >> log", "cat log; cat /root/log", "ls")
ANSWERS = ("", "", "1\n", "/root/d\n", "", "2\n1\n", "log\n")
"""What a private sandbox answers to `WALK`."""


@contextlib.asynccontextmanager
async def opened(data: Path, durability: str) -> AsyncIterator[Engine]:
    settings = Settings(
        data=data, default_spec=SPEC, warm_sandboxes=0, durability=cast("Literal['process', 'power']", durability)
    )
    running = build_engine(settings, {"memory": MemoryDriver()})
    running.snapshot_value.reuse = KEEPS_ALL
    await running.open()
    # Only what the scenario does itself, in its order.
    running.lifecycle._running.cancel()
    yield running


async def step(running: Engine, name: str) -> None:
    """Take the next call of a rollout, and mark that it received the answer."""
    rollout = await running.tasks.rollout("task", name)
    turn = rollout.calls
    answer, _ = await ask(running, rollout, WALK[turn])
    assert answer["stdout"] == ANSWERS[turn]
    tell(name, turn + 1)
    await running.capture.drain()


async def scenario(data: Path, durability: str) -> None:
    async with opened(data, durability) as running:
        for turn in range(5):
            await step(running, "a")
            if turn < 3:
                await step(running, "b")
            if turn == 2:
                await running.journal.trickle()
                running.store.database.checkpoint()
        await copy_tree(running)
        await running.aclose()
    async with opened(data, durability) as running:
        await step(running, "b")
        other = await running.tasks.rollout("task", "gone")
        await ask(running, other, "echo away > x")
        await running.capture.drain()
        await running.forgetting.forget(other.tree, other.node, end_rollouts=True)
        for _ in range(3):
            await step(running, "c")
        # The process ends without notice.
        sys.stdout.flush()
        os._exit(0)


async def copy_tree(running: Engine) -> None:
    """Export the task's tree with its states, and import it as another task."""
    tree = (await running.tasks.open("task")).tree
    with running.transfer.lend_states(tree) as states:
        chunks = list(running.transfer.export("task", tree, states))

    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    await running.transfer.take("copy", body())


async def verify(data: Path, durability: str, answered: Mapping[str, int]) -> Counter[str]:
    """Open a disk after a cut and check every promise; return how often each outcome came.

    A running rollout continues where its agent saw it, or is refused. With `process`, one that began just before the
    cut may be unknown. A new rollout gets the right answers.
    """
    seen: Counter[str] = Counter()
    async with opened(data, durability) as running:
        for tree in running.trees:
            tree.check()
        names = {row["name"] for row in running.store.rollouts.of_task("task")}
        for name, count in answered.items():
            if name not in names:
                assert durability == "process", f"{name!r} is unknown after {count} answers"
                seen["unknown"] += 1
                continue
            try:
                rollout = await running.tasks.rollout("task", name)
            except RefusalError as refusal:
                assert refusal.slug == "rollout-lost"  # noqa: PT017 - the slug is what counts
                assert durability == "process", f"{name!r} is refused, but each step waited for the disk"
                seen["refused"] += 1
                continue
            assert rollout.calls >= count, f"{name!r} went back from {count} to {rollout.calls}"
            seen["continued"] += 1
            await finish_walk(running, rollout)
        # The copy is there as a whole or not at all, and a new rollout gets right answers either way.
        for task in ("task", "copy"):
            await finish_walk(running, await running.tasks.rollout(task, "new"))
        for tree in running.trees:
            tree.check()
        await running.aclose()
    return seen


async def finish_walk(running: Engine, rollout: Rollout) -> None:
    for turn in range(rollout.calls, len(WALK)):
        assert (await ask(running, rollout, WALK[turn]))[0]["stdout"] == ANSWERS[turn]


def after_reboot(patch: Callable[[object, str, object], None] = setattr) -> None:
    """Let this process believe in another boot than the scenario's."""
    for module in (journal_module, snapshot_module):
        patch(module, "boot_id", lambda: "after the cut")


if __name__ == "__main__":
    report_mappings(journal_module)
    asyncio.run(scenario(Path(sys.argv[1]), sys.argv[2]))
