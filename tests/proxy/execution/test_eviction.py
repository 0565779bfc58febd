"""An eviction costs time and never an answer: before the last way to a state goes, a replay has reached it."""

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy import engine as engines
from proxy.audit import prover
from proxy.engine import Engine
from proxy.execution.errors import StateLostError
from proxy.tree import tree as trees
from proxy.tree.rollout import Outcome, Rollout
from snapshots import cache
from tests.proxy.execution.test_divergence import RandomDriver, lose_sandboxes, output
from tests.proxy.rig import ask, engine
from tests.proxy.test_restart import abandon, open_engine
from tests.sandboxes.memory_driver import MemoryDriver


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays prove at once, and rounds of proofs follow each other without a pause."""
    monkeypatch.setattr(trees, "PROOF_AGE_S", -1.0)
    monkeypatch.setattr(prover, "PROOF_AGE_S", -1.0)
    monkeypatch.setattr(prover, "_PAUSE_SHARE", 0)
    # No round of the engine's own runs beside those of the tests.
    monkeypatch.setattr(engines, "_AUDIT_EVERY_S", 1e6)


async def squeeze(running: Engine) -> None:
    """Evict, prove and evict again, without any sandbox that could help."""
    await lose_sandboxes(running)
    await running.evict_snapshots()
    await running._prover().work()
    await lose_sandboxes(running)


def kept(running: Engine) -> int:
    """Return the number of kept states, the root's not counted."""
    return sum(snapshot.node != 1 for snapshot in running.snapshots)


def test_random_content_survives_eviction(tmp_path: Path) -> None:
    """Two rollouts are at a random state when all snapshots are over budget. Both still read what they read."""

    async def body() -> None:
        async with engine(tmp_path, RandomDriver(), snapshot_bytes=1) as running:
            group = [await running.tasks.rollout("task", name) for name in ("r1", "r2")]
            for rollout in group:
                await ask(running, rollout, "echo random > id")
            before = [await output(running, rollout, "cat id") for rollout in group]
            await squeeze(running)
            await squeeze(running)
            after = [await output(running, rollout, "cat id ; true") for rollout in group]
            assert before == after
            assert running.cache.full == {"files"}

    asyncio.run(body())


def test_repeatable_content_is_evicted_after_a_proof(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(tmp_path, driver := RandomDriver(), snapshot_bytes=1) as running:
            rollout = await running.tasks.rollout("task", "r1")
            await ask(running, rollout, "echo 1 > a")
            await lose_sandboxes(running)
            assert await running.evict_snapshots() == 1, "the root is always reached"
            assert kept(running) == 1
            for _ in range(2):
                await squeeze(running)
            assert kept(running) == 0
            assert driver.executed == ["echo 1 > a", "echo 1 > a"]
            assert not running.cache.full
            assert await output(running, rollout, "cat a") == "1\n"

    asyncio.run(body())


def test_a_proof_outlives_a_restart(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(tmp_path, snapshot_bytes=1 << 20) as running:
            rollout = await running.tasks.rollout("task", "r1")
            await ask(running, rollout, "echo 1 > a")
            await running.capture.drain()
            await running.restorer.prove(rollout.tree, rollout.node)
        async with engine(tmp_path, driver := MemoryDriver(), snapshot_bytes=1) as again:
            assert kept(again) == 0, "evicted at the start, without another replay"
            assert driver.executed == []

    asyncio.run(body())


def test_states_without_rollouts_are_forgotten_last(tmp_path: Path) -> None:
    """No rollout is at a random state. Over budget it is forgotten: the next rollout runs the call again."""

    async def body() -> None:
        async with engine(tmp_path, RandomDriver(), snapshot_bytes=1) as running:
            for name in ("ended", "stays"):
                rollout = await running.tasks.rollout("task", name)
                await ask(running, rollout, f"echo {name} random > id")
                await running.capture.drain()
            await running.tasks.rollouts.finish(running.tasks.rollouts.running["task", "ended"])
            for _ in range(3):
                await squeeze(running)
            assert kept(running) == 1
            other = await running.tasks.rollout("task", "other")
            assert (await ask(running, other, "echo ended random > id"))[1] is Outcome.MISS
            assert (await ask(running, other, "cat id"))[0]["stdout"].startswith("ended")
            other.tree.check()

    asyncio.run(body())


def test_stored_rollouts_keep_their_states(tmp_path: Path) -> None:
    """A rollout that was not read back into memory since a restart needs its state as well."""

    async def body() -> None:
        running = await open_engine(tmp_path, RandomDriver())
        rollout = await running.tasks.rollout("task", "r1")
        await ask(running, rollout, "echo random > id")
        before = await output(running, rollout, "cat id")
        await running.capture.drain()
        await abandon(running)
        async with engine(tmp_path, RandomDriver(), snapshot_bytes=1) as again:
            for _ in range(3):
                await squeeze(again)
            rollout = await again.tasks.rollout("task", "r1")
            assert await output(again, rollout, "cat id ; true") == before

    asyncio.run(body())


events = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 2)),
        st.tuples(st.just("random"), st.integers(0, 2)),
        st.tuples(st.just("read"), st.integers(0, 2)),
        st.tuples(st.just("end"), st.integers(0, 2)),
        st.tuples(st.just("squeeze"), st.just(0)),
        st.tuples(st.just("lose"), st.just(0)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=25,
)


