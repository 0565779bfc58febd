"""Kept states go to the store, and the next owner restores them; what it does not have in time is replayed."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.cluster.lines import Kept, Unkept
from proxy.cluster.states.fetching import UnreachableStateError
from proxy.cluster.states.objects import ObjectStoreError
from proxy.cluster.states.sweeping import Sweeper
from proxy.cluster.states.task_states import TaskStates
from proxy.tree.rollout import Outcome
from snapshots.policy import Reuse
from tests.machine import until
from tests.proxy.cluster.states.owners import BreakableStore, Log, Owner, owner
from tests.proxy.rig import alone, ask
from tests.sandboxes.memory_driver import _Shell

WALK = [f"echo {number} >> f" for number in range(4)]
LAST = "echo last >> f; cat f"


async def sent(first: Owner, log: Log, states: int) -> None:
    """Wait until the log names so many states."""
    # Each is counted a moment after its line is in the log.
    await until(lambda: (len(log.lines(Kept)), first.engine.counts.states.sent) == (states, states))


def kept(log: Log) -> set[int]:
    """Return the nodes whose states the store has."""
    return {line.node for line in log.lines(Kept) if isinstance(line, Kept)}


async def filled(folder: Path, log: Log, objects: BreakableStore) -> None:
    """Let a first owner walk, send its states, and die."""
    async with owner(folder, 1, log, objects) as first:
        await first.walk("one", WALK)
        # The root's, and one of each call.
        await sent(first, log, 5)


async def walked_on(second: Owner, rollout: str = "two") -> None:
    """Let a rollout hit its way to the end, and check the answer of a call that nobody has made."""
    answers = await second.walk(rollout, [*WALK, LAST])
    assert [outcome for _, outcome in answers] == [*[Outcome.HIT] * len(WALK), Outcome.MISS]
    assert [answer for answer, _ in answers] == await alone([*WALK, LAST])


def test_next_owner_restores(tmp_path: Path) -> None:
    """The owner dies. The next one restores the state at which a rollout leaves the tree, and replays nothing."""
    log, objects = Log(), BreakableStore()

    async def go() -> None:
        await filled(tmp_path, log, objects)
        # Most bytes of the parts are the same, and were written once.
        assert len(objects.puts) == len(set(objects.puts))
        async with owner(tmp_path, 2, log, objects) as second:
            await walked_on(second)
            assert second.driver.executed == [LAST]
            assert second.engine.counts.states.fetched == 1
            # What it fetched is not sent again. What it made is.
            await until(lambda: len(log.lines(Kept)) == 6)
        async with owner(tmp_path, 3, log, objects) as third:
            assert [outcome for _, outcome in await third.walk("three", [*WALK, LAST])] == [Outcome.HIT] * 5

    asyncio.run(go())


def missing(name: str, objects: dict[str, bytes]) -> bytes | None:  # noqa: ARG001
    return None


def flipped(name: str, objects: dict[str, bytes]) -> bytes:
    return bytes([objects[name][0] ^ 1]) + objects[name][1:]


def longer(name: str, objects: dict[str, bytes]) -> bytes:
    return objects[name] + b" "


def empty(name: str, objects: dict[str, bytes]) -> bytes:  # noqa: ARG001
    return b""


def another(name: str, objects: dict[str, bytes]) -> bytes:
    """Return another object of about the same size: a manifest for a manifest."""
    return next(
        data for other, data in objects.items() if other != name and abs(len(data) - len(objects[name])) < 1 << 10
    )


@pytest.mark.parametrize("damage", [missing, flipped, longer, empty, another])
@pytest.mark.parametrize("is_manifest", [True, False])
def test_damage_costs_time_only(
    tmp_path: Path, damage: Callable[[str, dict[str, bytes]], bytes | None], is_manifest: bool
) -> None:
    """An object of the last state is damaged. It is replayed from the state before, and never tried again."""
    log, objects = Log(), BreakableStore()

    async def go() -> None:
        await filled(tmp_path, log, objects)
        line = log.lines(Kept)[-1]
        assert isinstance(line, Kept)
        everything = await objects.all()
        manifest = next(name for name in everything if name.endswith(line.name))
        # The last chunk is the only one that other states lack.
        chunk = objects.puts[-2]
        name = manifest if is_manifest else chunk
        data = damage(name, everything)
        await (objects.delete([name]) if data is None else objects.put(name, data))
        async with owner(tmp_path, 2, log, objects) as second:
            await walked_on(second)
            assert second.driver.executed == [WALK[-1], LAST]
            await until(lambda: log.lines(Unkept) == [Unkept(line.node)])
            assert second.engine.counts.failures["damaged-state"] == 1

    asyncio.run(go())


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_store_that_is_down_is_replayed_around(tmp_path: Path, how: str) -> None:
    """The store does not answer. Calls are replayed, and the states are fetched when it is back."""
    log, objects = Log(), BreakableStore()

    async def go() -> None:
        await filled(tmp_path, log, objects)
        async with owner(tmp_path, 2, log, objects, replay_s=1000.0 if how == "fails" else 0.1) as second:
            setattr(objects, how, True)
            await walked_on(second)
            # From the root, because nothing else is here.
            assert second.driver.executed == [*WALK, LAST]
            assert log.lines(Unkept) == []

    asyncio.run(go())


def test_only_way_is_not_given_up(tmp_path: Path) -> None:
    """No replay reaches a state, and the store is down: the call fails, and succeeds when the store is back."""
    log, objects = Log(), BreakableStore()

    async def go() -> None:
        await filled(tmp_path, log, objects)
        async with owner(tmp_path, 2, log, objects) as second:
            tree = (await second.engine.tasks.open("task")).tree
            for node in tree.nodes.values():
                if node.origin is not None:
                    node.origin.reproducible = False
            objects.fails = True
            with pytest.raises(UnreachableStateError):
                await second.walk("two", [*WALK, LAST])
            assert not any(node.diverged for node in tree.nodes.values())
            objects.fails = False
            await walked_on(second, "three")
            assert second.driver.executed == [LAST]

    asyncio.run(go())


@pytest.mark.parametrize("how", ["fails", "hangs", "trickles"])
def test_calls_do_not_wait_for_the_store(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is down, full or slow while states are kept. Calls are answered, and states are sent later."""
    monkeypatch.setattr("proxy.cluster.states.objects.OBJECT_PATIENCE_S", 0.1)
    monkeypatch.setattr("proxy.cluster.states.sending.LONGEST_PAUSE_S", 0.1)
    log, objects = Log(), BreakableStore()

    async def go() -> None:
        setattr(objects, how, True)
        async with owner(tmp_path, 1, log, objects) as first:
            answers = await first.walk("one", WALK)
            assert [answer for answer, _ in answers] == await alone(WALK)
            assert how == "trickles" or log.lines(Kept) == []
            if how == "fails":
                # However long it fails: each of the five states was tried more than once.
                await until(lambda: first.engine.counts.failures["store"] > 20)
                objects.fails = False
            if how != "hangs":
                await sent(first, log, 5)

    asyncio.run(go())


