"""Random sessions in containers with bash, with dash and with busybox."""

import asyncio
from pathlib import Path

import pytest

from sandboxes.container.boot_scripts import SHELL_FIFOS, SHELL_TEXTS
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


def files_of_shells(data_dir: Path) -> list[set[str]]:
    """Return the names of the files in each directory of a shell."""
    folders = [path for path in data_dir.glob("**/boxes/*/box/*") if path.name.isdigit()]
    return [{file.name for file in folder.iterdir()} for folder in folders]


def test_replaced_shells_share_one_directory(container_dir: Path) -> None:
    """Each call leaves the session a new shell, whose files take the place of the last one's."""

    async def go() -> None:
        async with opened(driver := OnImage(container_dir, spares=0)):
            sandbox = await driver.start(EnvironmentSpec())
            for number in range(3):
                await run(sandbox, f"echo {number}")
            # The keeper answers once it has replaced the last call's shell.
            await sandbox.inspect()
            assert files_of_shells(container_dir) == [{*SHELL_FIFOS, *SHELL_TEXTS}]

    asyncio.run(go())
