import asyncio
from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.local.driver import LocalDriver
from tests.machine import require_criu
from tests.sandboxes.box import local_driver, opened, ran, run
from tests.sandboxes.processes import SPEC, Audience, ProcessesSuite


class TestLocalProcesses(ProcessesSuite):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return LocalDriver(data_dir)


class TestLocalProcessesWithCriu:
    def test_detached_process_is_restored_and_never_blocks(self, data_dir: Path) -> None:
        require_criu()

        async def go() -> None:
            async with opened(driver := local_driver(data_dir)):
                sandbox = await driver.start(SPEC)
                loop = "while :; do head -c 9999 /dev/zero; echo tick >&2; echo t >>/tmp/ticks; sleep 0.02; done"
                assert (await ran(sandbox, "sh", "-c", loop, listener=Audience())).ending.exit_code is None
                restored = await driver.restore(SPEC, await sandbox.freeze())
                look = "a=$(wc -l </tmp/ticks); until [ $(wc -l </tmp/ticks) -gt $((a + 20)) ]; do sleep 0.02; done"
                for one in (sandbox, restored):
                    assert (await ran(one, "sh", "-c", look)).ending.exit_code == 0

        asyncio.run(go())


@pytest.mark.parametrize("checkpoints", [False, True])
def test_session_survives_its_killed_idle_shell(data_dir: Path, checkpoints: bool) -> None:
    if checkpoints:
        require_criu()

    async def go() -> None:
        async with opened(local_driver(data_dir, checkpoints=checkpoints)) as driver:
            sandbox = await driver.start(SPEC)
            await run(sandbox, "X=7; cd /tmp")
            await ran(sandbox, "/bin/sh", "-c", "kill -9 -1")
            back = await driver.restore(SPEC, await sandbox.freeze())
            for one in (sandbox, back):
                answer = await run(one, "echo $X; pwd")
                assert (answer.out, answer.code) == ("7\n/tmp\n", 0)

    asyncio.run(go())
