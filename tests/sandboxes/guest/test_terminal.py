from pathlib import Path

import pytest

from sandboxes.driver import Driver, Sandbox
from sandboxes.local.driver import LocalDriver
from tests.sandboxes.box import ran, run
from tests.sandboxes.docker import OnImage
from tests.sandboxes.image_archives import bash_image, busybox_image, configured
from tests.sandboxes.terminals import TerminalsSuite, opened_in, typed


class TestLocalTerminals(TerminalsSuite):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return LocalDriver(data_dir / "local")


class TestImageTerminals(TerminalsSuite):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return OnImage(data_dir)

    def test_a_terminal_needs_no_shell_of_the_image(self, driver: Driver) -> None:
        async def test(sandbox: Sandbox) -> None:
            await run(sandbox, "x=5; rm /usr/bin/bash /usr/bin/sh")
            await typed(await opened_in(sandbox), b"echo o''n $x\n", "on 5")

        self.driven(driver, test)


class TestImageTerminalsOnBusybox(TerminalsSuite):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return OnImage(data_dir, busybox_image())


class TestImageTerminalsOfAnotherUser:
    def test_a_terminal_is_its_users(self, data_dir: Path) -> None:
        async def test(sandbox: Sandbox) -> None:
            result = await ran(sandbox, "sh", "-c", "id -u; test -t 1 && echo seen >/dev/tty", tty=True)
            assert result.out == b"1\r\nseen\r\n"
            terminal = await opened_in(sandbox)
            await typed(terminal, b"echo as-$(id -u); stty size; echo own >/dev/tty\n", "as-1", "24 80", "own")

        TerminalsSuite().driven(OnImage(data_dir, configured(bash_image(), {"User": "1:1"})), test)
