import asyncio
from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.local import LocalDriver
from tests.machine import require_criu
from tests.sandboxes.box import opened, ran
from tests.sandboxes.processes import SPEC, Audience, ProcessesSuite


class TestLocalProcesses(ProcessesSuite):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return LocalDriver(data_dir, checkpoints=False)


class TestLocalProcessesWithCriu:
    def test_a_process_that_its_client_left_comes_back_and_its_output_hinders_it_nowhere(self, data_dir: Path) -> None:
        require_criu()

        async def go() -> None:
            async with opened(driver := LocalDriver(data_dir)):
                sandbox = await driver.start(SPEC)
                loop = "while :; do head -c 9999 /dev/zero; echo tick >&2; echo t >>/tmp/ticks; sleep 0.02; done"
                assert (await ran(sandbox, "sh", "-c", loop, listener=Audience())).ending.exit_code is None
                restored = await driver.restore(SPEC, await sandbox.freeze())
                look = "a=$(wc -l </tmp/ticks); until [ $(wc -l </tmp/ticks) -gt $((a + 20)) ]; do sleep 0.02; done"
                for one in (sandbox, restored):
                    assert (await ran(one, "sh", "-c", look)).ending.exit_code == 0

        asyncio.run(go())
