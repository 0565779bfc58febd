"""The owner of a task, and only the owner, deletes what no state needs."""

import asyncio
from pathlib import Path

import pytest

from proxy.cluster.lines import Kept, Unkept
from proxy.cluster.owned import DroppedError
from proxy.cluster.states.manifests import folder_of
from proxy.cluster.states.objects import ObjectStoreError
from proxy.cluster.states.sweeping import Sweeper
from proxy.tree.rollout import Outcome
from tests.machine import until
from tests.proxy.cluster.states.owners import TASK, BreakableStore, Log, owner
from tests.proxy.cluster.states.test_service import LAST, WALK, filled, sent, walked_on
from tests.proxy.rig import alone


def test_sweep_deletes_garbage_and_nothing_else(tmp_path: Path) -> None:
    """Objects of a sender that was killed go. What states need stays, and so does what a later owner has written."""
    log, objects = Log(), BreakableStore()

    async def go() -> None:
        await filled(tmp_path, log, objects)
        needed = await objects.all()
        folder = folder_of(TASK)
        later, foreign = f"{folder}/{len(log.rows) + 100}/{'b' * 64}", f"{folder}/notes.txt"
        for name in (f"{folder}/1/{'a' * 64}", later, foreign):
            await objects.put(name, b"x")
        async with owner(tmp_path, 2, log, objects) as second:
            graceful = Sweeper(objects, second.engine.snapshots, grace_s=1e6)
            assert await graceful.sweep(second.states) == 0
            assert graceful.is_needed(second.states)
            sweeper = Sweeper(objects, second.engine.snapshots, grace_s=0.0)
            assert await sweeper.sweep(second.states) == 1
            assert not sweeper.is_needed(second.states)
            assert set(await objects.all()) == {*needed, later, foreign}
            await walked_on(second)
            assert len(second.driver.executed) == 1

    asyncio.run(go())


def test_evicted_states_are_given_up(tmp_path: Path) -> None:
    """A state whose snapshot was evicted here goes; what others share with it stays."""
    log, objects = Log(), BreakableStore()

    async def go() -> None:
        async with owner(tmp_path, 1, log, objects) as first:
            await first.walk("one", WALK)
            await sent(first, log, 5)
            tree = (await first.engine.tasks.open(TASK)).tree
            node = max(tree.nodes.values(), key=lambda node: node.id)
            first.engine.cache.drop(node)
            sweeper = Sweeper(objects, first.engine.snapshots, grace_s=0.0)
            # Its manifest, and the one chunk that differs.
            assert await sweeper.sweep(first.states) == 2
            assert log.lines(Unkept) == [Unkept(node.id)]
        async with owner(tmp_path, 2, log, objects) as second:
            assert sorted(second.owned.kept) == sorted(set(tree.nodes) - {node.id})
            # A rollout comes to that state by its own execution: there is no other way to it.
            answers = await second.walk("two", [*WALK, LAST])
            assert [outcome for _, outcome in answers] == [*[Outcome.HIT] * 3, Outcome.MISS, Outcome.MISS]
            assert [answer for answer, _ in answers] == await alone([*WALK, LAST])
            assert second.driver.executed[0] == WALK[-1]

    asyncio.run(go())


def test_replaced_owner_deletes_nothing(tmp_path: Path) -> None:
    """Two members sweep: the one that does not know yet that it was replaced can give up no state."""
    log, objects = Log(), BreakableStore()

    async def go() -> None:
        async with owner(tmp_path, 1, log, objects) as first:
            await first.walk("one", WALK)
            await sent(first, log, 5)
            async with owner(tmp_path, 2, log, objects) as second:
                before = await objects.all()
                for node in (await first.engine.tasks.open(TASK)).tree.nodes.values():
                    first.engine.cache.drop(node)
                stale = Sweeper(objects, first.engine.snapshots, grace_s=0.0)
                current = Sweeper(objects, second.engine.snapshots, grace_s=0.0)
                results = await asyncio.gather(
                    stale.sweep(first.states), current.sweep(second.states), return_exceptions=True
                )
                assert [type(each) for each in results] == [DroppedError, int]
                assert await objects.all() == before
                await walked_on(second)
                assert len(second.driver.executed) == 1

    asyncio.run(go())


def test_sweep_that_is_cut_short_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store fails at the second deletion. The next sweep deletes the rest."""
    log, objects = Log(), BreakableStore()
    delete, deleted = objects.delete, []

    async def fail_once(names: list[str]) -> None:
        deleted.append(names)
        if len(deleted) == 2:
            raise ObjectStoreError("broken by a test")
        await delete(names)

    async def go() -> None:
        async with owner(tmp_path, 1, log, objects) as first:
            await first.walk("one", WALK)
            await sent(first, log, 5)
            needed = await objects.all()
            for letter in "abc":
                await objects.put(f"{folder_of(TASK)}/1/{letter * 64}", b"x")
            sweeper = Sweeper(objects, first.engine.snapshots, grace_s=0.0)
            monkeypatch.setattr(objects, "delete", fail_once)
            first.states.has_garbage = True
            with pytest.raises(ObjectStoreError):
                await sweeper.sweep(first.states)
            assert sweeper.is_needed(first.states)
            assert await sweeper.sweep(first.states) == 2
            assert await objects.all() == needed
            await until(lambda: len(log.lines(Kept)) == 5)

    asyncio.run(go())
