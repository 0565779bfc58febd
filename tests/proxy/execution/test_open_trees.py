"""Trees come back into memory in slices, and never an older state of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.engine import Engine
from proxy.execution.open_trees import OpenTrees
from proxy.storage import tree_reading
from proxy.storage.errors import StoreError
from proxy.storage.store import Store
from proxy.storage.tree_reading import TreeReading
from proxy.tree.rollout import Outcome
from sandboxes.task_owner import start
from tests.proxy.execution.trees import with_twenty_records
from tests.proxy.rig import alone, ask, engine
from tests.proxy.storage.rig import save


def test_others_run_while_a_tree_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_reading, "_PAGE_ROWS", 2)

    async def test(store: Store, trees: OpenTrees, number: int) -> None:
        reading = asyncio.ensure_future(trees.read_back(number))
        turns = 0
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 10, "twenty records are ten pages"
        tree = trees.get(number)
        assert tree is not None
        assert set(tree.root.records) == set(store.trees.load(number).root.records)
        assert len(tree.root.records) == 20

    with_twenty_records(tmp_path, test)


def test_a_tree_that_was_in_memory_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have got records that the slices which were read before lack, also if it has left the memory again."""
    monkeypatch.setattr(tree_reading, "_PAGE_ROWS", 2)

    async def test(store: Store, trees: OpenTrees, number: int) -> None:
        reading = asyncio.ensure_future(trees.read_back(number))
        await asyncio.sleep(0)
        save(store, trees.load(number), "echo new", b"new")
        trees.close(number)
        await reading
        assert trees.get(number) is None
        assert len(trees.load(number).root.records) == 21

    with_twenty_records(tmp_path, test)


def test_a_tree_deleted_meanwhile_stays_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_reading, "_PAGE_ROWS", 2)

    async def test(store: Store, trees: OpenTrees, number: int) -> None:
        reading = asyncio.ensure_future(trees.read_back(number))
        await asyncio.sleep(0)
        with store.database.transaction() as execute:
            execute("DELETE FROM trees WHERE id = ?", (number,))
        await reading
        assert trees.get(number) is None

    with_twenty_records(tmp_path, test)


def test_a_tree_that_is_closed_amid_its_slices_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_reading, "_PAGE_ROWS", 2)

    async def test(_store: Store, trees: OpenTrees, number: int) -> None:
        reading = asyncio.ensure_future(trees.read_back(number))
        await asyncio.sleep(0)
        partial = trees.opened(number)
        trees.close(number)
        with pytest.raises(StoreError, match="Send the call again"):
            await trees.whole(partial)
        await trees.read_back(number)
        tree = trees.opened(number)
        assert tree is trees.get(number) is not partial
        assert len(tree.root.records) == 20
        await reading
        assert trees.get(number) is tree

    with_twenty_records(tmp_path, test)


def test_a_tree_with_quarantined_calls_is_given_to_nobody_before_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eviction reads it back just when a rollout begins in it: what goes with those calls is known at its end."""
    monkeypatch.setattr(tree_reading, "_PAGE_ROWS", 2)

    async def test(store: Store, trees: OpenTrees, number: int) -> None:
        tree = store.trees.load(number)
        wrong = next(iter(tree.root.records.values()))
        store.audits.save_finding(number, wrong, tree.quarantine(wrong, "differs"), quarantined=True)
        reading = asyncio.ensure_future(trees.read_back(number))
        await asyncio.sleep(0)
        opened = trees.opened(number)
        assert opened.unread is None
        assert (len(opened.root.records), opened.root.quarantined) == (19, frozenset({wrong.key}))
        await reading
        assert trees.get(number) is opened

    with_twenty_records(tmp_path, test)


COMMANDS = [f"echo {number} > f{number}; cat f{number}" for number in range(12)]


class Stuck:
    """Keeps trees that are read back from becoming whole, until it is `freed`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.freed, read = False, TreeReading.step
        patch.setattr(TreeReading, "step", lambda reading: not self.freed or read(reading))


