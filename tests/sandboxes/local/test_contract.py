from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.local.driver import LocalDriver
from tests.machine import require_criu
from tests.sandboxes.box import local_driver
from tests.sandboxes.contract import CheckpointContract, MachineContract


class TestLocalDriver(MachineContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return LocalDriver(data_dir)


class TestLocalDriverWithCriu(CheckpointContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        require_criu()
        return local_driver(data_dir)
