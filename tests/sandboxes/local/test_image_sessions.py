"""Random sessions in containers with bash, with dash and with busybox."""

import asyncio
from pathlib import Path

import pytest

from sandboxes.container.boot_scripts import SHELL_FIFOS, SHELL_TEXTS
from sandboxes.local.driver import LocalDriver
from sandboxes.driver import Driver, Sandbox
from sandboxes.effects import Effect
from sandboxes.errors import SandboxError
from sandboxes.spec import EnvironmentSpec
from tests.machine import assert_spread, require_criu
from tests.sandboxes.box import opened, run
from tests.sandboxes.docker import BASH_IMAGE, BUSYBOX_IMAGE, SH_IMAGE, OnImage, driven
from tests.sandboxes.session_contract import SessionContract

SPEC = EnvironmentSpec()


class TestContainerSessions(SessionContract):
    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        require_criu()
        return OnImage(data_dir, checkpoints=True)


class TestDashSessions(SessionContract):
    bash = False

    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return OnImage(data_dir, SH_IMAGE)


class TestBusyboxSessions(SessionContract):
    bash = False

    @pytest.fixture
    def driver(self, data_dir: Path) -> Driver:
        return OnImage(data_dir, BUSYBOX_IMAGE)


@pytest.mark.parametrize("image", [BASH_IMAGE, SH_IMAGE, BUSYBOX_IMAGE])
def test_a_shell_without_descriptors_is_no_result(data_dir: Path, image: str) -> None:
    """One shell would go on. A recorded end of it would be false, so the call is an error."""

    async def go() -> None:
        async with opened(driver := OnImage(data_dir, image)):
            sandbox = await driver.start(EnvironmentSpec())
            with pytest.raises(SandboxError, match="too few file descriptors"):
                await run(sandbox, "ulimit -n 3")

    asyncio.run(go())


def files_of_shells(data_dir: Path) -> list[dict[str, int]]:
    """Return the inodes of the files in each directory of a shell, by name."""
    folders = [path for path in data_dir.glob("**/boxes/*/box/*") if path.name.isdigit()]
    return [{file.name: file.stat().st_ino for file in folder.iterdir()} for folder in folders]


@pytest.mark.parametrize("image", [BASH_IMAGE, SH_IMAGE, BUSYBOX_IMAGE])
def test_the_next_shell_gets_the_files_of_the_last_one(data_dir: Path, image: str) -> None:
    """Each call leaves the session a new shell. Files for each of them would be removed and made with each call."""

    async def go() -> None:
        async with opened(driver := OnImage(data_dir, image)):
            sandbox = await driver.start(EnvironmentSpec())
            seen = []
            for number in range(3):
                answer = await run(sandbox, f"A=${{A}}{number}; echo $A; printf '%s|' /dev/.box/[0-9]*")
                assert answer.out.startswith("012"[: number + 1] + "\n")
                # The keeper answers once it has replaced the last call's shell.
                await sandbox.inspect()
                seen.append((answer.out, files_of_shells(data_dir)))
            assert {*seen[0][1][0]} == {*SHELL_FIFOS, *SHELL_TEXTS}
            assert seen[0][1] == seen[1][1] == seen[2][1], "other files"
            assert len({said for said, _ in seen}) == 3, "a shell's number must not be used again"

    asyncio.run(go())


def test_no_command_changes_a_file_of_shells(data_dir: Path) -> None:
    """The next shell gets them, whatever their names, modes and owners are by then."""

    async def go() -> None:
        async with opened(driver := OnImage(data_dir)):
            sandbox = await driver.start(EnvironmentSpec())
            assert_spread(driver.spares.boxes.folder, data_dir.parent)
            assert_spread(driver.states.folder, data_dir.parent)
            for change in ("chmod 600 {}", "chown 1 {}", "touch {}", "mv {} /tmp/x", "rm {}", "ln {} /dev/.box/other"):
                for name in ("/dev/.box/[0-9]*/out", "/dev/.box/[0-9]*/restore", "/proc/self/fd/1", "/proc/$$/fd/29"):
                    assert (await run(sandbox, change.format(name))).code, (change, name)
            assert (await run(sandbox, "echo x > /proc/$$/fd/29")).code

    asyncio.run(go())


CAPACITY = "python3 -c 'import fcntl; print(fcntl.fcntl(1, fcntl.F_GETPIPE_SZ))'"


