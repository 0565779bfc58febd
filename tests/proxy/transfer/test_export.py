"""Every tree that the product can make becomes a file that an import takes, with everything in it that may travel."""

import asyncio
import random
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engine import Engine
from proxy.tree.keys import call_key
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Node, Record
from sandboxes.calls import Execution, ToolCall
from sandboxes.listener import Listener
from tests.proxy.rig import engine, shell
from tests.proxy.transfer.rig import ReachingDriver, chunks, exported, walked, workload
from tests.sandboxes.memory_driver import MemorySandbox

COMMANDS = (
    "cat a", "cat seed", "echo one > a", "echo one > a", "echo two > b; echo one > a", "rm a", "X=1", "X=", "sleep 9 &",
    "mkdir d; cd d", "cd /root", "true late; cat a", "true late; X=1", "true late; echo one > a",
)  # fmt: skip
"""Commands of rollouts. One with `late` in it runs out of time: its record is for its rollout alone."""
OTHERS = ("put", "get", "process", "poll", "quarantine", "doubt", "set aside", "forget", "pin")
trees = st.lists(st.lists(st.sampled_from((*COMMANDS, *COMMANDS, *OTHERS)), max_size=12), min_size=1, max_size=6)


async def step(running: Engine, rollout: Rollout, what: str, dice: random.Random) -> None:
    """Let a rollout make a call, or let a person or an audit change its tree."""
    tree = rollout.tree
    nodes = [node for node in tree.nodes.values() if node is not tree.root]
    records = [r for node in tree.nodes.values() for r in node.records.values() if not r.private and not r.differs]
    if what == "poll":
        for _ in range(40):
            await call(running, rollout, shell("cat seed"))
    elif what in ("quarantine", "doubt") and records:
        record = dice.choice(records)
        record.differs = "a test"
        lost = tree.quarantine(record, "a test") if what == "quarantine" else []
        running.store.audits.save_finding(tree.id, record, lost, quarantined=what == "quarantine")
    elif what == "set aside" and (moves := [record for record in records if not record.observation]):
        record = dice.choice(moves)
        running.store.records.save_divergence(record, tree.set_aside(record, "a test"))
    elif what == "forget" and nodes:
        await running.forgetting.forget(tree, dice.choice(nodes), end_rollouts=False)
    elif what == "pin" and nodes:
        dice.choice(nodes).pinned = True
    elif what not in OTHERS or what in ("put", "get", "process"):
        await call(running, rollout, made_of(what, dice))


def made_of(what: str, dice: random.Random) -> ToolCall:
    file = {"path": "/root/up"}
    match what:
        case "put":
            return ToolCall("shell", "put", file, dice.choice((b"", b"x" * 3000)))
        case "get":
            return ToolCall("shell", "get", file)
        case "process":
            return ToolCall("process", "run", {"argv": ["sh", "-c", "echo x > p"], "env": {}, "cwd": "/root"})
        case _:
            return shell(what)


async def call(running: Engine, rollout: Rollout, made: ToolCall) -> None:
    key = call_key(made)
    if running.step.known(rollout, key) is None:
        await running.step.run(rollout, made, key)


class LateSandbox(MemorySandbox):
    """A sandbox in which commands with `late` in them run out of time."""

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        execution = await super().execute(call, listener)
        is_late = "late" in str(call.arguments.get("command"))
        return replace(execution, shareable=False) if is_late else execution


def travelling(node: Node) -> dict[bytes, Record]:
    return {
        key: record
        for key, record in node.records.items()
        if not record.private and not record.differs and not record.target.diverged
    }


def assert_equal_trees(here: Engine, there: Engine, root: Node, imported: Node) -> int:
    """Walk both trees in step and compare everything that may travel; return the number of nodes."""
    pairs, waiting = {root: imported}, [root]
    while waiting:
        node = waiting.pop()
        twin = pairs[node]
        assert (node.state, node.witness) == (twin.state, twin.witness)
        assert travelling(node).keys() == twin.records.keys()
        for key, record in travelling(node).items():
            other = twin.records[key]  # type: ignore[index]
            assert here.store.records.result(record) == there.store.records.result(other)
            assert here.store.records.call(record) == there.store.records.call(other)
            assert (record.effect, record.reproducible) == (other.effect, other.reproducible)
            if record.target not in pairs:
                pairs[record.target] = other.target
                waiting.append(record.target)
            assert pairs[record.target] is other.target
    return len(pairs)


@settings(max_examples=40)
@given(plan=trees, seed=st.integers(0, 1 << 30))
def test_any_tree_is_imported_whole(plan: list[list[str]], seed: int) -> None:
    """Rollouts write the same bytes twice, poll beside processes and run out of time; people and audits take away.

    Whatever tree that makes, the import takes its file, and each call that may travel is answered there as here. What
    hosts outside have sent is there as well.
    """

    async def go(folder: Path) -> None:
        dice = random.Random(seed)  # noqa: S311 - dice of a test
        driver, another = ReachingDriver(folder / "a", LateSandbox), ReachingDriver(folder / "b")
        for number in range(dice.randrange(4)):
            driver.record(number, dice.randbytes(10))
        async with engine(folder / "here", driver) as here:
            task = await here.tasks.open("task")
            for number, whats in enumerate(plan):
                rollout = here.tasks.rollouts.begin(task, f"r{number}", task.tree, task.tree.root)
                for what in whats:
                    await step(here, rollout, what, dice)
            data = await exported(here, "task")
            async with engine(folder / "there", another) as there:
                await there.transfer.take("task", chunks(data))
                assert not driver.folder.exists() or another.files() == driver.files()
                tree = (await there.tasks.find("task")).tree
                tree.check()
                assert assert_equal_trees(here, there, task.tree.root, tree.root) == len(tree.nodes)

    with tempfile.TemporaryDirectory(prefix="world-export-") as folder:
        asyncio.run(go(Path(folder)))


def test_size_of_a_bundle_is_estimated(tmp_path: Path) -> None:
    """A progress bar needs a total before the first byte; half and double are close enough for it."""

    async def go() -> tuple[int, int]:
        async with engine(tmp_path) as here:
            await walked(here, "task", workload(8, 30))
            opened = await here.tasks.find("task")
            bundle = await exported(here, "task")
            return here.transfer.estimated_bytes(opened.tree, snapshots=False), len(bundle)

    estimated, actual = asyncio.run(go())
    assert actual / 2 < estimated < actual * 2
