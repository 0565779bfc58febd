"""Restoring live processes in a fresh container, whose own processes have to make room first."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from sandboxes.container.sandbox import ContainerSandbox
from sandboxes.errors import NotFreezableError
from sandboxes.spec import EnvironmentSpec
from tests.machine import children, require_criu, wait_until
from tests.sandboxes.box import opened, run
from tests.sandboxes.docker import OnImage, first_processes

SPEC = EnvironmentSpec()


def test_restore_waits_for_pids_to_be_reaped(container_dir: Path) -> None:
    """A zombie keeps its pid until its parent reaps it, and CRIU cannot give that pid to a restored process."""
    require_criu()

    async def go() -> None:
        async with opened(OnImage(container_dir, checkpoints=True, spares=1)) as driver:
            assert isinstance(driver, OnImage)
            sandbox = await driver.start(SPEC)
            assert isinstance(sandbox, ContainerSandbox)
            await run(sandbox, "sleep 1000 &")
            frozen = await sandbox.freeze()
            # A container that runs is no spare yet: the restore would pass it over and make one of its own.
            await driver.spares.background.wait()
            # The restore takes one of the spares; which one is not known.
            pids = [pid for name, pid in first_processes(container_dir).items() if name != sandbox.container]
            assert len(pids) > 1, "a spare and the pattern"
            await asyncio.to_thread(wait_until, lambda: all(map(children, pids)), "a spare has no anchor")
            anchors = [children(pid)[0] for pid in pids]
            # A stopped pid 1 reaps nobody.
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            restore = asyncio.create_task(driver.restore(SPEC, frozen))
            try:
                await asyncio.to_thread(wait_until, lambda: any(map(_is_zombie, anchors)), "the anchor was not killed")
                await asyncio.wait([restore], timeout=1)
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            assert (await run(await restore, "kill -0 %1 && echo runs")).out == "runs\n"

    asyncio.run(go())


def test_a_pipe_of_a_killed_shell_is_not_dumped(container_dir: Path) -> None:
    """A restore could not make it again: the place of our pipes is read-only for processes in the container."""
    require_criu()

    async def go() -> None:
        async with opened(OnImage(container_dir, checkpoints=True)) as driver:
            sandbox = await driver.start(SPEC)
            await run(sandbox, "sleep 1000 &")
            restored = await driver.restore(SPEC, await sandbox.freeze())
            assert (await run(restored, "kill -9 $$")).code == 137
            # The next shell has a directory of the same name, so what was deleted has a place again.
            assert (await run(restored, "cat /proc/[0-9]*/comm | grep sleep")).out == "sleep\n"
            with pytest.raises(NotFreezableError, match="no file can be made again"):
                await restored.freeze()

    asyncio.run(go())


def _is_zombie(pid: int) -> bool:
    return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
