"""A sandbox on another member keeps the promises of the driver that runs it there."""

from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.local.driver import LocalDriver
from tests.machine import require_sandboxes
from tests.proxy.cluster.hosting.pair import RemoteDriver, pair_of
from tests.sandboxes.contract import DriverContract


class TestRemoteLocalSandbox(DriverContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        require_sandboxes()
        return RemoteDriver(pair_of(LocalDriver, data_dir, room=32))

    def test_inspection_shows_differences_from_the_root(self, driver: Driver) -> None:  # noqa: ARG002
        pytest.skip("people look into sandboxes of this machine only")

    def test_what_still_runs_is_an_effect_without_digest(self, driver: Driver) -> None:  # noqa: ARG002
        pytest.skip("such a call runs again at the owner")
