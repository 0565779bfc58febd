import re
from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.linux import syscalls as kernel
from sandboxes.local.driver import LocalDriver
from tests.machine import require_criu
from tests.sandboxes.box import driven, kept_driver, local_driver, run
from tests.sandboxes.contract import CheckpointContract, MachineContract, after


class TestLocalDriver(MachineContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return kept_driver.offer(TestLocalDriver, LocalDriver, data_dir)


class TestLocalDriverWithCriu(CheckpointContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        require_criu()
        return kept_driver.offer(TestLocalDriverWithCriu, local_driver, data_dir)


class TestLocalDriverOnOlderKernels(CheckpointContract):
    """Before Linux 6.5 all layers of an overlay have one option. This kernel takes that too."""

    @pytest.fixture
    def driver(self, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
        require_criu()
        monkeypatch.setenv(kernel.OLDER_MOUNTS, "1")
        return kept_driver.offer(TestLocalDriverOnOlderKernels, local_driver, data_dir)

    def test_the_layers_have_one_option(self, driver: Driver) -> None:
        """Else this would be the contract of newer kernels again."""

        async def test(driver: Driver) -> None:
            sandbox = await after(driver, "echo a > kept")
            mounts = (await run(sandbox, "grep ' / / ' /proc/self/mountinfo")).out
            assert re.search(r"[ ,]lowerdir=\d+:\d+(:\d+)*,", mounts)
            assert "/" not in mounts.partition(" - ")[2]

        driven(driver, test)
