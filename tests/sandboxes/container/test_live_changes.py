from pathlib import Path

import pytest

from sandboxes.driver import Driver
from tests.sandboxes.docker import OnImage
from tests.sandboxes.live_changes import LiveChangesSuite


class TestContainerLiveChanges(LiveChangesSuite):
    @pytest.fixture
    def driver(self, container_dir: Path) -> Driver:
        return OnImage(container_dir)
