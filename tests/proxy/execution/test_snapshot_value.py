"""Snapshots: the budget, what is spared, and restores and writes that fail."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.engine import Engine
from proxy.execution.errors import StateLostError
from proxy.tree.rollout import Rollout
from proxy.tree.tree import Node
from sandboxes.driver import FrozenState
from sandboxes.errors import SandboxError, StateGoneError
from sandboxes.spec import EnvironmentSpec
from snapshots import failures
from snapshots.costs import KindCosts, Mean
from snapshots.policy import Reuse
from snapshots.snapshot import Snapshot
from snapshots.store import SnapshotStore
from tests.machine import snapshot_files
from tests.proxy.rig import ask, engine
from tests.sandboxes.memory_driver import MemoryDriver, MemorySandbox, _State

WRITES = [f"echo {'x' * 100 * n} > f{n}" for n in range(1, 7)]


class Choosy(MemoryDriver):
    """A memory driver whose next restores fail with the errors in `refuse`, and starts while `fail_starts`."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse: list[SandboxError] = []
        self.fail_starts = False

    async def start(self, spec: EnvironmentSpec) -> MemorySandbox:
        if self.fail_starts:
            raise SandboxError("no descriptor is free")
        return await super().start(spec)

    async def restore(self, spec: EnvironmentSpec, frozen: FrozenState) -> MemorySandbox:
        if self.refuse:
            raise self.refuse.pop()
        return await super().restore(spec, frozen)


def kept(data: Path, test: Callable[[Engine, Choosy, Rollout], Awaitable[None]], **settings: Any) -> None:
    """Run a test after one rollout has made all the `WRITES`, each with a snapshot, and has lost its sandbox.

    Every state counts as reached by a replay.
    """

    async def go() -> None:
        async with engine(data, driver := Choosy(), **settings) as running:
            rollout = await running.tasks.rollout("task", "first")
            for command in WRITES:
                await ask(running, rollout, command)
                await running.capture.drain()
            await running.pool.close_where(lambda _: True)
            prove_all(rollout)
            driver.executed.clear()
            await test(running, driver, rollout)

    asyncio.run(go())


def prove_all(rollout: Rollout) -> None:
    for node in rollout.tree.nodes.values():
        for record in node.records.values():
            record.proven = True


def held(running: Engine) -> set[int]:
    return {snapshot.node for snapshot in running.snapshots}


def snapshot_of(running: Engine, node: Node) -> Snapshot:
    snapshot = running.snapshots.get(node.snapshot)
    assert snapshot is not None
    return snapshot


def test_eviction_holds_the_budget_and_loses_no_answer(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: Choosy, rollout: Rollout) -> None:
        before = await running.evict_snapshots()
        assert 0 < running.cache.used_bytes <= running.settings.snapshot_bytes
        assert 0 < len(running.snapshots) < len(WRITES) + 1
        assert before == running.counts.evictions == len(WRITES) + 1 - len(running.snapshots)
        nodes = rollout.tree.nodes.values()
        assert {node.id for node in nodes if node.snapshot is not None} == held(running)
        assert (await ask(running, rollout, "cat f1"))[0]["stdout"] == "x" * 100 + "\n"
        await running.capture.drain()

    kept(tmp_path, test, snapshot_bytes=4000)


def test_leased_and_pinned_snapshots_are_not_evicted(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: Choosy, rollout: Rollout) -> None:
        pinned, lent = list(rollout.tree.nodes.values())[2:4]
        pinned.pinned = True
        with running.cache.leased(lent):
            await running.evict_snapshots()
            assert held(running) == {pinned.id, lent.id}
        await running.evict_snapshots()
        assert held(running) == {pinned.id}

    kept(tmp_path, test, snapshot_bytes=0)


def test_unreproducible_states_are_not_evicted(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: Choosy, rollout: Rollout) -> None:
        node = list(rollout.tree.nodes.values())[3]
        assert node.origin is not None
        node.origin.reproducible = False
        await running.evict_snapshots()
        assert held(running) == {node.id}

    kept(tmp_path, test, snapshot_bytes=0)


def test_a_failing_snapshot_is_avoided_and_replaced(tmp_path: Path) -> None:
    """A second snapshot that fails is not replaced, because no further one could be restored either."""

    async def test(running: Engine, driver: Choosy, rollout: Rollout) -> None:
        names = [rollout.node.snapshot]
        for turn in range(1, 5):
            driver.refuse = [SandboxError("the mount failed")]
            assert (await ask(running, rollout, f"cat f{turn}"))[0]["exit_code"] == 0
            if turn < 4:
                assert driver.executed[-2:] == [WRITES[-1], f"cat f{turn}"], "restored one state before, and replayed"
            names.append(rollout.node.snapshot)
            await running.pool.close_where(lambda _: True)
        assert names[1] not in (None, names[0])
        assert names[2:] == [names[1], None, None]
        assert rollout.node.unfreezable
        assert running.counts.failures["restore"] == 4

    kept(tmp_path, test)


