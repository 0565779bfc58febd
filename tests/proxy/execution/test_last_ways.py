"""A sandbox that may be the last way to a state is not closed before the state is kept."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from proxy import engine as engines
from proxy.engine import Engine
from proxy.tree.rollout import Outcome
from proxy.tree.tree import path
from sandboxes.driver import FrozenState
from sandboxes.errors import NotFreezableError, SandboxError
from tests.proxy.execution.test_divergence import RandomDriver, drawn, output
from tests.proxy.execution.test_replay import NEVER_AGAIN
from tests.proxy.rig import ask, engine
from tests.sandboxes.memory_driver import MemorySandbox


async def idle_close(running: Engine) -> None:
    await running.close_unused()


async def on_request(running: Engine) -> None:
    await running.collect_garbage()


@pytest.mark.parametrize("close", [idle_close, on_request])
def test_a_random_state_survives_an_idle_close(tmp_path: Path, close: Callable[[Engine], Awaitable[None]]) -> None:
    """The state is not worth a snapshot, for a replay is cheap. Only the sandbox shows that no replay reaches it."""

    async def body() -> None:
        async with engine(tmp_path, RandomDriver(), reuse=NEVER_AGAIN, sandbox_idle_s=1e-6) as running:
            rollout, number = await drawn(running)
            await running.capture.drain()
            assert rollout.node.snapshot is None
            await close(running)
            assert len(running.pool.roster) == 0
            assert await output(running, rollout, "cat f ; true") == number

    asyncio.run(body())


def test_a_random_state_survives_the_next_call(tmp_path: Path) -> None:
    """The only sandbox of a state goes on with the rollout that made it, while another rollout was led there."""

    async def body() -> None:
        async with engine(tmp_path, RandomDriver(), reuse=NEVER_AGAIN) as running:
            rollout, number = await drawn(running)
            other = await running.tasks.rollout("task", "other")
            # The state is kept before another rollout is led there.
            before = rollout.node.snapshot
            assert (await ask(running, other, "echo random > f"))[1] is Outcome.HIT
            assert (before is None, rollout.node.snapshot is None) == (True, False)
            assert other.node is rollout.node
            await ask(running, rollout, "echo 1 > below")
            # Nobody else is here, so nothing is kept.
            assert rollout.node.snapshot is None
            await ask(running, rollout, "echo 2 > further")
            assert rollout.node.snapshot is None
            assert await output(running, other, "cat f ; true") == number
            assert running.counts.divergences == 0

    asyncio.run(body())


def test_a_random_state_survives_an_orderly_shutdown(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(tmp_path, RandomDriver(), reuse=NEVER_AGAIN) as running:
            rollout, number = await drawn(running)
            await running.capture.drain()
            assert rollout.node.snapshot is None
        async with engine(tmp_path, RandomDriver(), reuse=NEVER_AGAIN) as running:
            again = await running.tasks.rollout("task", "first")
            assert await output(running, again, "cat f ; true") == number

    asyncio.run(body())


def test_a_random_state_survives_a_close_for_room(tmp_path: Path) -> None:
    """One sandbox of room: the next rollout's start closes the sandbox of the first one."""

    async def body() -> None:
        async with engine(tmp_path, RandomDriver(), reuse=NEVER_AGAIN, max_sandboxes=1) as running:
            rollout, number = await drawn(running)
            await running.capture.drain()
            assert rollout.node.snapshot is None
            other = await running.tasks.rollout("task", "other")
            await ask(running, other, "echo 1 > other")
            assert await output(running, rollout, "cat f ; true") == number

    asyncio.run(body())


def test_a_caller_that_gives_up_ends_no_freeze(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A freeze that is interrupted closes its sandbox. So it goes on when nobody waits for the room any more."""
    began, may_end, freeze = asyncio.Event(), asyncio.Event(), MemorySandbox.freeze

    async def freeze_late(sandbox: MemorySandbox) -> FrozenState:
        began.set()
        await may_end.wait()
        return await freeze(sandbox)

    async def body() -> None:
        async with engine(tmp_path, RandomDriver(), reuse=NEVER_AGAIN) as running:
            rollout, number = await drawn(running)
            await running.capture.drain()
            monkeypatch.setattr(MemorySandbox, "freeze", freeze_late)
            closing = asyncio.ensure_future(running.pool.close_victim())
            await began.wait()
            closing.cancel()
            await asyncio.wait([closing])
            may_end.set()
            await running.last_ways.drain(within_s=30.0)
            assert rollout.node.snapshot is not None
            assert len(running.pool.roster) == 1
            assert await output(running, rollout, "cat f ; true") == number

    asyncio.run(body())


def test_what_a_replay_has_reached_or_nobody_needs_is_not_kept(tmp_path: Path) -> None:
    async def body() -> None:
        async with engine(tmp_path, RandomDriver(), reuse=NEVER_AGAIN, sandbox_idle_s=1e-6) as running:
            proven, ended = [await running.tasks.rollout("task", name) for name in ("proven", "ended")]
            await ask(running, proven, "echo 1 > a")
            await ask(running, ended, "echo 2 > b")
            await running.capture.drain()
            for record in path(proven.node):
                # As a replay a minute later does.
                record.proven = True
            await running.tasks.rollouts.finish(ended)
            await running.close_unused()
            assert len(running.pool.roster) == 0
            assert [proven.node.snapshot, ended.node.snapshot] == [None, None]

    asyncio.run(body())


def test_freezes_before_the_end_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sandbox fails and the next hangs: nothing waits for longer than the limit, and no sandbox is left."""
    tried: list[str] = []
    driver = RandomDriver()

    async def freeze(sandbox: MemorySandbox) -> FrozenState:
        tried.append(sandbox.id)
        if len(tried) == 1:
            raise SandboxError("no")
        await asyncio.Event().wait()
        raise AssertionError

    async def body() -> None:
        async with engine(tmp_path, driver, reuse=NEVER_AGAIN) as running:
            for name in ("a", "b", "c"):
                rollout = await running.tasks.rollout("task", name)
                await ask(running, rollout, f"echo {name} > f")
            await running.capture.drain()
            monkeypatch.setattr(MemorySandbox, "freeze", freeze)
            monkeypatch.setattr(engines, "LAST_FREEZES_S", 0.05)
        assert not driver.live
        assert len(tried) == 2

    asyncio.run(body())


def test_an_idle_sandbox_whose_state_cannot_be_kept_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the last way to a state that a rollout needs. It goes once the rollout has ended."""

    async def refuse(_: MemorySandbox) -> FrozenState:
        raise NotFreezableError("no")

    async def body() -> None:
        async with engine(tmp_path, RandomDriver(), reuse=NEVER_AGAIN, sandbox_idle_s=1e-6) as running:
            rollout, number = await drawn(running)
            await running.capture.drain()
            monkeypatch.setattr(MemorySandbox, "freeze", refuse)
            assert [await running.close_unused() for _ in range(2)] == [0, 0]
            assert await output(running, rollout, "cat f ; true") == number
            assert await running.close_unused() == 0
            await running.tasks.rollouts.finish(rollout)
            assert await running.close_unused() == 1

    asyncio.run(body())
