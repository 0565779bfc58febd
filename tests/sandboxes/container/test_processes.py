from pathlib import Path

import pytest

from sandboxes.driver import Driver
from tests.sandboxes.docker import SH_IMAGE, OnImage
from tests.sandboxes.processes import ProcessesSuite


class TestContainerProcesses(ProcessesSuite):
    @pytest.fixture
    def driver(self, container_dir: Path) -> Driver:
        return OnImage(container_dir)


class TestContainerProcessesOnDash(ProcessesSuite):
    @pytest.fixture
    def driver(self, container_dir: Path) -> Driver:
        return OnImage(container_dir, SH_IMAGE)
