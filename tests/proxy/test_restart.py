"""Promise 3: a kill at any moment loses no answer that was given, and no rollout's place."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engine import Engine, build_engine
from proxy.settings import Settings
from proxy.tree.rollout import Outcome
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import start
from tests.machine import snapshot_files
from tests.proxy.rig import KEEPS_ALL, SPEC, alone, ask, engine
from tests.proxy.test_transparency import COMMANDS
from tests.sandboxes.memory_driver import MemoryDriver

trajectories = st.lists(st.sampled_from(COMMANDS), min_size=1, max_size=12)


async def open_engine(data: Path, driver: MemoryDriver, **settings: Any) -> Engine:
    chosen = Settings(data=data, default_spec=SPEC, warm_sandboxes=0, **settings)
    running = build_engine(chosen, {"memory": driver})
    running.snapshot_value.reuse = KEEPS_ALL
    await running.open()
    return running


async def abandon(running: Engine) -> None:
    """Leave an engine as a kill does: nothing is folded, flushed or closed in order."""
    running.lifecycle._running.cancel()
    await running.capture.drain()
    running.store.close()


@settings(max_examples=40)
@given(trajectories, st.integers(0, 12))
def test_a_rollout_continues_at_its_node(tmp_path_factory: object, trajectory: list[str], killed_at: int) -> None:
    """The proxy is killed before any call of a rollout; the rollout continues at its node with the same answers."""

    async def body(data: Path) -> None:
        running = await open_engine(data, MemoryDriver())
        answers = []
        for turn, command in enumerate(trajectory):
            if turn == killed_at:
                await abandon(running)
                running = await open_engine(data, MemoryDriver())
            rollout = await running.tasks.rollout("task", "r")
            assert rollout.calls == turn
            answers.append((await ask(running, rollout, command))[0])
        assert answers == await alone(trajectory)
        await running.aclose()

    asyncio.run(body(tmp_path_factory.mktemp("data")))  # type: ignore[attr-defined]


def test_recorded_calls_hit_after_a_restart(tmp_path: Path) -> None:
    """A second rollout hits after the restart, and no sandbox is started for it."""

    async def body() -> None:
        calls = ["echo 1 > a", "cat a", "cd /tmp", "pwd"]
        running = await open_engine(tmp_path, MemoryDriver())
        rollout = await running.tasks.rollout("task", "first")
        before_kill = [(await ask(running, rollout, command))[0] for command in calls]
        await abandon(running)
        async with engine(tmp_path, driver := MemoryDriver()) as again:
            second = await again.tasks.rollout("task", "second")
            answers = [await ask(again, second, command) for command in calls]
            assert [answer for answer, _ in answers] == before_kill
            assert {outcome for _, outcome in answers} == {Outcome.HIT}
            assert driver.executed == []
            second.tree.check()

    asyncio.run(body())


def test_snapshots_are_used_after_a_restart(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(tmp_path) as running:
            rollout = await running.tasks.rollout("task", "first")
            for command in ("echo 1 > a", "echo 2 > b"):
                await ask(running, rollout, command)
        async with engine(tmp_path, driver := MemoryDriver()) as again:
            rollout = await again.tasks.rollout("task", "first")
            assert (await ask(again, rollout, "cat b"))[0]["stdout"] == "2\n"
            assert driver.executed == ["cat b"], "restored, not replayed"

    asyncio.run(body())


def test_snapshots_from_before_a_reboot_are_dropped(tmp_path: Path) -> None:
    """After a reboot a snapshot's files may not all have reached the disk."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            rollout = await running.tasks.rollout("task", "first")
            await ask(running, rollout, "echo 1 > a")
        (tmp_path / "snapshots" / "boot-id").write_text("another boot")
        async with engine(tmp_path, driver := MemoryDriver()) as again:
            rollout = await again.tasks.rollout("task", "first")
            assert (await ask(again, rollout, "cat a"))[0]["stdout"] == "1\n"
            assert driver.executed == ["echo 1 > a", "cat a"], "replayed"

    asyncio.run(body())


