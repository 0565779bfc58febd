import asyncio
from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import opened, run
from tests.sandboxes.docker import SH_IMAGE, OnImage
from tests.sandboxes.jobs_contract import JobsContract


class TestContainerJobs(JobsContract):
    @pytest.fixture
    def driver(self, container_dir: Path) -> Driver:
        return OnImage(container_dir)


def test_dash_keeps_exit_codes_of_jobs(container_dir: Path) -> None:
    """A POSIX shell tells its jobs only by forgetting them, so it is kept once it has had one."""

    async def go() -> None:
        async with opened(driver := OnImage(container_dir, SH_IMAGE)):
            sandbox = await driver.start(EnvironmentSpec())
            for command in ("(sleep 0.2; exit 3) & PID=$!", "sleep 0.5", "echo between"):
                await run(sandbox, command)
            assert (await run(sandbox, "wait $PID; echo $?")).out == "3\n"

    asyncio.run(go())
