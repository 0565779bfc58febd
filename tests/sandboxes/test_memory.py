import pytest

from sandboxes.driver import Driver
from sandboxes.memory import MemoryDriver
from tests.sandboxes.contract import DriverContract


class TestMemoryDriver(DriverContract):
    @pytest.fixture
    def driver(self) -> Driver:
        return MemoryDriver()
