"""Every step is in the log before it is answered, so the log alone says where rollouts are."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.audit.noise_masks import Masks
from proxy.cluster.gate import ORIGIN, Origin
from proxy.cluster.lines import Kept
from proxy.cluster.owned import DroppedError
from proxy.cluster.protocol import Stepped
from proxy.tree.rollout import Outcome
from tests.proxy.cluster.states.owners import TASK, BreakableStore, Log, Owner, owner
from tests.proxy.rig import ask


async def always() -> bool:
    return True


def origin(number: int, ingress: int = 9) -> Origin:
    """Return what the code of a call works for that came through another member."""
    return Origin(ingress, 1, number, number, False, lambda: True, always)


async def call(own: Owner, rollout: str, command: str, number: int, ingress: int = 9) -> Outcome:
    """Make a call through another member, under a number."""
    task = await own.engine.tasks.open(TASK)
    walker = task.rollouts.get(rollout) or own.engine.tasks.rollouts.begin(task, rollout, task.tree, task.tree.root)
    ORIGIN.set(origin(number, ingress))
    _, outcome = await ask(own.engine, walker, command)
    return outcome


async def at(own: Owner, rollout: str) -> tuple[int, int]:
    """Return how many calls of a rollout were answered, and the number of its node."""
    walker = (await own.engine.tasks.open(TASK)).rollouts[rollout]
    return walker.calls, walker.node.id


def turns(log: Log) -> list[int]:
    """Return the turns of all steps in a log."""
    return [line.position.turn for line in log.lines(Stepped) if isinstance(line, Stepped)]


def test_a_hit_is_in_the_log(tmp_path: Path) -> None:
    """No member is asked by the next owner: each rollout is where it was answered last, hits included."""

    async def go() -> None:
        log = Log()
        async with owner(tmp_path, 1, log, BreakableStore()) as one:
            assert [await call(one, "a", f"echo {n} >> f", n) for n in (1, 2)] == [Outcome.MISS] * 2
            assert [await call(one, "b", f"echo {n} >> f", n) for n in (1, 2)] == [Outcome.HIT] * 2
            places = [await at(one, rollout) for rollout in "ab"]
        assert turns(log) == [1, 2, 1, 2]
        async with owner(tmp_path, 2, log, BreakableStore()) as two:
            assert [await at(two, rollout) for rollout in "ab"] == places == [(2, places[0][1])] * 2

    asyncio.run(go())


def test_a_rollout_of_an_earlier_ownership_has_not_ended(tmp_path: Path) -> None:
    """A call waited while its task was dropped and owned again: it is made again, and its rollout goes on."""

    async def go() -> None:
        log = Log()
        async with owner(tmp_path, 1, log, BreakableStore()) as one:
            await call(one, "a", "echo 1 >> f", 1)
            walker = (await one.engine.tasks.open(TASK)).rollouts["a"]
            # As `Member._drop` leaves it.
            walker.finished = True
            with pytest.raises(DroppedError):
                await call(one, "a", "echo 2 >> f", 2)
        assert turns(log) == [1]

    asyncio.run(go())


def test_a_call_that_is_made_again_takes_no_step(tmp_path: Path) -> None:
    """The owner died when the step was in the log and before the answer arrived."""

    async def go() -> None:
        log = Log()
        async with owner(tmp_path, 1, log, BreakableStore()) as one:
            await call(one, "a", "echo 1 >> f", 1)
            await call(one, "a", "echo x >> f", 2)
            # The link broke.
            assert await call(one, "a", "echo x >> f", 2) is Outcome.HIT
            place = await at(one, "a")
            assert place[0] == 2
        async with owner(tmp_path, 2, log, BreakableStore()) as two:
            assert await call(two, "a", "echo x >> f", 2) is Outcome.HIT
            assert await at(two, "a") == place
            # The agent makes the same call once more.
            assert await call(two, "a", "echo x >> f", 3) is Outcome.MISS
            assert (await at(two, "a"))[0] == 3
        assert turns(log) == [1, 2, 3]

    asyncio.run(go())


def test_a_step_that_is_refused_is_not_taken(tmp_path: Path) -> None:
    """A replaced owner answers nothing, not even what its tree knows."""

    async def go() -> None:
        log = Log()
        async with owner(tmp_path, 1, log, BreakableStore()) as one:
            await call(one, "a", "echo 1 >> f", 1)
            place = await at(one, "a")
            await call(one, "b", "true", 1)
            async with owner(tmp_path, 2, log, BreakableStore()) as two:
                with pytest.raises(DroppedError):
                    await call(one, "b", "echo 1 >> f", 2)
                assert one.owned.is_dropped
                assert await at(two, "a") == place
                assert (await at(two, "b"))[0] == 1

    asyncio.run(go())


def test_only_states_that_the_store_lacks_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits to other nodes would fill the queue of states that wait to be sent."""

    async def go() -> None:
        async with owner(tmp_path, 1, Log(), BreakableStore()) as one:
            seen = list[int]()
            await call(one, "a", "echo 1 >> f", 1)
            await one.engine.capture.drain()
            node = (await one.engine.tasks.open(TASK)).rollouts["a"].node
            one.owned.kept.clear()
            monkeypatch.setattr(one.shared, "stepped", lambda _tree, at: seen.append(at.id))
            assert await call(one, "b", "echo 1 >> f", 1) is Outcome.HIT
            assert seen == [node.id]
            one.owned.kept[node.id] = Kept(node.id, "name", 1)
            assert await call(one, "c", "echo 1 >> f", 1) is Outcome.HIT
            assert seen == [node.id]

    asyncio.run(go())


