"""Executions that hold for one rollout alone: a timeout is its rollout's own, and holds up nobody."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from proxy.tree.rollout import Outcome
from sandboxes.calls import Execution, ToolCall, names_any
from sandboxes.listener import Listener
from sandboxes.spec import EnvironmentSpec
from tests.proxy.rig import ask, engine
from tests.sandboxes.memory_driver import MemoryDriver, MemorySandbox, _State

SLOW = "echo part >> log; sleep 9"


class SlowSandbox(MemorySandbox):
    """Its `SLOW` command runs out of time, `timeouts` times.

    `at_once` is how many of them ran together at most. All but the first wait until `together` have run
    together.
    """

    timeouts = 1 << 30
    running = 0
    at_once = 0
    begun = 0
    together = 0

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        if call.arguments.get("command") != SLOW:
            return await super().execute(call, listener)
        first, SlowSandbox.begun = not SlowSandbox.begun, SlowSandbox.begun + 1
        SlowSandbox.running += 1
        SlowSandbox.at_once = max(SlowSandbox.at_once, SlowSandbox.running)
        deadline = time.monotonic() + 30
        while not first and SlowSandbox.at_once < SlowSandbox.together and time.monotonic() < deadline:  # noqa: ASYNC110
            # Another execution has to begin first.
            await asyncio.sleep(0)
        execution = await super().execute(call, listener)
        SlowSandbox.running -= 1
        SlowSandbox.timeouts -= 1
        return replace(execution, shareable=SlowSandbox.timeouts < 0, short=SlowSandbox.timeouts >= 0)


class SlowDriver(MemoryDriver):
    def _adopt(self, spec: EnvironmentSpec, state: _State) -> MemorySandbox:
        sandbox = SlowSandbox(f"memory-{next(self._ids)}", spec, state, self)
        self.live[sandbox.id] = sandbox
        return sandbox


def test_a_timeout_is_its_rollouts_own(tmp_path: Path) -> None:
    """The effects of a call that ran out of time are real: its rollout goes on with them, and no other gets there."""

    async def body() -> None:
        async with engine(tmp_path, driver := SlowDriver()) as running:
            first, second = [await running.tasks.rollout("task", name) for name in ("first", "second")]
            assert (await ask(running, first, SLOW))[1] is Outcome.BYPASS
            assert (await ask(running, first, "cat log"))[0]["stdout"] == "part\n"
            assert (await ask(running, second, "cat log"))[0]["exit_code"] == 1
            assert (await ask(running, second, SLOW))[1] is Outcome.BYPASS
            assert first.node is not second.node
            # Later states meet again where they are equal.
            assert (await ask(running, first, "echo end > log"))[1] is Outcome.MISS
            assert (await ask(running, second, "echo end > log"))[1] is Outcome.MISS
            assert first.node is second.node
            assert driver.executed.count(SLOW) == 2

    asyncio.run(body())


def test_a_shortage_leaves_room_for_fewer_sandboxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 258 idle tool servers no later answer was shared."""

    async def body() -> None:
        async with engine(tmp_path, SlowDriver()) as running:
            noted = Mock()
            monkeypatch.setattr(running.pool.room, "note_shortage", noted)
            rollout = await running.tasks.rollout("task", "first")
            for command, times in (("echo 1", 0), (SLOW, 1)):
                await ask(running, rollout, command)
                assert noted.call_count == times

    asyncio.run(body())


def test_timeouts_of_a_group_run_side_by_side(tmp_path: Path) -> None:
    """The rollouts that waited for the first execution do not wait for one another's timeouts."""

    async def body() -> None:
        SlowSandbox.at_once, SlowSandbox.begun, SlowSandbox.together = 0, 0, 5
        async with engine(tmp_path, SlowDriver()) as running:
            group = [await running.tasks.rollout("task", f"r{number}") for number in range(6)]
            outcomes = [outcome for _, outcome in await asyncio.gather(*(ask(running, r, SLOW) for r in group))]
            assert outcomes == [Outcome.BYPASS] * 6
            assert SlowSandbox.at_once == SlowSandbox.together
            assert len({rollout.node for rollout in group}) == 6
            group[0].tree.check()

    try:
        asyncio.run(body())
    finally:
        SlowSandbox.together = 0


def test_rollouts_side_by_side_share_one_record(tmp_path: Path) -> None:
    """Only the first execution runs out of time. The others run side by side, and the first of them is shared."""

    async def body() -> None:
        SlowSandbox.timeouts = 1
        async with engine(tmp_path, SlowDriver()) as running:
            group = [await running.tasks.rollout("task", f"r{number}") for number in range(4)]
            outcomes = [outcome for _, outcome in await asyncio.gather(*(ask(running, r, SLOW) for r in group))]
            assert outcomes[0] is Outcome.BYPASS
            # Each of them ran the call, because its state was not kept yet, and found what the first had found.
            assert outcomes[1:] == [Outcome.MISS] * 3
            assert len({rollout.node.id for rollout in group[1:]}) == 1
            late = await running.tasks.rollout("task", "late")
            assert (await ask(running, late, SLOW))[1] is Outcome.HIT
            late.tree.check()

    try:
        asyncio.run(body())
    finally:
        SlowSandbox.timeouts = 1 << 30


def test_no_rollout_finds_a_withdrawn_answer(tmp_path: Path) -> None:
    """Numbers of records and of rollouts overlap: the answer is record two, and rollout two makes its first call."""

    async def body() -> None:
        async with engine(tmp_path, driver := MemoryDriver()) as running:
            first = await running.tasks.rollout("task", "first")
            for command in ("echo 1", "echo 2"):
                await ask(running, first, command)
            second = await running.tasks.rollout("task", "second")
            [record] = [record for record in first.node.records.values() if record.id == second.id]
            running.executor._withdraw(first.tree, record)
            assert (await ask(running, second, "echo 2"))[1] is Outcome.MISS
            assert driver.executed.count("echo 2") == 2

    asyncio.run(body())


def test_calls_that_the_spec_names_are_each_rollouts_own(tmp_path: Path) -> None:
    """They are executed by every rollout, and what follows an observation among them is shared as before."""

    async def body() -> None:
        spec = EnvironmentSpec(driver="memory", own=("cat log", "$RANDOM"))
        async with engine(tmp_path, driver := MemoryDriver(), default_spec=spec) as running:
            for name in ("first", "second"):
                rollout = await running.tasks.rollout("task", name)
                outcomes = [
                    (await ask(running, rollout, command))[1]
                    for command in ("echo 1 > log", "cat log", "cat other", "echo $RANDOM >> log")
                ]
                once = Outcome.MISS if name == "first" else Outcome.HIT
                assert outcomes == [once, Outcome.BYPASS, once, Outcome.BYPASS]
            assert driver.executed.count("cat log") == 2
            assert driver.executed.count("echo $RANDOM >> log") == 2

    asyncio.run(body())


def test_texts_are_found_at_any_depth() -> None:
    call = ToolCall("mcp", "tools/call", {"params": {"arguments": {"steps": ["ls", "uuidgen -r"]}}, "number": 3})
    assert names_any(call, ("uuidgen",))
    assert names_any(call, ("tools/c",))
    assert not names_any(call, ("steps", "mcp"))
    assert not names_any(call, ())
