"""Answering a call: single flight, the order of calls, cancelled callers, and executions that make no record."""

import asyncio
import contextlib
import math
import time
from pathlib import Path

import pytest

import sandboxes.driver
from proxy.engine import Engine
from proxy.execution import replay
from proxy.storage.errors import StoreError
from proxy.storage.records import RecordStore
from proxy.tree.keys import call_key
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Record
from sandboxes.calls import ToolCall
from sandboxes.errors import SandboxError
from tests.proxy.rig import SPEC, ask, engine, shell
from tests.sandboxes.memory_driver import MemoryDriver, MemorySandbox


class Gate:
    """Holds calls of one command until `open` is set; `reached` is set when the first has arrived."""

    def __init__(self, command: str) -> None:
        self.command, self.open, self.reached = command, asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, call: ToolCall) -> None:
        if call.arguments.get("command") == self.command:
            self.reached.set()
            await self.open.wait()
            if self.error is not None:
                error, self.error = self.error, None
                raise error


async def rollouts(running: Engine, count: int) -> list[Rollout]:
    return [await running.tasks.rollout("task", f"r{n}") for n in range(count)]


async def settled() -> None:
    """Let every task run that can."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_identical_calls_share_one_execution(tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate("echo 1 > a")
        async with engine(tmp_path, driver := MemoryDriver(gate)) as running:
            group = await rollouts(running, 20)
            requests = [asyncio.ensure_future(ask(running, rollout, "echo 1 > a")) for rollout in group]
            await gate.reached.wait()
            await settled()
            gate.open.set()
            outcomes = [outcome for _, outcome in await asyncio.gather(*requests)]
            assert driver.executed == ["echo 1 > a"]
            assert sorted(outcomes) == [Outcome.MISS] + [Outcome.WAIT] * 19

    asyncio.run(body())


def test_many_equal_rollouts_run_each_call_once(tmp_path: Path) -> None:
    calls = [f"echo {n} >> log" if n % 2 else "cat log" for n in range(20)]

    async def walk(running: Engine, rollout: Rollout) -> list[str]:
        return [(await ask(running, rollout, command))[0]["stdout"] for command in calls]

    async def body() -> None:
        async with engine(tmp_path, driver := MemoryDriver()) as running:
            answers = await asyncio.gather(*(walk(running, rollout) for rollout in await rollouts(running, 200)))
            assert all(answer == answers[0] for answer in answers)
            assert sorted(driver.executed) == sorted(calls)
            assert running.counts.outcomes[Outcome.MISS] == 20
            assert sum(running.counts.outcomes) == 4000

    asyncio.run(body())


def test_a_failed_leader_is_replaced_by_the_next(tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate("echo 1 > a")
        gate.error = SandboxError("killed by the test")
        async with engine(tmp_path, MemoryDriver(gate)) as running:
            leader, *others = await rollouts(running, 3)
            led = asyncio.ensure_future(ask(running, leader, "echo 1 > a"))
            await gate.reached.wait()
            waiting = [asyncio.ensure_future(ask(running, rollout, "echo 1 > a")) for rollout in others]
            await settled()
            gate.open.set()
            with pytest.raises(SandboxError):
                await led
            outcomes = [outcome for _, outcome in await asyncio.gather(*waiting)]
            assert sorted(outcomes) == [Outcome.MISS, Outcome.WAIT]
            assert leader.node is leader.tree.root
            assert others[0].node is others[1].node is not leader.node

    asyncio.run(body())


def test_a_cancelled_caller_does_not_stop_its_call(tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate("echo 1 > a")
        async with engine(tmp_path, driver := MemoryDriver(gate)) as running:
            leader, other = await rollouts(running, 2)
            led = asyncio.ensure_future(ask(running, leader, "echo 1 > a"))
            await gate.reached.wait()
            waiting = asyncio.ensure_future(ask(running, other, "echo 1 > a"))
            await settled()
            led.cancel()
            await settled()
            gate.open.set()
            assert (await waiting)[1] is Outcome.WAIT
            with contextlib.suppress(asyncio.CancelledError):
                await led
            assert driver.executed == ["echo 1 > a"]
            assert leader.node is other.node

    asyncio.run(body())


def test_calls_of_a_rollout_keep_their_order(tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate("echo 1 > a")
        async with engine(tmp_path, MemoryDriver(gate)) as running:
            first, second = await rollouts(running, 2)
            gate.open.set()
            await ask(running, first, "cat a")
            gate.open.clear()
            gate.reached.clear()
            writes = asyncio.ensure_future(ask(running, second, "echo 1 > a"))
            await gate.reached.wait()
            # The root knows the call, but this rollout has a call in flight that may change the answer.
            reads = asyncio.ensure_future(ask(running, second, "cat a"))
            await settled()
            assert not reads.done()
            gate.open.set()
            await writes
            assert (await reads)[0]["stdout"] == "1\n"

    asyncio.run(body())


def test_a_dead_sandbox_makes_no_record(tmp_path: Path) -> None:
    async def body() -> None:
        gate = Gate("cat seed")
        gate.error = SandboxError("killed by the test")
        gate.open.set()
        async with engine(tmp_path, driver := MemoryDriver(gate)) as running:
            (rollout,) = await rollouts(running, 1)
            with pytest.raises(SandboxError):
                await ask(running, rollout, "cat seed")
            assert not rollout.tree.root.records
            assert rollout.calls == 0
            assert not driver.live
            assert (await ask(running, rollout, "cat seed"))[0]["stdout"] == "seed\n"

    asyncio.run(body())


def test_unwritten_calls_are_neither_known_nor_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with engine(tmp_path, driver := MemoryDriver()) as running:
            (rollout,) = await rollouts(running, 1)
            await ask(running, rollout, "pwd")

            def full(*_: object, **__: object) -> None:
                raise StoreError("disk full")

            with monkeypatch.context() as patch:
                patch.setattr(RecordStore, "save", full)
                with pytest.raises(StoreError):
                    await ask(running, rollout, "echo 1 > a")
            assert rollout.node is rollout.tree.root
            assert not driver.live, "its sandbox has changed, so no call may use it"
            assert (await ask(running, rollout, "cat a"))[0]["exit_code"] == 1

    asyncio.run(body())


def test_uncached_tasks_run_every_call(tmp_path: Path) -> None:
    async def body() -> None:
        spec = SPEC.model_copy(update={"cache": "never"})
        async with engine(tmp_path, driver := MemoryDriver(), default_spec=spec) as running:
            for rollout in await rollouts(running, 2):
                answers = [await ask(running, rollout, command) for command in ("echo 1 >> a", "cat a", "cat a")]
                assert [answer["stdout"] for answer, _ in answers] == ["", "1\n", "1\n"]
                assert {outcome for _, outcome in answers} == {Outcome.BYPASS}
            assert len(driver.executed) == 6

    asyncio.run(body())


def test_histories_with_equal_states_merge(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(tmp_path, driver := MemoryDriver()) as running:
            first, second = await rollouts(running, 2)
            for command in ("mkdir d", "cd d", "cd ..", "cat seed"):
                await ask(running, first, command)
            for command in ("mkdir d", "cat seed"):
                await ask(running, second, command)
            assert first.node is second.node
            assert driver.executed == ["mkdir d", "cd d", "cd ..", "cat seed"]

    asyncio.run(body())


def test_a_hit_costs_the_same_at_any_depth(tmp_path: Path) -> None:
    deep = [f"echo {n} >> log" for n in range(300)]

    async def body() -> None:
        async with engine(tmp_path) as running:
            (rollout,) = await rollouts(running, 1)
            for command in deep:
                await ask(running, rollout, command)
            await running.capture.drain()
            other = await running.tasks.rollout("task", "other")
            looked = 0

            class Counting(dict[bytes, object]):
                def get(self, key: object, default: object = None) -> object:
                    nonlocal looked
                    looked += 1
                    return super().get(key, default)  # type: ignore[call-overload]

            for node in rollout.tree.nodes.values():
                node.records = Counting(node.records)  # type: ignore[assignment,arg-type]
            for command in deep:
                assert running.step.known(other, call_key(shell(command))) is not None
            assert looked == len(deep), "one look-up in one node for each call"

    asyncio.run(body())


def test_nth_poll_is_shared_between_rollouts(tmp_path: Path) -> None:
    """Otherwise an agent that waits for a background process would read the same answer for ever."""
    poll = "cat ready"

    async def body() -> None:
        async with engine(tmp_path, driver := MemoryDriver()) as running:
            first, second = await rollouts(running, 2)
            await ask(running, first, "sleep 9 &")
            polls = [await ask(running, first, command) for command in (poll, "pwd", poll, poll, "pwd")]
            assert [outcome for _, outcome in polls] == [Outcome.MISS] * 5
            assert driver.executed == ["sleep 9 &", poll, "pwd", poll, poll, "pwd"]
            await ask(running, second, "sleep 9 &")
            assert second.node is first.node
            again = [await ask(running, second, command) for command in (poll, poll, poll, "pwd", "pwd")]
            assert [outcome for _, outcome in again] == [Outcome.HIT] * 5
            assert (await ask(running, second, poll))[1] is Outcome.MISS
            # At another node the rollout has not polled yet.
            await ask(running, first, "echo 1 > ready")
            assert (await ask(running, first, poll))[0]["stdout"] == "1\n"
            assert not second.node.state
            # Without live processes nothing can have changed meanwhile.
            third = await running.tasks.rollout("task", "third")
            assert [(await ask(running, third, "pwd"))[1] for _ in range(3)] == [Outcome.MISS, Outcome.HIT, Outcome.HIT]

    asyncio.run(body())


def proven(rollout: Rollout) -> Record:
    """Let other rollouts be led to a rollout's node, as after a replay that reached it."""
    record = rollout.node.origin
    assert record is not None
    record.proven, record.doubtful = True, False
    return record