def test_a_changed_fifo_reaches_no_other_shell(data_dir: Path) -> None:
    """A restored sandbox has a new one."""

    async def go() -> None:
        async with opened(driver := OnImage(data_dir)):
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


@pytest.mark.parametrize(
    ("image", "said"), [(BASH_IMAGE, "line 1: "), (SH_IMAGE, ": 1: "), (BUSYBOX_IMAGE, "line 1: ")]
)
def test_invalid_command_keeps_options_and_traps(data_dir: Path, image: str, said: str) -> None:
    """A command with a syntax error leaves options and traps as they were."""

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "set -u; trap 'echo one' USR1; trap 'echo two' USR2")
        assert (await run(sandbox, "if true")).effect is Effect.NONE
        assert (await run(sandbox, "kill -USR1 $$; kill -USR2 $$; true")).out == "one\ntwo\n"
        result = await run(sandbox, "echo ${never}; echo on")
        assert (result.out, result.effect) == ("", Effect.NONE)
        assert said in result.err

    driven(OnImage(data_dir, image), test)


@pytest.mark.parametrize("image", [SH_IMAGE, BUSYBOX_IMAGE])
def test_posix_session_is_restored_without_functions(data_dir: Path, image: str) -> None:
    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        assert (await run(sandbox, "x='a  b'; export y=\"it's\"; alias hi='echo hi'")).effect is Effect.SESSION
        assert (
            await run(sandbox, "umask 027; cd /tmp; set -u; set -- p 'q r'; trap 'echo bye' USR1")
        ).effect is Effect.SESSION
        # A function cannot be printed: it is gone after the call, live or restored, so it is no effect either.
        assert (await run(sandbox, "f() { echo f; }; f")).outcome == ("f\n", "", 0, Effect.NONE)
        restored = await driver.restore(SPEC, await sandbox.freeze())
        commands = (
            'echo "$x" $y $-; hi; trap; umask; pwd; for i in "$@"; do echo "$i"; done; env | grep ^y; command -v f'
        )
        live, back = await run(sandbox, commands), await run(restored, commands)
        assert back.outcome == live.outcome
        assert back.out.startswith("a  b it's ")
        assert "\nhi\n" in back.out
        assert back.out.endswith("0027\n/tmp\np\nq r\ny=it's\n") or back.out.endswith("027\n/tmp\np\nq r\ny=it's\n")
        assert (await run(sandbox, "if")).code == 2
        assert (await run(sandbox, "echo $$ >/dev/null; echo ${unset}; echo on")).code != 0
        assert (await run(sandbox, "exec 3</etc/passwd")).effect is not Effect.NONE

    driven(OnImage(data_dir, image), test)


@pytest.mark.parametrize("image", [BASH_IMAGE, SH_IMAGE, BUSYBOX_IMAGE])
def test_a_session_stays_in_its_directory(data_dir: Path, image: str) -> None:
    """The directory is moved, removed or behind a changed link: a shell of any kind stays in it, as plain shells do."""

    async def test(sandbox: Sandbox) -> None:
        for before, after, out in (
            ("mkdir /tmp/a; cd /tmp/a; echo > in", "mv ../a ../b", "in\n/tmp/a\n"),
            ("mkdir /tmp/c; cd /tmp/c", "rmdir /tmp/c; mkdir /tmp/c; echo > /tmp/c/other", "/tmp/c\n"),
            ("mkdir -p /tmp/d/in /tmp/e; ln -s d /tmp/l; cd /tmp/l", "ln -sfn e /tmp/l", "in\n/tmp/l\n"),
        ):
            await run(sandbox, before)
            assert (await run(sandbox, after)).state is None
            assert (await run(sandbox, "ls; pwd")).outcome == (out, "", 0, Effect.NONE)
            assert (await run(sandbox, "cd /tmp")).state is not None
        await run(sandbox, "mkdir /tmp/g; cd /tmp/g; rmdir /tmp/g")
        await run(sandbox, "exit 3")
        assert (await run(sandbox, "rm -rf * ./* 2>/dev/null; ls -d /etc")).out == "/etc\n"

    async def go() -> None:
        async with opened(OnImage(data_dir, image)) as driver:
            await test(await driver.start(EnvironmentSpec()))

    asyncio.run(go())
