import asyncio
from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.errors import NotFreezableError
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_criu
from tests.sandboxes.box import file, local_driver, opened, run
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


@pytest.mark.parametrize(
    ("program", "kill"),
    [
        # The kernel takes a while to end it. No page of a shared mapping is a huge one, so that it stays slow.
        ("import mmap, time; m = mmap.mmap(-1, 300 << 20)\nfor i in range(0, len(m), 4096): m[i] = 1", "kill -9"),
        # It runs for some milliseconds once it has caught the signal.
        ("import signal, sys, time; signal.signal(15, lambda *_: sys.exit(sum(range(200000)) & 0))", "kill"),
    ],
    ids=["killed", "caught"],
)
def test_a_killed_process_has_ended_with_its_call(data_dir: Path, program: str, kill: str) -> None:
    """A state in which it still dies would be none that a replay reaches: there it may have died in time."""

    async def go() -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            sandbox = await driver.start(EnvironmentSpec())
            await file(sandbox, "put", "/tmp/program", f"{program}\nopen('/tmp/up', 'w')\ntime.sleep(1000)\n".encode())
            started = await run(sandbox, "python3 /tmp/program & while ! test -e /tmp/up; do sleep 0.01; done")
            assert started.state is None
            assert (await run(sandbox, f"{kill} $!")).state is not None

    asyncio.run(go())