def test_replayed_processes_get_their_recorded_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ages: list[float] = []

    async def rest(_sandbox: MemorySandbox, dwell_s: float) -> None:
        ages.append(dwell_s)

    # Which members the class has is remembered.
    monkeypatch.setattr(sandboxes.driver, "_FULFILS", {})
    monkeypatch.setattr(MemorySandbox, "rest", rest, raising=False)

    async def body() -> None:
        async with engine(tmp_path) as running:
            first, second, third = await rollouts(running, 3)
            await ask(running, first, "sleep 9 &")
            proven(first)
            await ask(running, first, "pwd")
            assert ages == [], "its own sandbox is there"
            # The second rollout arrived 7 s ago, and a hit that counts as 5 s answered it at once.
            await ask(running, second, "sleep 9 &")
            second.arrived_at -= 2
            first.node.records[next(iter(first.polled_keys))].seconds = 5.0
            assert (await ask(running, second, "pwd"))[1] is Outcome.HIT
            second.arrived_at -= 5
            await ask(running, second, "echo 2 > b")
            assert 12 <= ages[-1] < 20
            # A replay that diverges is made once more, patiently.
            record = proven(second)
            record.recorded_at += 3
            await ask(running, third, "sleep 9 &")
            third.live_from = time.monotonic() - record.age_s
            await ask(running, third, "echo 2 > b")
            ages.clear()
            reasons = ["it answered differently"]
            monkeypatch.setattr(
                replay, "divergence", lambda at, *_: reasons.pop() if reasons and not at.source.state else ""
            )
            await ask(running, third, "echo 3 > c")
            assert reasons == []
            assert 2 < ages[0] < 10
            assert 0 <= ages[1] < 2
            assert record.reproducible

    asyncio.run(body())