def test_what_people_change_is_in_the_log(tmp_path: Path) -> None:
    """Pins, masks, forgotten nodes and imported trees: the next owner has them, and the tree without calls is gone."""

    async def go() -> None:
        log, masks = Log(), Masks(masks=("dates",))
        async with owner(tmp_path, 1, log, BreakableStore()) as one:
            for number, command in enumerate(("echo 1 >> f", "echo 2 >> f", "echo 3 >> f"), 1):
                await call(one, "a", command, number)
            await call(one, "b", "echo 1 >> f", 4)
            task = await one.engine.tasks.open(TASK)
            tree, first, last = task.tree, task.rollouts["b"].node, task.rollouts["a"].node
            exported = b"".join(one.engine.transfer.export(TASK, tree))
            one.engine.pin(tree, first, on=True)
            one.engine.audit.put_masks(TASK, masks)
            assert last.origin is not None
            await one.engine.forgetting.forget(tree, last.origin.source, end_rollouts=False)
            await call(one, "c", "echo 9 >> g", 8)
            gone = task.rollouts["c"].node
            await one.engine.forgetting.forget(tree, gone, end_rollouts=True)
            await one.owned.settled()
        async with owner(tmp_path, 2, log, BreakableStore()) as two:
            task = await two.engine.tasks.open(TASK)
            assert task.tree.nodes[first.id].pinned
            assert gone.id not in task.tree.nodes
            assert two.engine.audit.masks(TASK) == masks
            # The rollout that was there goes on alone, and others are not answered from there.
            assert await call(two, "a", "cat f", 5) is Outcome.MISS
            assert await call(two, "b", "echo 2 >> f", 6) is Outcome.MISS
            await two.engine.forgetting.delete_task(TASK)
            await two.engine.tasks.open(TASK)
            assert (await two.engine.transfer.take(TASK, pieces(exported))).current
            imported_tree = (await two.engine.tasks.open(TASK)).tree.id
            await two.owned.settled()
        async with owner(tmp_path, 3, log, BreakableStore()) as three:
            tree = (await three.engine.tasks.open(TASK)).tree
            assert (tree.id, len(tree.nodes)) == (imported_tree, 4)
            for number in (1, 2, 3):
                await call(three, "c", f"echo {number} >> f", 6 + number)
            # A replay has proven the records of the file, and the rollout is where they lead.
            assert len(tree.nodes) == 4

    asyncio.run(go())


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data
