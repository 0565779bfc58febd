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


def files_of_shells(data_dir: Path) -> list[dict[str, int]]:
    """Return the inodes of the files in each directory of a shell, by name."""
    folders = [path for path in data_dir.glob("**/boxes/*/box/*") if path.name.isdigit()]
    return [{file.name: file.stat().st_ino for file in folder.iterdir()} for folder in folders]


@pytest.mark.parametrize("image", [BASH_IMAGE, SH_IMAGE, BUSYBOX_IMAGE])
def test_the_next_shell_gets_the_files_of_the_last_one(container_dir: Path, image: str) -> None:
    """Each call leaves the session a new shell. Files for each of them would be removed and made with each call."""

    async def go() -> None:
        async with opened(driver := OnImage(container_dir, image, spares=0)):
            sandbox = await driver.start(EnvironmentSpec())
            seen = []
            for number in range(3):
                answer = await run(sandbox, f"A=${{A}}{number}; echo $A; printf '%s|' /dev/.box/[0-9]*")
                assert answer.out.startswith("012"[: number + 1] + "\n")
                # The keeper answers once it has replaced the last call's shell.
                await sandbox.inspect()
                seen.append((answer.out, files_of_shells(container_dir)))
            assert {*seen[0][1][0]} == {*SHELL_FIFOS, *SHELL_TEXTS}
            assert seen[0][1] == seen[1][1] == seen[2][1], "other files"
            assert len({said for said, _ in seen}) == 3, "a shell's number must not be used again"

    asyncio.run(go())


CAPACITY = "python3 -c 'import fcntl; print(fcntl.fcntl(1, fcntl.F_GETPIPE_SZ))'"


def test_a_changed_fifo_reaches_no_other_shell(container_dir: Path) -> None:
    """A restored sandbox has a new one."""

    async def go() -> None:
        async with opened(driver := OnImage(container_dir, spares=0)):
            sandbox = await driver.start(EnvironmentSpec())
            usual = await run(sandbox, CAPACITY)
            assert usual.code == 0, usual.err
            other = int(usual.out) // 4
            changed = await run(
                sandbox, f"python3 -c 'import fcntl; fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, {other})'; {CAPACITY}"
            )
            assert changed.out == f"{other}\n"
            assert (await run(sandbox, CAPACITY)).out == usual.out

    asyncio.run(go())