def test_snapshots_that_fail_block_no_rollout(tmp_path: Path) -> None:
    """No snapshot of a tree can be restored, and no replay was proven: a replay from the root reaches the state."""

    async def test(running: Engine, driver: Choosy, rollout: Rollout) -> None:
        for node in rollout.tree.nodes.values():
            for record in node.records.values():
                record.proven = False
        for turn in range(1, 4):
            driver.refuse = [SandboxError("the mount failed")] * 9
            assert (await ask(running, rollout, f"cat f{turn}"))[0]["exit_code"] == 0
            assert driver.executed == [*WRITES, f"cat f{turn}"]
            assert len(driver.refuse) == 7, "two snapshots were tried"
            driver.executed.clear()
            await running.pool.close_where(lambda _: True)

    kept(tmp_path, test)


def test_the_only_way_is_given_up_if_it_fails_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on a machine that starts sandboxes; then the state is lost, and another rollout runs its call again."""
    monkeypatch.setattr(failures, "HOPELESS_S", 0.0)

    async def test(running: Engine, driver: Choosy, rollout: Rollout) -> None:
        assert rollout.node.origin is not None
        rollout.node.origin.reproducible = False
        driver.refuse, driver.fail_starts = [SandboxError("it was not made by this CRIU")] * 9, True
        for _ in range(4):
            with pytest.raises(SandboxError):
                await ask(running, rollout, "cat f1")
        driver.fail_starts = False
        with pytest.raises(StateLostError):
            await ask(running, rollout, "cat f1")
        assert running.counts.failures["lost-snapshot"] == 1
        driver.refuse = []
        later = await running.tasks.rollout("task", "later")
        for command in WRITES:
            assert (await ask(running, later, command))[0]["exit_code"] == 0
        assert driver.executed == [WRITES[-1]]

    kept(tmp_path, test)


def test_a_snapshot_without_files_is_dropped_at_once(tmp_path: Path) -> None:
    async def test(running: Engine, driver: Choosy, rollout: Rollout) -> None:
        name = snapshot_of(running, rollout.node).id
        [path] = (path for path in snapshot_files(tmp_path / "snapshots") if path.name == name)
        path.write_text("{")
        assert (await ask(running, rollout, "cat f1"))[0]["exit_code"] == 0
        assert driver.executed == [WRITES[-1], "cat f1"], "restored one node before, and replayed the rest"

    kept(tmp_path, test)


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_failing_machine_costs_no_state(tmp_path: Path, reproducible: bool) -> None:
    async def test(running: Engine, driver: Choosy, rollout: Rollout) -> None:
        assert rollout.node.origin is not None
        rollout.node.origin.reproducible = reproducible
        before = held(running)
        driver.refuse, driver.fail_starts = [SandboxError("no descriptor is free")] * 2, True
        with pytest.raises(SandboxError, match="no descriptor is free"):
            await ask(running, rollout, "cat f1")
        assert held(running) == before
        assert not rollout.node.diverged
        driver.refuse, driver.fail_starts = [], False
        assert (await ask(running, rollout, "cat f1"))[0]["exit_code"] == 0

    kept(tmp_path, test)


def test_the_only_way_to_a_state_is_kept(tmp_path: Path) -> None:
    async def test(running: Engine, driver: Choosy, rollout: Rollout) -> None:
        assert rollout.node.origin is not None
        rollout.node.origin.reproducible = False
        driver.refuse = [SandboxError("no descriptor is free")] * 5
        for _ in range(5):
            with pytest.raises(SandboxError):
                await ask(running, rollout, "cat f1")
        assert (await ask(running, rollout, "cat f6"))[0]["exit_code"] == 0
        assert driver.executed == ["cat f6"]

    kept(tmp_path, test)


def test_states_gone_from_the_driver_are_replayed(tmp_path: Path) -> None:
    async def test(running: Engine, driver: Choosy, rollout: Rollout) -> None:
        driver.refuse = [StateGoneError("layer l1 is gone") for _ in range(len(WRITES) + 1)]
        assert (await ask(running, rollout, "cat f1"))[0]["exit_code"] == 0
        assert driver.executed == [*WRITES, "cat f1"]

    kept(tmp_path, test)


def test_an_unwritten_snapshot_costs_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_kwargs: object) -> Snapshot:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SnapshotStore, "save", full)

    async def test(running: Engine, driver: Choosy, rollout: Rollout) -> None:
        assert len(running.snapshots) == 0
        assert running.counts.failures["freeze"] == len(WRITES) + 1
        assert (await ask(running, rollout, "cat f6"))[0]["exit_code"] == 0
        assert driver.executed == [*WRITES, "cat f6"]
        assert rollout.tree.root.state is not None

    kept(tmp_path, test)


def test_a_failed_freeze_costs_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(running: Engine, driver: Choosy, rollout: Rollout) -> None:
        async def fail(_sandbox: MemorySandbox) -> FrozenState:
            raise SandboxError("it died")

        monkeypatch.setattr(MemorySandbox, "freeze", fail)
        await ask(running, rollout, "echo more > more")
        await running.capture.drain()
        assert not driver.live
        assert running.counts.failures["freeze"] == 1
        assert (await ask(running, rollout, "cat more"))[0]["stdout"] == "more\n"

    kept(tmp_path, test)


def test_a_state_forgotten_meanwhile_gets_no_snapshot(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: Choosy, rollout: Rollout) -> None:
        await ask(running, rollout, "echo more > more")
        task = await running.tasks.open("task")
        node = rollout.node
        await running.forgetting.forget(task.tree, node, end_rollouts=True)
        await running.capture.drain()
        assert node.id not in held(running)

    kept(tmp_path, test)


# What is learnt, and what is decided by it


class Frozen(MemoryDriver):
    """A memory driver that freezes live processes too, as images of 1000 bytes."""

    def _adopt(self, spec: EnvironmentSpec, state: _State) -> MemorySandbox:
        sandbox = FrozenSandbox(f"memory-{next(self._ids)}", spec, state, self)
        self.live[sandbox.id] = sandbox
        return sandbox


class FrozenSandbox(MemorySandbox):
    async def freeze(self) -> FrozenState:
        jobs, self._state.jobs = self._state.jobs, 0
        try:
            frozen = await super().freeze()
        finally:
            self._state.jobs = jobs
        if not jobs:
            return frozen
        parts = (f"image-{next(self._driver._ids)}-1000",)
        return replace(frozen, kind="processes", size_bytes=1000, parts=parts)


def test_images_of_live_processes_have_their_own_budget(tmp_path: Path) -> None:
    async def go() -> None:
        async with engine(tmp_path, Frozen(), checkpoint_bytes=2500) as running:
            rollout = await running.tasks.rollout("task", "first")
            await ask(running, rollout, "echo 1 > a")
            for number in range(5):
                await ask(running, rollout, f"sleep {number} &")
                await running.capture.drain()
            assert running.cache.checkpoint_bytes == 5000
            prove_all(rollout)
            await running._sweep()
            assert running.cache.checkpoint_bytes == 2000
            assert sum(snapshot.kind == "files" for snapshot in running.snapshots) == 2, "files are spared"
            assert running.counts.evictions == 3

    asyncio.run(go())


def test_costs_are_learnt_by_kind_of_snapshot(tmp_path: Path) -> None:
    async def go() -> None:
        async with engine(tmp_path, Frozen()) as running:
            cheap = KindCosts(Mean(0.001), Mean(0.001))
            running.cache.costs["memory"] = replace(running.cache.costs["memory"], processes=cheap)
            rollout = await running.tasks.rollout("task", "first")
            for command in ("echo 1 > a", "sleep 9 &", "echo 2 > a"):
                await ask(running, rollout, command)
                await running.capture.drain()
            await running.pool.close_where(lambda _: True)
            await ask(running, rollout, "pwd")
            costs = running.cache.costs["memory"]
            assert (costs.files.freeze.samples, costs.processes.freeze.samples) == (1, 2)
            assert (costs.files.restore.samples, costs.processes.restore.samples) == (0, 1)
            assert costs.fresh.samples == 1
            (used,) = [snapshot for snapshot in running.snapshots if snapshot.uses]
            assert used.restore_s > 0

    asyncio.run(go())


def test_expensive_freezes_are_replaced_by_replay(tmp_path: Path) -> None:
    async def go() -> None:
        async with engine(tmp_path, Frozen(), reuse=Reuse()) as running:
            driver = "memory"
            costs = running.cache.costs[driver]
            running.cache.costs[driver] = replace(costs, processes=KindCosts(Mean(60.0, 9), Mean(60.0, 9)))
            rollout = await running.tasks.rollout("task", "first")
            await ask(running, rollout, "sleep 9 &")
            await running.capture.drain()
            assert rollout.node.snapshot is None, "a minute of freezing to save a hundredth of a second"
            await ask(running, rollout, "echo 1 > a")
            await running.pool.close_where(lambda _: True)
            assert (await ask(running, rollout, "cat a"))[0]["stdout"] == "1\n"
            assert running.counts.replayed_calls == 2

    asyncio.run(go())


def test_more_rollouts_behind_mean_more_expected_uses(tmp_path: Path) -> None:
    async def go() -> None:
        async with engine(tmp_path) as running:
            first = await running.tasks.rollout("task", "first")
            await ask(running, first, "echo 1 > a")
            await running.capture.drain()
            snapshot = snapshot_of(running, first.node)

            def uses() -> float:
                [prospect] = running.snapshot_value.prospects([snapshot])
                return prospect.uses

            before = uses()
            others = [await running.tasks.rollout("task", f"r{number}") for number in range(3)]
            assert uses() > before
            for other in others:
                await running.tasks.rollouts.finish(other)
            assert uses() == before

    asyncio.run(go())


def test_demand_for_a_state_is_counted_once(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: Choosy, rollout: Rollout) -> None:
        reuse, node = running.snapshot_value.reuse, rollout.node
        await ask(running, rollout, "cat f1")
        await ask(running, rollout, "cat f2")
        assert node.demand == 1
        assert running.snapshot_value.reuse.uses == reuse.uses + 1

    kept(tmp_path, test, reuse=Reuse())
