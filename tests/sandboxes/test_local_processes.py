from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.local import LocalDriver
from tests.sandboxes.processes import ProcessesSuite


class TestLocalProcesses(ProcessesSuite):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return LocalDriver(data_dir, checkpoints=False)
