"""A sandbox on another member keeps the promises of the driver that runs it there."""

from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.local.driver import LocalDriver
from tests.machine import require_sandboxes
from tests.proxy.cluster.hosting.pair import Pair, RemoteDriver, pair_of
from tests.sandboxes.contract import DriverContract
from tests.sandboxes.memory_driver import MemoryDriver


class TestRemoteSandbox(DriverContract):
    """The whole contract, with a driver that costs no time."""

    @pytest.fixture
    def driver(self, tmp_path: Path) -> Driver:
        return RemoteDriver(Pair(MemoryDriver(), MemoryDriver(), tmp_path, room=32))

    def test_inspection_shows_differences_from_the_root(self, driver: Driver) -> None:  # noqa: ARG002
        pytest.skip("people look into sandboxes of this machine only")

    def test_what_still_runs_is_an_effect_without_digest(self, driver: Driver) -> None:  # noqa: ARG002
        pytest.skip("such a call runs again at the owner")

    def test_what_a_process_leaves_running_is_state(self, driver: Driver) -> None:  # noqa: ARG002
        pytest.skip("such a call runs again at the owner")


class TestRemoteLocalSandbox:
    """What states in layers add to it."""

    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        require_sandboxes()
        return RemoteDriver(pair_of(LocalDriver, data_dir, room=32))

    test_frozen_sandbox_continues = DriverContract.test_frozen_sandbox_continues
    test_equal_states_have_equal_digests = DriverContract.test_equal_states_have_equal_digests
    test_collecting_spares_what_is_being_frozen = DriverContract.test_collecting_spares_what_is_being_frozen
    checkpoints = False
