"""Sandboxes whose CPU time is counted, and that can go after all others without showing it."""

import asyncio
from pathlib import Path

import pytest

from sandboxes.driver import Metered
from sandboxes.linux.cgroups import CPU
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import opened, run

LOOK = "cat /proc/self/cgroup /proc/self/autogroup; cat /sys/fs/cgroup/cpu*/cpu.shares /sys/fs/cgroup/cpu.weight; nice"


def test_cpu_time_is_counted_and_the_weight_is_hidden(data_dir: Path) -> None:
    async def go() -> None:
        local = LocalDriver(data_dir, cpu_groups=True)
        async with opened(local) as driver:
            groups = local.machine.cgroups
            if CPU not in groups.meters:
                pytest.skip("no CPU control group can be written here")
            sandbox = await driver.start(EnvironmentSpec())
            assert isinstance(sandbox, Metered)
            before, looks = sandbox.cpu_s, []
            assert before is not None
            name = "cpu.shares" if groups.version == 1 else "cpu.weight"
            weights = []
            for background in (False, True, False):
                assert sandbox.set_background(background=background)
                weights.append(int((groups.meters[CPU] / sandbox.id / name).read_text()))
                looks.append((await run(sandbox, LOOK)).out)
            assert weights[0] == weights[2] > 10 * weights[1]
            assert looks[0] == looks[1] == looks[2]
            await run(sandbox, "for n in {1..50000}; do :; done")
            after = sandbox.cpu_s
            assert after is not None
            assert after > before
            await sandbox.close()
            assert not (groups.meters[CPU] / sandbox.id).exists()
            assert not sandbox.set_background(background=True)
            assert sandbox.cpu_s is None

    asyncio.run(go())


def test_cpu_time_is_not_counted_unless_asked_for(data_dir: Path) -> None:
    """Each sandbox has a weight of its own all the same."""

    async def go() -> None:
        local = LocalDriver(data_dir)
        async with opened(local) as driver:
            sandbox = await driver.start(EnvironmentSpec())
            assert isinstance(sandbox, Metered)
            assert sandbox.cpu_s is None
            assert sandbox.set_background(background=True) == bool(local.machine.cgroups.meters)

    asyncio.run(go())