class History:
    """Three rollouts that write, read and end, while the proxy evicts, proves, closes sandboxes and restarts."""

    def __init__(self, data: Path, budget_bytes: int) -> None:
        self.data, self.budget_bytes = data, budget_bytes
        self.expected: dict[int, str] = {}
        self.had_snapshot: set[int] = set()

    async def open(self) -> None:
        self.running = await open_engine(self.data, RandomDriver(), snapshot_bytes=self.budget_bytes)

    async def happen(self, event: str, number: int) -> None:
        if event == "squeeze":
            await squeeze(self.running)
        elif event in ("lose", "restart"):
            await lose_sandboxes(self.running)
            if event == "restart":
                await abandon(self.running)
                await self.open()
        else:
            await self.call(event, number)
        for tree in self.running.trees:
            tree.check()

    async def call(self, event: str, number: int) -> None:
        rollout = await self.running.tasks.rollout("task", f"r{number}")
        if event == "end":
            await self.end(rollout, number)
            return
        try:
            command = {"write": "echo 1 >> f", "random": "echo random >> f", "read": "cat f ; true"}[event]
            await ask(self.running, rollout, command)
            await self.running.capture.drain()
            if rollout.node.snapshot is not None:
                self.had_snapshot.add(rollout.node.id)
            shown = await output(self.running, rollout, "cat f")
        except StateLostError:
            # A state that was refused a snapshot had only its sandbox.
            assert rollout.node.id not in self.had_snapshot
            await self.end(rollout, number)
            return
        assert event != "read" or shown == self.expected.get(number, shown)
        self.expected[number] = shown

    async def end(self, rollout: Rollout, number: int) -> None:
        await self.running.tasks.rollouts.finish(rollout)
        self.expected.pop(number, None)


@settings(max_examples=60)
@given(events, st.integers(1, 1500), st.booleans())
def test_a_kept_state_is_never_lost(history: list[tuple[str, int]], budget_bytes: int, flooded: bool) -> None:
    """Whatever is evicted, proven, closed or restarted: a rollout at a state that had a snapshot reads its own file.

    In a flood of states, those that no rollout needs go before they are proven.
    """

    async def body(data: Path) -> None:
        story = History(data, budget_bytes)
        await story.open()
        for event, number in history:
            await story.happen(event, number)
        await lose_sandboxes(story.running)
        await story.running.aclose()

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "PATIENCE", 0.0 if flooded else 0.5)
        asyncio.run(body(Path(folder)))


def test_states_are_given_up_as_fast_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a flood no state is refused a snapshot. A running rollout keeps its nearest; a later one makes the others."""
    monkeypatch.setattr(cache, "HARD_BYTES", 0)
    monkeypatch.setattr(trees, "PROOF_AGE_S", 60.0)

    async def body() -> None:
        async with engine(tmp_path, driver := RandomDriver(), snapshot_bytes=2000) as running:
            rollout = await running.tasks.rollout("task", "r1")
            for number in range(20):
                await ask(running, rollout, f"echo {'x' * 400} {number} random > f")
                await running.capture.drain()
                await running.evict_snapshots()
                assert rollout.node.snapshot is not None, "the nearest state is kept"
            assert running.cache.accepts("files")
            before = await output(running, rollout, "cat f")
            await lose_sandboxes(running)
            assert await output(running, rollout, "cat f ; true") == before
            executed = len(driver.executed)
            other = await running.tasks.rollout("task", "r2")
            assert (await ask(running, other, f"echo {'x' * 400} 0 random > f"))[1] is not Outcome.HIT
            assert len(driver.executed) > executed
            other.tree.check()

    asyncio.run(body())
