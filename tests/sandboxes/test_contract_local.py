from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.local import LocalDriver
from tests.sandboxes.contract import DriverContract


class TestLocalDriver(DriverContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return LocalDriver(data_dir)
