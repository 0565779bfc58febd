import pytest

from sandboxes.driver import Driver
from tests.sandboxes.contract import DriverContract
from tests.sandboxes.memory_driver import MemoryDriver


class TestMemoryDriver(DriverContract):
    @pytest.fixture
    def driver(self) -> Driver:
        return MemoryDriver()