def test_scratch_fork_waits_as_the_recorded_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes in a fork are as old as at the next recorded call. Where none is recorded, they finish starting."""
    waits: list[float] = []

    async def rest(_sandbox: MemorySandbox, dwell_s: float) -> None:
        waits.append(dwell_s)

    monkeypatch.setattr(sandboxes.driver, "_FULFILS", {})
    monkeypatch.setattr(MemorySandbox, "rest", rest, raising=False)

    async def body() -> None:
        async with engine(tmp_path) as running:
            [first] = await rollouts(running, 1)

            async def fork() -> float:
                async with running.restorer.fork(first.tree, node):
                    return waits.pop()

            await ask(running, first, "sleep 9 &")
            node = proven(first).target
            assert await fork() == math.inf
            first.live_from -= 7
            await ask(running, first, "pwd")
            assert 7 <= await fork() < 8
            async with running.restorer.fork(first.tree, node, spare=True):
                assert waits == [math.inf], "an audit gives processes all the time that they may need"

    asyncio.run(body())


def test_answers_beside_processes_expire(tmp_path: Path) -> None:
    """Answers hold for rollouts whose processes are about as old as those of the rollout that recorded them."""

    async def body() -> None:
        async with engine(tmp_path) as running:
            hasty, slow, slower, quick = await rollouts(running, 4)

            async def arrive_and_poll(rollout: Rollout, thinks_s: float) -> Outcome:
                await ask(running, rollout, "sleep 9 &")
                rollout.live_from -= thinks_s
                for slot in running.pool.roster.slots:
                    # Each has started the processes in a sandbox of its own, because the state cannot be kept.
                    slot.live_from -= thinks_s * (slot.owner == rollout.id)
                return (await ask(running, rollout, "pwd"))[1]

            assert await arrive_and_poll(hasty, 0.5) is Outcome.MISS
            assert await arrive_and_poll(slow, 10.0) is Outcome.MISS
            assert await arrive_and_poll(slower, 20.0) is Outcome.MISS
            assert await arrive_and_poll(quick, 2.0) is Outcome.HIT
            # The processes of these two are as old after another call as they were before it.
            for rollout, outcome in ((slow, Outcome.MISS), (quick, Outcome.MISS)):
                assert (await ask(running, rollout, "echo 1 > a"))[1] is outcome
            ages = [record.age_s for record in slow.tree.root.records.values()]
            assert ages == [0.0]
            # The machine may have been busy between two calls.
            ages = sorted(record.age_s for record in hasty.node.records.values())
            assert ages == pytest.approx([0.5, 2.0, 10.0, 10.0, 20.0], abs=1.4)

    asyncio.run(body())
