from pathlib import Path

import pytest

from sandboxes.driver import Driver
from tests.machine import require_criu
from tests.sandboxes.contract import CheckpointContract, MachineContract
from tests.sandboxes.docker import BUSYBOX_IMAGE, SH_IMAGE, OnImage


class TestContainerDriver(MachineContract):
    @pytest.fixture
    def driver(self, container_dir: Path) -> Driver:
        return OnImage(container_dir)


class TestContainerDriverWithCriu(CheckpointContract):
    @pytest.fixture
    def driver(self, container_dir: Path) -> Driver:
        require_criu()
        return OnImage(container_dir, checkpoints=True)


class TestContainerDriverOnDash(MachineContract):
    @pytest.fixture
    def driver(self, container_dir: Path) -> Driver:
        return OnImage(container_dir, SH_IMAGE)


class TestContainerDriverOnBusybox(MachineContract):
    @pytest.fixture
    def driver(self, container_dir: Path) -> Driver:
        return OnImage(container_dir, BUSYBOX_IMAGE)
