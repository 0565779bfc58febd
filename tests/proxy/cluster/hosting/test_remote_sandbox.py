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
    """With a driver that costs no time. People look into sandboxes of this machine only."""

    @pytest.fixture
    def driver(self, tmp_path: Path) -> Driver:
        return RemoteDriver(Pair(MemoryDriver(), MemoryDriver(), tmp_path, room=32))


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
