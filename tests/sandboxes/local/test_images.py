"""The contracts of sandboxes hold on images: with bash, with dash alone, and with busybox alone."""

from functools import partial
from pathlib import Path

import pytest

from sandboxes.driver import Driver
from tests.machine import require_criu
from tests.sandboxes.box import kept_driver
from tests.sandboxes.contract import CheckpointContract, MachineContract
from tests.sandboxes.docker import OnImage
from tests.sandboxes.image_archives import bash_image, busybox_image, sh_image
from tests.sandboxes.jobs_contract import JobsContract
from tests.sandboxes.live_changes import LiveChangesSuite
from tests.sandboxes.processes import ProcessesSuite


def on_image(data_dir: Path, image: str) -> Driver:
    return kept_driver.offer(image, partial(OnImage, image=image), data_dir)


class TestImagesWithCriu(CheckpointContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        require_criu()
        return kept_driver.offer("CRIU", partial(OnImage, checkpoints=True), data_dir)


class TestImagesWithDash(MachineContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return on_image(data_dir, sh_image())


class TestImagesWithBusybox(MachineContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return on_image(data_dir, busybox_image())


class TestJobsOfImages(JobsContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return OnImage(data_dir)


class TestJobsOnBusybox(JobsContract):
    test_scheduling_of_a_shell_stays = None  # type: ignore[assignment]  # It needs Python.

    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return OnImage(data_dir, busybox_image())


class TestLiveChangesOfImages(LiveChangesSuite):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return OnImage(data_dir)


class TestProcessesOfImages(ProcessesSuite):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return on_image(data_dir, bash_image())


class TestProcessesOfImagesWithDash(ProcessesSuite):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return on_image(data_dir, sh_image())