async def recorded(folder: Path) -> None:
    """Leave a store in which one rollout has made all calls, and another one half of them."""
    async with engine(folder) as running:
        for name, commands in (("first", COMMANDS), ("half", COMMANDS[:6])):
            for command in commands:
                await ask(running, await running.tasks.rollout("task", name), command)


@asynccontextmanager
async def reading_back(folder: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Engine, Stuck]]:
    """Run an engine that reads back what was recorded, and does not come to its end."""
    await recorded(folder)
    stuck = Stuck(patch)
    async with engine(folder) as running:
        yield running, stuck


def test_known_calls_are_answered_while_their_tree_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with reading_back(tmp_path, monkeypatch) as (running, stuck):
            answers = []
            for command in COMMANDS:
                rollout = await running.tasks.rollout("task", "new")
                answer, outcome = await ask(running, rollout, command)
                assert outcome is Outcome.HIT
                answers.append(answer)
            assert answers == await alone(COMMANDS)
            half = await running.tasks.rollout("task", "half")
            assert [(await ask(running, half, command))[1] for command in COMMANDS[6:]] == [Outcome.HIT] * 6
            tree = half.tree
            assert (half.node, tree.unread is not None, running.trees.get(tree.id)) == (rollout.node, True, None)
            # A call that is not known waits, and so does whoever looks at the tree.
            missing = start(ask(running, half, "cat f3 f11"))
            opening = start(running.tasks.open("task"))
            await asyncio.sleep(0.2)
            assert not missing.done()
            assert not opening.done()
            stuck.freed = True
            assert await missing == ((await alone([*COMMANDS, "cat f3 f11"]))[-1], Outcome.MISS)
            assert (await opening).tree is tree is running.trees.get(tree.id)
            tree.check()
            assert len(tree.nodes) == len(COMMANDS) + 1
            # As if the tree had been whole from the start: the half rollout's second part, and the new one's.
            assert [record.hits for record in tree.root.records.values()] == [2]
            assert tree.nodes[half.node.id].visits == 3

    asyncio.run(body())


def test_a_damaged_answer_is_not_given_while_its_tree_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with reading_back(tmp_path, monkeypatch) as (running, stuck):
            with running.store.database.transaction() as execute:
                execute("UPDATE blobs SET data = x'00' WHERE id IN (SELECT answer FROM records)")
            again = start(ask(running, await running.tasks.rollout("task", "new"), COMMANDS[0]))
            await asyncio.sleep(0.2)
            assert not again.done()
            stuck.freed = True
            assert await again == ((await alone(COMMANDS[:1]))[0], Outcome.MISS)

    asyncio.run(body())


def test_a_tree_that_cannot_be_read_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk fails amid a tree. What waits for it gets an error; the next call opens the rollout again, and hits."""

    async def body() -> None:
        await recorded(tmp_path)
        async with engine(tmp_path) as running:
            fails, read = True, TreeReading._read_nodes

            def failing(reading: TreeReading) -> object:
                if fails:
                    raise StoreError("the disk is gone")
                return read(reading)

            monkeypatch.setattr(TreeReading, "_read_nodes", failing)
            rollout = await running.tasks.rollout("task", "half")
            with pytest.raises(StoreError, match="the disk is gone"):
                await running.tasks.open("task")
            with pytest.raises(StoreError, match="Send the call again"):
                await ask(running, rollout, "echo new > g")
            assert ("task", "half") not in running.tasks.rollouts.running
            fails = False
            again = await running.tasks.rollout("task", "half")
            assert again is not rollout
            assert [(await ask(running, again, command))[1] for command in COMMANDS[6:]] == [Outcome.HIT] * 6
            assert (await ask(running, again, "echo new > g"))[1] is Outcome.MISS

    asyncio.run(body())


def test_a_proxy_stops_while_a_tree_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with reading_back(tmp_path, monkeypatch) as (running, _):
            assert (await ask(running, await running.tasks.rollout("task", "half"), COMMANDS[6]))[1] is Outcome.HIT
        monkeypatch.undo()
        async with engine(tmp_path) as running:
            assert (await running.tasks.rollout("task", "half")).calls == 7

    asyncio.run(body())
