"""What an ended rollout has left running ends with it, however its last call stood then."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.engine import Engine, build_engine
from proxy.settings import Settings
from proxy.tree.rollout import Outcome
from sandboxes.driver import Sandbox
from sandboxes.pool.lifecycle import SandboxState
from sandboxes.spec import EnvironmentSpec
from tests.machine import data_directory, require_criu
from tests.proxy.rig import KEEPS_ALL, ask, opened
from tests.sandboxes.box import local_driver

HOLDER = "sleep 1000 >/dev/null 2>&1 & echo begun"


@pytest.fixture
def folder() -> Iterator[Path]:
    require_criu()
    with data_directory() as directory:
        yield directory


def local(folder: Path) -> Engine:
    settings = Settings(data=folder, default_spec=EnvironmentSpec(), warm_sandboxes=0, sandbox_idle_s=600)
    running = build_engine(settings, {"local": local_driver(folder / "local")})
    running.snapshot_value.reuse = KEEPS_ALL
    return running


async def has_ended(running: Engine, sandbox: Sandbox) -> None:
    """Wait until a sandbox is closed; the background work of the engine closes it."""
    async with asyncio.timeout(30):
        while any(slot.sandbox is sandbox for slot in running.pool.roster.slots) or sandbox.alive:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def only(running: Engine) -> Sandbox:
    [slot] = [slot for slot in running.pool.roster.slots if slot.sandbox is not None]
    assert slot.sandbox is not None
    return slot.sandbox


@pytest.mark.parametrize("when", ["idle", "while it is frozen", "during a call"])
def test_its_processes_end(folder: Path, when: str) -> None:
    async def body() -> None:
        async with opened(local(folder)) as running:
            rollout = await running.tasks.rollout("task", "1")
            await ask(running, rollout, HOLDER)
            sandbox = only(running)
            if when == "during a call":
                call = asyncio.ensure_future(ask(running, rollout, "read -t 1 <> <(:)"))
                while running.pool.roster.slots[0].state is not SandboxState.LEASED:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            elif when == "idle":
                await running.capture.drain()
            await running.tasks.rollouts.finish(rollout)
            if when == "during a call":
                await asyncio.wait([call])
            await has_ended(running, sandbox)

    asyncio.run(body())


def test_others_find_its_state(folder: Path) -> None:
    """The processes of one that is still there go on, and one that comes later gets them from the checkpoint."""

    async def body() -> None:
        async with opened(local(folder)) as running:
            first, second = [await running.tasks.rollout("task", name) for name in ("1", "2")]
            await ask(running, first, HOLDER)
            await ask(running, first, "echo first > own")
            sandbox = only(running)
            await ask(running, second, HOLDER)
            await ask(running, second, "echo own > own; pgrep -c sleep")
            await running.tasks.rollouts.finish(first)
            await has_ended(running, sandbox)
            assert (await ask(running, second, "pgrep -c sleep; echo 2"))[0]["stdout"] == "1\n2\n"
            third = await running.tasks.rollout("task", "3")
            assert (await ask(running, third, HOLDER))[1] is Outcome.HIT
            assert (await ask(running, third, "pgrep -c sleep; echo 3"))[0]["stdout"] == "1\n3\n"

    asyncio.run(body())


def test_sandboxes_without_processes_stay(folder: Path) -> None:
    async def body() -> None:
        async with opened(local(folder)) as running:
            rollout = await running.tasks.rollout("task", "1")
            await ask(running, rollout, "echo 1 > f")
            sandbox = only(running)
            await running.tasks.rollouts.finish(rollout)
            await running.close_ended()
            assert sandbox.alive

    asyncio.run(body())
