"""Commuting calls have one order, whatever order they arrive in."""

import asyncio
import itertools
import time
from pathlib import Path

import pytest

from proxy.engine import Engine
from proxy.execution.call_order import WINDOW_S
from proxy.tree.keys import call_key
from proxy.tree.rollout import Outcome, Rollout
from tests.proxy.rig import engine, shell

UPLOADS = tuple(f"echo {n} >> uploads" for n in range(3))


async def send(running: Engine, rollout: Rollout, command: str, *, commutes: bool) -> Outcome:
    call = shell(command)
    key = call_key(call)
    if running.step.known(rollout, key) is not None:
        return Outcome.HIT
    return (await running.step.begin(rollout, call, key, commutes=commutes)).outcome


def test_commuting_calls_have_one_recorded_order(tmp_path: Path) -> None:
    async def go() -> None:
        async with engine(tmp_path) as running:
            task = await running.tasks.open("task")
            ends, outcomes = set(), []
            for number, order in enumerate(itertools.permutations(UPLOADS)):
                rollout = running.tasks.rollouts.begin(task, f"r{number}", task.tree, task.tree.root)
                outcomes.append(await asyncio.gather(*(send(running, rollout, c, commutes=True) for c in order)))
                ends.add(rollout.node.id)
            assert len(ends) == 1
            assert outcomes[0] == [Outcome.MISS] * 3
            assert outcomes[1:] == [[Outcome.HIT] * 3] * 5

    asyncio.run(go())


def test_a_late_commuting_call_goes_first_if_known(tmp_path: Path) -> None:
    async def go() -> None:
        async with engine(tmp_path) as running:
            task = await running.tasks.open("task")
            first, second = (running.tasks.rollouts.begin(task, name, task.tree, task.tree.root) for name in ("a", "b"))
            for command in UPLOADS:
                await send(running, first, command, commutes=True)
            late = [asyncio.ensure_future(send(running, second, c, commutes=True)) for c in reversed(UPLOADS[1:])]
            await asyncio.sleep(0)
            assert await send(running, second, UPLOADS[0], commutes=True) is Outcome.HIT
            assert await asyncio.gather(*late) == [Outcome.HIT] * 2
            assert second.node is first.node

    asyncio.run(go())


def test_other_calls_wait_for_commuting_calls(tmp_path: Path) -> None:
    async def go() -> None:
        async with engine(tmp_path) as running:
            task = await running.tasks.open("task")
            rollout = running.tasks.rollouts.begin(task, "a", task.tree, task.tree.root)
            uploads = [asyncio.ensure_future(send(running, rollout, c, commutes=True)) for c in UPLOADS]
            await asyncio.sleep(0)
            call = shell("cat uploads")
            answer = await running.step.run(rollout, call, call_key(call))
            assert all(upload.done() for upload in uploads)
            assert all(str(n).encode() in running.store.records.result(answer.record).body for n in range(3))

    asyncio.run(go())


def test_the_window_may_end_at_any_moment(tmp_path: Path) -> None:
    """Also between two looks at the clock: a call that waits alone would then wait for ever."""

    async def go() -> None:
        async with engine(tmp_path) as running:
            task = await running.tasks.open("task")
            rollout = running.tasks.rollouts.begin(task, "r", task.tree, task.tree.root)
            loop, looks = asyncio.get_running_loop(), itertools.count(loop_time := time.monotonic(), WINDOW_S * 0.6)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loop, "time", lambda: next(looks))
                turn = running.step.order
                turn.arrive(rollout)
                async with turn.turn(rollout, call_key(shell("echo")), commutes=True):
                    assert loop.time() > loop_time

    asyncio.run(asyncio.wait_for(go(), 60.0))


@pytest.mark.parametrize("commutes", [False, True])
def test_a_turn_that_is_taken_at_once_holds_up_later_calls(tmp_path: Path, commutes: bool) -> None:
    async def go() -> None:
        async with engine(tmp_path) as running:
            task = await running.tasks.open("task")
            rollout = running.tasks.rollouts.begin(task, "a", task.tree, task.tree.root)
            order = running.step.order
            order.begin_turn(rollout)
            later = asyncio.ensure_future(send(running, rollout, UPLOADS[0], commutes=commutes))
            await asyncio.sleep(2 * WINDOW_S)
            assert (order.busy(rollout), rollout.waiting, rollout.calls, later.done()) == (True, 2, 0, False)
            order.end_turn(rollout)
            assert await later is Outcome.MISS
            assert (order.busy(rollout), rollout.waiting) == (False, 0)

    asyncio.run(go())
