"""Warm forks are made where they are likely to be used, within their limits, and never delay a call."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.engine import Engine
from proxy.execution import warm_forks
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Node
from sandboxes.calls import ToolCall
from sandboxes.errors import NotFreezableError, SandboxError
from sandboxes.pool.lifecycle import SandboxState
from tests.machine import wait_until
from tests.proxy.rig import ask, engine
from tests.proxy.serving import serving
from tests.sandboxes.memory_driver import Gate, MemoryDriver


def warmed(
    data: Path, test: Callable[[Engine, MemoryDriver], Awaitable[None]], *, gate: Gate | None = None, **settings: Any
) -> None:
    async def go() -> None:
        driver = MemoryDriver(gate)
        async with engine(data, driver, **{"warm_sandboxes": 4, "memory_reserve_bytes": 0, **settings}) as running:
            await test(running, driver)
        assert not driver.live

    asyncio.run(go())


async def settled(running: Engine) -> None:
    """Wait until nothing more is being made ready."""
    warm, quiet = running.warm, 0
    warm._wake.set()
    while quiet < 3:
        await asyncio.sleep(0.003)
        await running.capture.drain()
        await warm.drain()
        quiet = 0 if warm._wake.is_set() or warm._moved or warm._starts else quiet + 1


async def begun(running: Engine, name: str, *commands: str) -> Rollout:
    rollout = await running.tasks.rollout("task", name)
    for command in commands:
        await ask(running, rollout, command)
    return rollout


def positions(running: Engine) -> list[Node]:
    return [slot.position for slot in running.warm.forks() if isinstance(slot.position, Node)]


def test_doubtful_replays_are_not_made_ahead(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: MemoryDriver) -> None:
        first = await begun(running, "first", "echo 1 > a")
        await settled(running)
        node, record = first.node, first.node.origin
        assert record is not None
        running.cache.drop(node)
        assert running.warm._saved_s(first.tree, node) > 0
        record.doubtful = True
        assert running.warm._saved_s(first.tree, node) == 0

    warmed(tmp_path, test)


def test_a_begun_group_gets_a_fork_at_root(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: MemoryDriver) -> None:
        first = await begun(running, "first", "echo 1 > a")
        await settled(running)
        assert first.tree.root in positions(running)
        started = running.counts.starts, running.counts.restores
        second = await running.tasks.rollout("task", "second")
        waiting = asyncio.ensure_future(ask(running, second, "echo 2 > a"))
        assert (await waiting)[1] is Outcome.MISS
        assert running.counts.warm_used == 1
        assert second.tree.root.demand == 1 + 1, "the first rollout needed one, and so did this"
        assert started == (running.counts.starts, running.counts.restores) or running.counts.warm_made > 1

    warmed(tmp_path, test)


def test_a_fork_is_ready_at_an_expected_departure(tmp_path: Path) -> None:
    async def test(running: Engine, driver: MemoryDriver) -> None:
        first = await begun(running, "first", "echo 1 > a", "echo 2 > a", "cat a")
        await running.capture.drain()
        await ask(running, first, "echo gone > away")
        second = await begun(running, "second", "echo 1 > a", "echo 2 > a")
        await settled(running)
        assert second.node in positions(running)
        driver.executed.clear()
        before = running.counts.warm_used
        answer, outcome = await ask(running, second, "cat a; pwd")
        assert (answer["stdout"], outcome) == ("2\n/root\n", Outcome.MISS)
        assert running.counts.warm_used == before + 1
        assert driver.executed == ["cat a; pwd"], "nothing was replayed"

    warmed(tmp_path, test)


def test_a_rollouts_own_sandbox_needs_no_fork(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: MemoryDriver) -> None:
        # A state with live processes cannot be shared, so the sandbox stays the rollout's own.
        first = await begun(running, "first", "sleep 9 &")
        await settled(running)
        node = first.node
        assert node.origin is not None
        node.origin.doubtful = False
        assert running.warm._saved_s(first.tree, node) > 0

        def worthwhile() -> set[Node]:
            first.used_at = time.monotonic() - 1
            return {target.node for _, target in running.warm._worthwhile([first.tree])}

        assert node not in worthwhile()
        await running.pool.close_where(lambda slot: slot.owner == first.id)
        assert node in worthwhile()

    warmed(tmp_path, test)


def test_new_rollouts_find_a_sandbox_at_their_node(tmp_path: Path) -> None:
    def warm() -> list[str]:
        slots = proxy.client.get("/api/v1/sandboxes").json()["items"]
        return [slot["node"] for slot in slots if slot["warm"] and slot["state"] == "idle"]

    with serving(tmp_path, warm_sandboxes=4, memory_reserve_bytes=0) as proxy:
        begun = proxy.client.post("/api/v1/tasks/task/rollouts", json={"rollout": "a"}).json()
        wait_until(lambda: warm() == [begun["node"]], "no sandbox is at the root")
        node = proxy.exec("a", "echo 1 > f").headers["x-forkpoint-node"]
        proxy.exec("a", "echo 2 > f")
        forked = proxy.client.post("/api/v1/tasks/task/rollouts/a/fork", json={"name": "b", "node": node}).json()
        assert forked["node"] == node
        wait_until(lambda: node in warm(), "no sandbox is at the node of the fork")
        assert proxy.exec("b", "cat f").json()["stdout"] == "1\n"
        stats = proxy.client.get("/api/v1/stats").json()
        assert stats["warm_used"] >= 2


def test_a_freeze_in_progress_counts_as_ready(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: MemoryDriver) -> None:
        first = await begun(running, "first", "echo 1 > a")
        (slot,) = running.pool.roster.at(first.node)
        assert slot.state is SandboxState.FREEZING
        assert running.warm.ready(first.node) == 1

    warmed(tmp_path, test)


def test_requested_forks_are_made_once(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: MemoryDriver) -> None:
        task = await running.tasks.open("task")
        assert running.warm.request(task.tree, 3) == 3
        await settled(running)
        assert positions(running) == [task.tree.root] * 3
        assert running.warm.request(task.tree, 99) == 4, "no more than the setting allows"
        await settled(running)
        assert len(positions(running)) == 4
        await running.pool.close_where(lambda slot: slot.warm)
        await settled(running)
        assert positions(running) == []

    warmed(tmp_path, test)


@pytest.mark.parametrize(
    ("max_sandboxes", "warm", "expected"), [(2, 8, 1), (1, 8, 0), (64, 0, 0), (64, 2, 2), (6, 8, 3)]
)
def test_forks_stay_within_setting_and_half_the_budget(
    tmp_path: Path, max_sandboxes: int, warm: int, expected: int
) -> None:
    async def test(running: Engine, _driver: MemoryDriver) -> None:
        task = await running.tasks.open("task")
        running.warm.request(task.tree, 50)
        await settled(running)
        assert len(positions(running)) <= min(expected, max(0, max_sandboxes - 1))
        assert running.warm.max_forks == expected

    warmed(tmp_path, test, max_sandboxes=max_sandboxes, warm_sandboxes=warm)


def test_calls_take_the_room_of_forks(tmp_path: Path) -> None:
    async def test(running: Engine, driver: MemoryDriver) -> None:
        task = await running.tasks.open("task")
        running.warm.request(task.tree, 2)
        await settled(running)
        assert len(positions(running)) == 2
        for number in range(4):
            await ask(running, await running.tasks.rollout(f"other{number}", "r"), "echo 1 > a")
            await running.capture.drain()
        assert len(driver.live) <= 4
        assert running.counts.warm_used == 0

    warmed(tmp_path, test, max_sandboxes=4)


def test_only_sandbox_of_a_state_is_kept(tmp_path: Path) -> None:
    """A rollout keeps the only sandbox of a state: the sandbox is not used as a fork."""

    async def test(running: Engine, _driver: MemoryDriver) -> None:
        first = await begun(running, "first", "sleep 9 &", "echo 1 > a")
        (own,) = [slot for slot in running.pool.roster.slots if slot.owner == first.id]
        await begun(running, "second", "sleep 9 &", "echo 1 > a")
        await settled(running)
        assert own.position is first.node
        assert own.owner == first.id
        assert (await ask(running, first, "cat a"))[0]["stdout"] == "1\n"

    warmed(tmp_path, test)


def test_failed_fork_costs_no_answer(tmp_path: Path) -> None:
    """A fork that failed costs no rollout its answer, and is tried again only after a pause."""

    async def broken(call: ToolCall) -> None:
        if call.arguments["command"] == "sleep 9 &" and len(ran) > 0:
            raise SandboxError("the machine failed")
        ran.append(call)

    ran: list[ToolCall] = []

    async def test(running: Engine, _driver: MemoryDriver) -> None:
        first = await begun(running, "first", "sleep 9 &")
        assert first.node.origin is not None
        # As if a replay had reached it before.
        first.node.origin.doubtful, first.node.origin.proven = False, True
        await begun(running, "second", "sleep 9 &")
        await running.pool.close_where(lambda slot: not slot.warm)
        for number in range(5):
            await begun(running, f"walks{number}", "sleep 9 &")
            await settled(running)
        assert running.counts.failures["warm"] == 1

    warmed(tmp_path, test, gate=broken)


def test_forgetting_a_node_closes_its_fork(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: MemoryDriver) -> None:
        first = await begun(running, "first", "echo 1 > a")
        second = await begun(running, "second", "echo 1 > a")
        await settled(running)
        node = first.node
        task = await running.tasks.open("task")
        await running.forgetting.forget(task.tree, second.node, end_rollouts=True)
        await settled(running)
        assert node not in positions(running)

    warmed(tmp_path, test)


def test_a_requested_snapshot_needs_no_idle_sandbox(tmp_path: Path) -> None:
    async def test(running: Engine, driver: MemoryDriver) -> None:
        first = await begun(running, "first", "echo 1 > a", "echo 2 > a")
        assert first.node.origin is not None
        middle = first.node.origin.source
        await running.capture.drain()
        await running.pool.close_where(lambda _: True)
        running.cache.drop(middle)
        driver.executed.clear()
        await asyncio.gather(*(running.restorer.take_snapshot(first.tree, middle) for _ in range(3)))
        assert middle.snapshot is not None
        assert sum(snapshot.node == middle.id for snapshot in running.snapshots) == 1
        assert set(driver.executed) == {"echo 1 > a"}

    warmed(tmp_path, test, warm_sandboxes=0)


def test_a_requested_snapshot_leaves_the_sandbox_its_owner(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: MemoryDriver) -> None:
        first = await begun(running, "first", "sleep 9 &")
        with pytest.raises(NotFreezableError):
            await running.restorer.take_snapshot(first.tree, first.node)
        assert [slot.owner for slot in running.pool.roster.at(first.node)] == [first.id]

    warmed(tmp_path, test, warm_sandboxes=0)


def test_short_memory_stops_forks_and_closes_idle_sandboxes(tmp_path: Path) -> None:
    async def test(running: Engine, driver: MemoryDriver) -> None:
        await begun(running, "first", "echo 1 > a")
        await settled(running)
        assert positions(running) == []
        assert driver.live
        await running._sweep()
        assert not driver.live

    warmed(tmp_path, test, memory_reserve_bytes=1 << 60)


def test_memory_is_read_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([0])

    async def test(running: Engine, _driver: MemoryDriver) -> None:
        warm = running.warm
        monkeypatch.setattr(warm_forks, "available_bytes", lambda: next(free))
        monkeypatch.setattr(warm_forks, "_MEMORY_READ_EVERY_S", 3600.0)
        warm._memory_read_at = -math.inf
        assert [warm._short_of_memory() for _ in range(3)] == [True] * 3

    warmed(tmp_path, test, memory_reserve_bytes=1 << 60)
