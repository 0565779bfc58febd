import asyncio
from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.errors import NotFreezableError
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_criu
from tests.sandboxes.box import local_driver, opened, run
from tests.sandboxes.jobs_contract import JobsContract


class TestLocalJobs(JobsContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return LocalDriver(data_dir)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_exit_codes_of_jobs_are_frozen(data_dir: Path, checkpoints: bool) -> None:
    """A checkpoint holds the shell that knows the exit code; without one the state is reached by replay."""
    if checkpoints:
        require_criu()

    async def go() -> None:
        async with opened(local_driver(data_dir, checkpoints=checkpoints)) as driver:
            sandbox = await driver.start(EnvironmentSpec())
            ended = "while kill -0 $PID 2>/dev/null; do sleep 0.05; done"
            for command in ("(sleep 0.2; exit 3) & PID=$!", ended, "echo x > /tmp/x"):
                answer = await run(sandbox, command)
            if not checkpoints:
                with pytest.raises(NotFreezableError):
                    await sandbox.freeze()
                return
            frozen = await sandbox.freeze()
            restored = await driver.restore(EnvironmentSpec(), frozen)
            for one in (sandbox, restored):
                waited = await run(one, "wait $PID; echo $?")
                assert (waited.out, waited.state, frozen.state) == ("3\n", answer.state, answer.state)

    asyncio.run(go())