def test_snapshots_of_another_store_are_dropped(tmp_path: Path) -> None:
    """The store was moved away. A task's tree gets the number of an earlier one, and not its root state."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            rollout = await running.tasks.rollout("task", "first")
            await ask(running, rollout, "echo 1 > a")
        shutil.rmtree(tmp_path / "journal")
        damaged = tmp_path / "forkpoint.sqlite"
        damaged.unlink()
        spec = EnvironmentSpec(driver="memory", files={"/root/seed": "another\n"})
        async with engine(tmp_path, default_spec=spec) as again:
            assert len(again.snapshots) == 0
            other = await again.tasks.rollout("other", "first")
            assert (await ask(again, other, "cat seed"))[0]["stdout"] == "another\n"

    asyncio.run(body())


def test_a_half_written_snapshot_is_deleted(tmp_path: Path) -> None:
    """A snapshot that lacks its end is deleted at start, and its state is reached by a replay."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            rollout = await running.tasks.rollout("task", "first")
            await ask(running, rollout, "echo 1 > a")
        for snapshot in snapshot_files(tmp_path / "snapshots"):
            snapshot.write_bytes(snapshot.read_bytes()[:-1])
        async with engine(tmp_path) as again:
            assert len(again.snapshots) == 0
            assert snapshot_files(tmp_path / "snapshots") == []
            rollout = await again.tasks.rollout("task", "first")
            assert (await ask(again, rollout, "cat a"))[0]["stdout"] == "1\n"

    asyncio.run(body())


def test_a_cold_task_is_read_back_unchanged(tmp_path: Path) -> None:
    """A task that was removed from memory is read back from the store when it is named again."""

    async def body() -> None:
        async with engine(tmp_path, driver := MemoryDriver()) as running:
            for task in ("cold", "warm"):
                rollout = await running.tasks.rollout(task, "r")
                for command in ("echo 1 > a", "cd /tmp", "pwd"):
                    await ask(running, rollout, command)
            assert running.forgetting.close_cold(max_records=0, idle_s=0) == 0, "their sandboxes live"
            await running.capture.drain()
            await running.pool.close_where(lambda _: True)
            assert running.forgetting.close_cold(max_records=0, idle_s=60) == 0, "they were used a moment ago"
            assert running.forgetting.close_cold(max_records=8, idle_s=0) == 1
            assert [task for task, _ in running.tasks.rollouts.running] == ["warm"]
            again = await running.tasks.rollout("cold", "r")
            assert again.calls == 3
            ran = len(driver.executed)
            assert await ask(running, again, "pwd") == ((await alone(["cd /tmp", "pwd"]))[1], Outcome.HIT)
            assert (await ask(running, again, "cat /root/a"))[0]["stdout"] == "1\n"
            assert driver.executed[ran:] == ["cat /root/a"], "restored from its snapshot"
            again.tree.check()

    asyncio.run(body())


def test_a_tree_that_no_task_uses_leaves_memory(tmp_path: Path) -> None:
    """A view or an eviction reads the tree of a task back that is in memory no more; nobody else would close it."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            for task in ("first", "second"):
                await ask(running, await running.tasks.rollout(task, "r"), "echo 1 > a")
            await running.capture.drain()
            await running.pool.close_where(lambda _: True)
            first, second = [(await running.tasks.find(task)).tree for task in ("first", "second")]
            assert running.forgetting.close_cold(max_records=second.size, idle_s=0) == 1
            assert not running.trees.get(first.id)
            running.trees.load(first.id)
            assert running.forgetting.close_cold(max_records=second.size, idle_s=60) == 0, "it was named a moment ago"
            assert running.forgetting.close_cold(max_records=second.size, idle_s=0) == 1
            assert (running.trees.get(first.id), running.trees.get(second.id)) == (None, second)
            # One that a rollout is restored in stays, whoever named it.
            running.tasks.close(await running.tasks.find("second"))
            await ask(running, await running.tasks.rollout("second", "s"), "echo 2 > b")
            running.tasks.close(await running.tasks.find("second"))
            assert running.forgetting.close_cold(max_records=0, idle_s=0) == 0, "a sandbox stands in it"

    asyncio.run(body())


def test_a_task_with_a_call_in_flight_stays(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(tmp_path) as running:
            rollout = await running.tasks.rollout("task", "r")
            call = start(ask(running, rollout, "pwd"))
            await asyncio.sleep(0)
            assert running.forgetting.close_cold(max_records=0, idle_s=0) == 0
            await call

    asyncio.run(body())


def test_polls_continue_after_a_kill(tmp_path: Path) -> None:
    """The repeated poll after a kill has the key of the next poll, so it is executed and makes progress."""

    async def body() -> None:
        running = await open_engine(tmp_path, MemoryDriver())
        rollout = await running.tasks.rollout("task", "r")
        for command in ("cat seed", "sleep 9 &", "cat seed", "pwd", "cat seed"):
            await ask(running, rollout, command)
        polled = rollout.polled_keys
        assert len(polled) == 3
        await abandon(running)
        async with engine(tmp_path) as again:
            rollout = await again.tasks.rollout("task", "r")
            assert rollout.polled_keys == polled

    asyncio.run(body())
