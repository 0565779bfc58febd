import pytest

from sandboxes.driver import Driver
from tests.sandboxes.contract import LocalContract
from tests.sandboxes.memory_driver import MemoryDriver


class TestMemoryDriver(LocalContract):
    @pytest.fixture
    def driver(self) -> Driver:
        return MemoryDriver()
