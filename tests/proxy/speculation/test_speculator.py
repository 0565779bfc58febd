"""Calls are executed ahead of the rollouts that are likely to make them, and nothing else changes."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.engine import Engine
from proxy.speculation.speculator import may_speculate
from proxy.tree.keys import call_key
from proxy.tree.next_calls import LikelyCall
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Node, Tree
from sandboxes.calls import ToolCall
from sandboxes.errors import SandboxError
from sandboxes.pool.lifecycle import SandboxState
from sandboxes.spec import EnvironmentSpec
from tests.machine import until
from tests.proxy.rig import ask, engine, shell
from tests.proxy.speculation.rig import MeteredSandbox, speculated, speculating, think
from tests.sandboxes.memory_driver import MemoryDriver

Test = Callable[[Engine, MemoryDriver], Awaitable[None]]


def with_engine(data: Path, test: Test, **settings: Any) -> None:
    async def go() -> None:
        driver = MemoryDriver(settings.pop("gate", None), MeteredSandbox)
        async with speculating(data, driver=driver, **settings) as running:
            await test(running, driver)

    asyncio.run(go())


async def walked(running: Engine, name: str, *commands: str, task: str = "task") -> Rollout:
    rollout = await running.tasks.rollout(task, name)
    for command in commands:
        await ask(running, rollout, command)
    await running.capture.drain()
    return rollout


async def taught(running: Engine, task: str = "task") -> None:
    """Teach that `ls` follows any `echo`, by five rollouts that write different files."""
    for number in range(5):
        await walked(running, f"teacher{number}", f"echo {number} > f{number}", "ls", task=task)
        await running.tasks.rollouts.finish(running.tasks.rollouts.running[task, f"teacher{number}"])


def test_a_likely_call_is_a_hit(tmp_path: Path) -> None:
    async def test(running: Engine, driver: MemoryDriver) -> None:
        await taught(running)
        pupil = await walked(running, "pupil", "echo new > mine")
        await speculated(running, pupil)
        before = driver.executed.count("ls")
        answer, outcome = await ask(running, pupil, "ls")
        assert (answer["stdout"], outcome) == ("mine\nseed\n", Outcome.HIT)
        assert driver.executed.count("ls") == before
        running.speculator.round()
        assert running.counts.speculated_used == 1
        assert running.counts.speculated_saved_s > 0

    with_engine(tmp_path, test)


def test_the_record_says_that_it_was_speculated(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: MemoryDriver) -> None:
        await taught(running)
        pupil = await walked(running, "pupil", "echo new > mine")
        await speculated(running, pupil)
        flags = {running.store.records.call(r).arguments["command"]: running.store.records.call_and_maker(r)[1]
                 for r in pupil.node.records.values()}  # fmt: skip
        assert flags == {"ls": True}
        assert pupil.node.origin is not None
        assert not running.store.records.call_and_maker(pupil.node.origin)[1]

    with_engine(tmp_path, test)


def test_off_by_default(tmp_path: Path) -> None:
    async def go() -> None:
        driver = MemoryDriver(None, MeteredSandbox)
        async with engine(tmp_path, driver) as running:
            assert not running.speculator.enabled
            await taught(running)
            pupil = await walked(running, "pupil", "echo new > mine")
            before = list(driver.executed)
            await speculated(running, pupil)
            assert driver.executed == before
            assert not running.speculator._noted

    asyncio.run(go())


def test_rollouts_sandboxes_are_left_alone(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: MemoryDriver) -> None:
        await taught(running)
        pupil = await walked(running, "pupil", "echo new > mine")
        await running.capture.drain()
        (own,) = [slot for slot in running.pool.roster.slots if slot.owner == pupil.id]
        calls = own.calls
        await speculated(running, pupil)
        assert (own.position, own.calls, own.owner) == (pupil.node, calls, pupil.id)
        assert any(slot.ahead for slot in running.pool.roster.slots)

    with_engine(tmp_path, test)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, True),
        ({"cache": "never"}, False),
        ({"servers": {"tool": {"command": "true", "port": 80}}}, False),
        ({"driver": "http", "servers": {"tool": {"upstream": "http://127.0.0.1:9"}}}, False),
        ({"mcp_servers": {"tool": {"command": "true"}}}, False),
    ],
)
def test_trees_with_servers_are_never_speculated(spec: dict[str, Any], expected: bool) -> None:
    """Requests to servers may leave the sandbox, so nothing is executed ahead in their trees."""
    assert may_speculate(Tree(1, Node(1), EnvironmentSpec.model_validate(spec))) is expected


def test_other_namespaces_learn_nothing(tmp_path: Path) -> None:
    async def test(running: Engine, driver: MemoryDriver) -> None:
        running.speculator._learned._namespace = lambda task: task.partition("-")[0]
        await taught(running, "red-1")
        stranger = await walked(running, "pupil", "echo new > mine", task="blue-1")
        driver.executed.clear()
        await speculated(running, stranger)
        assert "ls" not in driver.executed
        friend = await walked(running, "pupil", "echo new > mine", task="red-2")
        await speculated(running, stranger, friend)
        assert driver.executed.count("ls") == 1

    with_engine(tmp_path, test)


def test_a_rollout_shares_an_execution_ahead(tmp_path: Path) -> None:
    """A rollout that makes the call while it is executed ahead waits for it, and it no longer yields."""
    entered, release = asyncio.Event(), asyncio.Event()

    async def test(running: Engine, driver: MemoryDriver) -> None:
        await taught(running)
        pupil = await walked(running, "pupil", "echo new > mine")
        held.append("ls")
        think(pupil)
        running.speculator.round()
        await asyncio.wait_for(entered.wait(), 30)
        (active,) = running.speculator._active
        assert isinstance(active.sandbox, MeteredSandbox)
        sandbox = active.sandbox
        assert (sandbox.background, active.wanted) == (True, False)
        before = driver.executed.count("ls")
        asking = asyncio.ensure_future(ask(running, pupil, "ls"))
        await until(lambda: active.wanted)
        weights = [sandbox.background]
        assert weights == [False]
        # Neither a busy machine nor an empty budget ends it now.
        running.speculator._idle_cores = lambda: 0.0
        running.speculator._budget.left_s = -100.0
        running.speculator.round()
        release.set()
        answer, outcome = await asking
        assert (answer["stdout"], outcome) == ("mine\nseed\n", Outcome.WAIT)
        assert driver.executed.count("ls") == before + 1

    held: list[str] = []

    async def gate(call: ToolCall) -> None:
        if call.arguments["command"] in held:
            entered.set()
            await release.wait()

    with_engine(tmp_path, test, gate=gate)


@pytest.mark.parametrize("why", ["busy", "budget", "forgotten", "waiting", "deleted", "closed"])
def test_an_execution_ahead_yields(tmp_path: Path, why: str) -> None:
    """It is cancelled, with its sandbox, and records nothing."""
    entered = asyncio.Event()

    async def test(running: Engine, driver: MemoryDriver) -> None:
        await taught(running)
        pupil = await walked(running, "pupil", "echo new > mine")
        await running.capture.drain()
        node, known = pupil.node, len(driver.live)
        held.append("ls")
        think(pupil)
        running.speculator.round()
        await asyncio.wait_for(entered.wait(), 30)
        assert len(driver.live) == known + 1
        if why == "busy":
            running.speculator._idle_cores = lambda: 0.0
        elif why == "budget":
            running.speculator._budget.left_s = -1000.0
        elif why == "forgotten":
            await running.forgetting.forget(pupil.tree, node, end_rollouts=True)
        elif why == "waiting":
            running.pool.waiting += 1
        elif why == "deleted":
            await running.forgetting.delete_task("task")
        else:
            await running.speculator.aclose()
        running.speculator.round()
        await running.speculator._tasks.wait()
        running.pool.waiting = 0
        assert not running.speculator._active
        assert not node.records
        assert len(driver.live) <= known
        assert running.counts.speculated == 0
        held.clear()

    held: list[str] = []

    async def gate(call: ToolCall) -> None:
        if call.arguments["command"] in held:
            entered.set()
            await asyncio.Event().wait()

    with_engine(tmp_path, test, gate=gate)


def test_a_call_whose_sandbox_is_still_made_is_left_to_the_rollout(tmp_path: Path) -> None:
    async def test(running: Engine, driver: MemoryDriver) -> None:
        await taught(running)
        pupil = await walked(running, "pupil", "echo new > mine")
        await running.capture.drain()
        before, restore = driver.executed.count("ls"), driver.restore
        made = asyncio.Event()

        async def slow(*arguments: Any) -> Any:
            made.set()
            await asyncio.Event().wait()
            return await restore(*arguments)

        driver.restore = slow  # type: ignore[method-assign,assignment]
        think(pupil)
        running.speculator.round()
        await asyncio.wait_for(made.wait(), 30)
        answer, outcome = await ask(running, pupil, "ls")
        assert (answer["stdout"], outcome) == ("mine\nseed\n", Outcome.MISS)
        assert driver.executed.count("ls") == before + 1
        assert not running.speculator._active

    with_engine(tmp_path, test)


def test_only_shareable_results_are_recorded(tmp_path: Path) -> None:
    """A call that leaves processes running is not recorded: what follows depends on how long they have run."""

    async def test(running: Engine, driver: MemoryDriver) -> None:
        for number in range(5):
            await walked(running, f"teacher{number}", f"echo {number} > f{number}", "sleep 9 &")
            await running.tasks.rollouts.finish(running.tasks.rollouts.running["task", f"teacher{number}"])
        pupil = await walked(running, "pupil", "echo new > mine")
        before = driver.executed.count("sleep 9 &")
        await speculated(running, pupil)
        assert driver.executed.count("sleep 9 &") == before + 1
        assert not pupil.node.records
        await speculated(running, pupil)
        assert driver.executed.count("sleep 9 &") == before + 1, "it is not tried again at once"

    with_engine(tmp_path, test)


def test_calls_beside_live_processes_are_not_executed_ahead(tmp_path: Path) -> None:
    async def test(running: Engine, driver: MemoryDriver) -> None:
        await taught(running)
        pupil = await walked(running, "pupil", "sleep 9 &", "echo new > mine")
        before = list(driver.executed)
        await speculated(running, pupil)
        assert driver.executed == before

    with_engine(tmp_path, test)


def test_a_task_that_does_not_pay_pauses(tmp_path: Path) -> None:
    async def test(running: Engine, driver: MemoryDriver) -> None:
        await taught(running)
        pupil = await walked(running, "pupil", "echo new > mine")
        running.speculator._credit("task").left_s = -1.0
        before = list(driver.executed)
        await speculated(running, pupil)
        assert driver.executed == before

    with_engine(tmp_path, test)


@pytest.mark.parametrize(("idle", "headroom"), [(0.3, True), (8.0, False)])
def test_a_busy_machine_is_left_alone(tmp_path: Path, idle: float, headroom: bool) -> None:
    async def test(running: Engine, driver: MemoryDriver) -> None:
        await taught(running)
        pupil = await walked(running, "pupil", "echo new > mine")
        running.speculator._has_headroom = lambda: headroom
        before = list(driver.executed)
        await speculated(running, pupil)
        assert driver.executed == before

    with_engine(tmp_path, test, idle=idle)


def test_cpu_time_is_charged(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: MemoryDriver) -> None:
        await taught(running)
        pupil = await walked(running, "pupil", "echo new > mine")
        left = running.speculator._budget.left_s
        await speculated(running, pupil)
        assert running.counts.speculated_cpu_s == 1.0
        assert running.speculator._budget.left_s <= left + 0.5

    with_engine(tmp_path, test)


def test_sandboxes_that_cannot_yield_are_not_used(tmp_path: Path) -> None:
    async def go() -> None:
        driver = MemoryDriver()
        async with speculating(tmp_path, driver=driver) as running:
            await taught(running)
            pupil = await walked(running, "pupil", "echo new > mine")
            # Recorded as instant by this driver, so that nothing would be worth executing.
            running.speculator._learned.likely = lambda *_, **__: [  # type: ignore[method-assign]
                LikelyCall(call_key(shell("ls")), 1.0, 5.0)
            ]
            await speculated(running, pupil)
            assert not pupil.node.records
            assert running.speculator._unmetered == {"memory"}
            driver.executed.clear()
            await speculated(running, pupil)
            assert not driver.executed

    asyncio.run(go())


def test_a_sandbox_of_an_execution_ahead_serves_the_rollout(tmp_path: Path) -> None:
    """After a change that was executed ahead, the rollout goes on in the sandbox that made it."""

    async def test(running: Engine, driver: MemoryDriver) -> None:
        for number in range(5):
            await walked(running, f"teacher{number}", f"echo {number} > f{number}", "echo done > log")
            await running.tasks.rollouts.finish(running.tasks.rollouts.running["task", f"teacher{number}"])
        pupil = await walked(running, "pupil", "echo new > mine")
        await speculated(running, pupil)
        assert (await ask(running, pupil, "echo done > log"))[1] is Outcome.HIT
        (ahead,) = [slot for slot in running.pool.roster.at(pupil.node) if slot.state is SandboxState.IDLE]
        driver.executed.clear()
        answer, outcome = await ask(running, pupil, "cat mine; cat log")
        assert (answer["stdout"], outcome) == ("new\ndone\n", Outcome.MISS)
        assert driver.executed == ["cat mine; cat log"]
        assert not ahead.ahead

    with_engine(tmp_path, test)


def test_a_dead_sandbox_is_not_used_again(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: MemoryDriver) -> None:
        await taught(running)
        pupil = await walked(running, "pupil", "echo new > mine")
        await speculated(running, pupil)
        (ahead,) = [slot for slot in running.pool.roster.slots if slot.ahead]
        assert isinstance(ahead.sandbox, MeteredSandbox)
        ahead.sandbox.kill()
        (record,) = pupil.node.records.values()
        pupil.tree.quarantine(record, "for the test")
        pupil.node.quarantined = frozenset()
        await speculated(running, pupil)
        assert (await ask(running, pupil, "ls"))[1] is Outcome.HIT

    with_engine(tmp_path, test)


def test_a_failed_sandbox_costs_no_answer(tmp_path: Path) -> None:
    async def test(running: Engine, _driver: MemoryDriver) -> None:
        await taught(running)
        pupil = await walked(running, "pupil", "echo new > mine")
        broken.append("ls")
        await speculated(running, pupil)
        broken.clear()
        assert (await ask(running, pupil, "ls"))[0]["stdout"] == "mine\nseed\n"

    broken: list[str] = []

    async def gate(call: ToolCall) -> None:
        if call.arguments["command"] in broken:
            raise SandboxError("the machine failed")

    with_engine(tmp_path, test, gate=gate)
