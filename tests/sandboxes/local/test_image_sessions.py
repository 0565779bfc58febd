"""Sessions in images with bash, with dash and with busybox: bash runs them in each."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes.driver import Driver
from sandboxes.effects import Effect
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_criu
from tests.sandboxes.box import driven, opened, run
from tests.sandboxes.docker import OnImage
from tests.sandboxes.image_archives import bash_image, busybox_image, sh_image
from tests.sandboxes.session_contract import SessionContract

SPEC = EnvironmentSpec()


class TestImageSessions(SessionContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        require_criu()
        return OnImage(data_dir, checkpoints=True)


class TestDashSessions(SessionContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return OnImage(data_dir, sh_image())


class TestBusyboxSessions(SessionContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return OnImage(data_dir, busybox_image())


@pytest.mark.parametrize("image", [bash_image, sh_image, busybox_image])
def test_a_shell_without_descriptors_keeps_its_session(data_dir: Path, image: Callable[[], str]) -> None:

    async def go() -> None:
        async with opened(driver := OnImage(data_dir, image())):
            sandbox = await driver.start(EnvironmentSpec())
            await run(sandbox, "x=kept")
            assert "stays as it was" in (await run(sandbox, "ulimit -n 3")).err
            assert (await run(sandbox, "echo $x")).out == "kept\n"

    asyncio.run(go())


def test_what_the_live_bash_holds_comes_back(data_dir: Path) -> None:
    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        for command in (
            "f() { echo \"f $1\"; }; a=(1 '2 3'); declare -A m=([k]='v w'); alias hi='echo hi'; set -u; umask 027",
            "trap 'echo bye' USR1; shopt -s extglob; readonly R=r; export E='multi\nline'; pushd /tmp >/dev/null",
            "set -- p q",
            "ulimit -Sn 300",
        ):
            assert (await run(sandbox, command)).effect is Effect.SESSION
        restored = await driver.restore(SPEC, await sandbox.freeze())
        commands = "f x; echo ${a[1]} ${m[k]} $R $E $-; hi; trap; dirs; echo $@ ; umask; ulimit -n; shopt extglob; cd -"
        live, back = await run(sandbox, commands), await run(restored, commands)
        assert back.outcome == live.outcome
        assert "f x\n2 3 v w r multi line" in back.out
        assert "\n300\n" in back.out

    driven(OnImage(data_dir), test)


@pytest.mark.parametrize("image", [bash_image, sh_image, busybox_image])
def test_invalid_command_keeps_options_and_traps(data_dir: Path, image: Callable[[], str]) -> None:
    """A command with a syntax error leaves options and traps as they were."""

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "set -u; trap 'echo one' USR1; trap 'echo two' USR2")
        assert (await run(sandbox, "if true")).effect is Effect.NONE
        assert (await run(sandbox, "kill -USR1 $$; kill -USR2 $$; true")).out == "one\ntwo\n"
        result = await run(sandbox, "echo ${never}; echo on")
        assert (result.out, result.effect) == ("", Effect.NONE)
        assert "line 1: " in result.err

    driven(OnImage(data_dir, image()), test)
