"""Random sessions in containers with bash, with dash and with busybox."""

import asyncio
from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.errors import SandboxError
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_criu
from tests.sandboxes.box import opened, run
from tests.sandboxes.docker import BASH_IMAGE, BUSYBOX_IMAGE, SH_IMAGE, OnImage
from tests.sandboxes.session_contract import SessionContract


class TestContainerSessions(SessionContract):
    @pytest.fixture
    def driver(self, container_dir: Path) -> Driver:
        require_criu()
        return OnImage(container_dir, checkpoints=True)


class TestDashSessions(SessionContract):
    bash = False

    @pytest.fixture
    def driver(self, container_dir: Path) -> Driver:
        return OnImage(container_dir, SH_IMAGE)


class TestBusyboxSessions(SessionContract):
    bash = False

    @pytest.fixture
    def driver(self, container_dir: Path) -> Driver:
        return OnImage(container_dir, BUSYBOX_IMAGE)


@pytest.mark.parametrize("image", [BASH_IMAGE, SH_IMAGE, BUSYBOX_IMAGE])
def test_a_shell_without_descriptors_is_no_result(container_dir: Path, image: str) -> None:
    """One shell would go on. A recorded end of it would be false, so the call is an error."""

    async def go() -> None:
        async with opened(driver := OnImage(container_dir, image, spares=0)):
            sandbox = await driver.start(EnvironmentSpec())
            with pytest.raises(SandboxError, match="too few file descriptors"):
                await run(sandbox, "ulimit -n 3")

    asyncio.run(go())