def test_flush_sends_before_a_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that hands a task over does not let its states wait their time."""
    monkeypatch.setattr("proxy.cluster.states.sending.DELAY_S", 1e6)
    log, objects = Log(), BreakableStore()

    async def go() -> None:
        async with owner(tmp_path, 1, log, objects) as first:
            await first.walk("one", WALK)
            await first.engine.capture.drain()
            assert await first.shared.flush(first.owned, 30.0)
            await sent(first, log, 5)

    asyncio.run(go())


def test_states_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that has waited longest goes without being sent, and may wait again."""
    monkeypatch.setattr("proxy.cluster.states.sending.DELAY_S", 1e6)
    monkeypatch.setattr("proxy.cluster.states.sending.MAX_WAITING", 2)
    log, objects = Log(), BreakableStore()

    async def go() -> None:
        async with owner(tmp_path, 1, log, objects) as first:
            await first.walk("one", WALK)
            await first.engine.capture.drain()
            tree = (await first.engine.tasks.open("task")).tree
            await first.shared.flush(first.owned, 30.0)
            await sent(first, log, 2)
            # More at once than may wait: most are forgotten before their tasks have begun.
            for node in reversed(tree.nodes.values()):
                first.shared.stepped(tree, node)
            await first.shared.flush(first.owned, 30.0)
            await sent(first, log, 4)

    asyncio.run(go())


