from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.local.driver import LocalDriver
from tests.sandboxes.live_changes import LiveChangesSuite


class TestLocalLiveChanges(LiveChangesSuite):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return LocalDriver(data_dir)