def test_flush_ends_although_the_store_does_not_answer(tmp_path: Path) -> None:
    """A drain waits for a store for a while, and then the next owner replays."""
    log, objects = Log(), BreakableStore()

    async def go() -> None:
        objects.hangs = True
        async with owner(tmp_path, 1, log, objects) as first:
            await first.walk("one", WALK)
            await first.engine.capture.drain()
            # The root state and a call that was made once: nothing says that a replay reaches their state.
            assert not await first.shared.flush(first.owned, 0.1)
            assert log.lines(Kept) == []
            # A rollout that has ended has no state to lose.
            await first.engine.tasks.rollouts.finish((await first.engine.tasks.open("task")).rollouts["one"])
            assert await first.shared.flush(first.owned, 0.1)

    asyncio.run(go())


def test_garbage_waits_for_a_store_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store fails at the first of two tasks. The second one does not try its patience again in this round."""
    log, objects = Log(), BreakableStore()
    tried = list[TaskStates]()

    async def sweep(_: Sweeper, states: TaskStates) -> int:
        tried.append(states)
        raise ObjectStoreError("broken by a test")

    async def go() -> None:
        monkeypatch.setattr(Sweeper, "sweep", sweep)
        async with owner(tmp_path, 1, log, objects) as first:
            monkeypatch.setitem(first.shared._gate.owned, "another", first.owned)
            await first.shared.tidy()
            assert len(tried) == 1

    asyncio.run(go())


def test_a_state_in_which_a_rollout_is_goes_to_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replay would be short, but it may reach another state. What the rollout has left by then does not go."""
    # No replay is too long, and what waits is looked at when the test flushes it.
    for module in ("worth", "sending"):
        monkeypatch.setattr(f"proxy.cluster.states.{module}.WORTH_S", 10.0)
    monkeypatch.setattr("proxy.cluster.states.sending.DELAY_S", 1e6)
    log, objects = Log(), BreakableStore()

    async def go() -> None:
        async with owner(tmp_path, 1, log, objects, replay_s=0.0) as first:

            async def flush() -> None:
                await first.engine.capture.drain()
                await first.shared.flush(first.owned, 30.0)

            await first.walk("one", WALK)
            await flush()
            task = await first.engine.tasks.open("task")
            places = [task.rollouts["one"].node]
            assert kept(log) == {task.tree.root.id, places[0].id}
            # Others come by hits to where nobody is any more.
            assert [outcome for _, outcome in await first.walk("two", WALK[:2])] == [Outcome.HIT] * 2
            places.append(task.rollouts["two"].node)
            await flush()
            assert kept(log) == {task.tree.root.id, *(place.id for place in places)}
        async with owner(tmp_path, 2, log, objects, replay_s=0.0) as second:
            # The fetch is awaited although it takes longer than the replay, which nothing says will work.
            walkers = (await second.engine.tasks.open("task")).rollouts
            for name, walk in (("one", WALK), ("two", WALK[:2])):
                answer, _ = await ask(second.engine, walkers[name], LAST)
                assert answer == (await alone([*walk, LAST]))[-1]

    asyncio.run(go())


def test_a_state_that_a_replay_has_missed_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next owner replays because that is faster, draws another number, and fetches the state then."""
    draws, draw = itertools.count(1), "echo $RANDOM > f"
    monkeypatch.setattr("proxy.cluster.states.worth.UNPROVEN_S", 0.0)
    monkeypatch.setattr(_Shell, "_expand", lambda _shell, word: f"{next(draws)}" if word == "$RANDOM" else word)
    log, objects = Log(), BreakableStore()

    async def go() -> None:
        async with owner(tmp_path, 1, log, objects) as first:
            await first.walk("one", [draw])
            await sent(first, log, 2)
        async with owner(tmp_path, 2, log, objects, replay_s=0.0) as second:
            rollout = (await second.engine.tasks.open("task")).rollouts["one"]
            answer, _ = await ask(second.engine, rollout, "cat f")
            assert answer["stdout"] == "1\n"
            assert second.driver.executed == [draw, draw, "cat f"]

    asyncio.run(go())


def test_unproven_states_are_frozen_whatever_that_saves(tmp_path: Path) -> None:
    """A rollout that is in one would be lost with its owner; nothing is known to need a sandbox there again."""

    async def go() -> None:
        log, objects = Log(), BreakableStore()
        async with owner(tmp_path, 1, log, objects, replay_s=0.0) as first:
            first.engine.snapshot_value.reuse = Reuse(0.0, 1e9)
            await first.walk("one", WALK[:1])
            await sent(first, log, 2)

    asyncio.run(go())
