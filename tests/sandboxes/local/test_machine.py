"""What all sandboxes of one local driver share: spares, and the launcher's reports."""

import asyncio
import errno
import re
from pathlib import Path

import pytest

from sandboxes.effects import Effect
from sandboxes.errors import SandboxError
from sandboxes.host.spare_demand import LEAST, SpareDemand
from sandboxes.ipc.launch_messages import LayerStack, LinksTried
from sandboxes.local import launcher
from sandboxes.local.driver import LocalDriver
from sandboxes.local.machine import _FIRST_CALL_S, Machine, ended
from sandboxes.spec import EnvironmentSpec
from tests.machine import until
from tests.sandboxes.box import opened, run
from tests.sandboxes.conftest import execute_shells

SPEC = EnvironmentSpec()


def test_spares_follow_demand(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a burst as many sandboxes wait as it had, and without another one all but a few of them end."""

    async def go() -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            machine = driver.machine
            # All sandboxes count as begun at once, however slowly this machine starts them.
            monkeypatch.setattr("sandboxes.host.spare_demand._BURST_S", 3600.0)
            for sandbox in await asyncio.gather(*(driver.start(SPEC) for _ in range(5))):
                await sandbox.close()
            await until(lambda: len(machine._spares) == 5)
            machine._demand = SpareDemand()
            machine._begin_filling()
            await until(lambda: len(machine._spares) == LEAST)
            assert (await run(await driver.start(SPEC), "echo hi")).out == "hi\n"

    asyncio.run(go())


def test_a_first_call_goes_before_the_next_spare(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a spare is left, the next one is made later; when none is left, it is made at once."""
    monkeypatch.setattr("sandboxes.local.machine._FIRST_CALL_S", 3600.0)

    async def go() -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            machine = driver.machine
            assert (await run(await driver.start(SPEC), "echo hi")).out == "hi\n"
            assert len(machine._spares) == LEAST - 1
            for _ in range(LEAST - 1):
                await driver.start(SPEC)
            await until(lambda: len(machine._spares) >= LEAST)

    asyncio.run(go())


def test_a_spare_is_ended_once(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox is started while the machine closes. A descriptor that is closed twice may be another file's."""
    ending: list[int] = []

    async def go() -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            machine = driver.machine

            async def start_meanwhile(process: int) -> None:
                ending.append(process)
                with pytest.raises(SandboxError, match="not open"):
                    await machine.spare()
                await ended(process)

            monkeypatch.setattr("sandboxes.local.machine.ended", start_meanwhile)
            await machine.close()
            assert len(ending) == len(set(ending)) >= LEAST

    asyncio.run(go())


def test_a_failed_switch_ends_one_sandbox(data_dir: Path) -> None:
    """The launcher reports to the sandbox's first process, and goes on serving all others."""

    async def go() -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            broken, other = await driver.start(SPEC), await driver.start(SPEC)
            await run(broken, "echo a > a")
            layer = (await broken.freeze()).parts[0]
            # Another layer cannot be mounted over one that is gone.
            (driver.machine.layers.frozen / layer).rename(data_dir / "elsewhere")
            await run(broken, "echo b > b")
            with pytest.raises(SandboxError, match="died"):
                await run(broken, "cat b")
            assert not broken.alive
            await run(other, "echo c > c")
            assert (await run(other, "cat c")).out == "c\n"

    asyncio.run(go())


def test_a_start_waits_for_a_shell_once(data_dir: Path) -> None:
    """Only the first start of a spec learns what a new session looks like; every sandbox answers alike."""
    spec = EnvironmentSpec(env={"GREETING": "hi"})

    async def go() -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            first, second = await driver.start(spec), await driver.start(spec)
            assert first.pristine == second.pristine != (await driver.start(SPEC)).pristine
            frozen = await second.freeze()
            for sandbox in (first, second, await driver.restore(spec, frozen)):
                # A command that leaves the session as it was is no change, so the session is the expected one.
                answer = await run(sandbox, "echo $GREETING $PWD $SHLVL")
                assert (answer.out, answer.effect) == ("hi /root 1\n", Effect.NONE)
                assert answer.state == frozen.state

    asyncio.run(go())


def test_a_restored_sandbox_without_a_shell_says_so(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start does not wait for the sandbox's own bash, so the first call reports that there is none."""
    execute_shells(monkeypatch)

    async def go() -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            sandbox = await driver.start(SPEC)
            await run(sandbox, "mv /usr/bin/bash /usr/bin/hidden")
            restored = await driver.restore(SPEC, await sandbox.freeze())
            answer = await run(restored, "echo hi")
            assert answer.code == 127
            assert "does not start" in answer.out + answer.err

    asyncio.run(go())


def faults_of(process: int) -> int:
    """Return how often the kernel had to stop a process, given by its descriptor, for a page."""
    [pid] = re.findall(r"^Pid:\s*(\d+)", Path(f"/proc/self/fdinfo/{process}").read_text(), re.MULTILINE)
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def test_later_sandboxes_have_the_pages_that_they_write_to(data_dir: Path) -> None:
    """After the first call that writes, the pid 1 of each new spare gets the pages that a sandbox writes to."""

    async def faults(driver: LocalDriver) -> int:
        spare = driver.machine._spares[0].process
        before = faults_of(spare)
        sandbox = await driver.start(SPEC)
        assert (await run(sandbox, "echo text > file; cat file")).out == "text\n"
        took = faults_of(spare) - before
        await sandbox.guest.settle()
        await sandbox.close()
        return took

    async def go() -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            took = []
            # The spares that were made before the first call are used up first.
            for _ in range(LEAST + 2):
                took.append(await faults(driver))
                await asyncio.sleep(_FIRST_CALL_S)
                await until(lambda: len(driver.machine._spares) >= LEAST)
            assert took[-1] < took[0] / 2, f"{took[-1]} instead of {took[0]}"

    asyncio.run(go())


@pytest.mark.parametrize(("error", "trials"), [(errno.EMFILE, 2), (errno.ENOSPC, 2), (errno.EOPNOTSUPP, 1)])
def test_a_shortage_decides_nothing_about_links(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, error: int, trials: int
) -> None:
    """A trial mount that fails for a shortage is repeated; what the kernel cannot do is remembered."""
    tried: list[LayerStack] = []

    def fails(stack: LayerStack) -> int:
        tried.append(stack)
        raise OSError(error, "as the test wants")

    async def try_here(_machine: Machine, lowers: tuple[str, ...]) -> LinksTried:
        return launcher._tried(LayerStack(list(lowers), "upper", "work", links=True))

    async def go() -> None:
        machine = LocalDriver(data_dir).machine
        assert [await machine.keeps_links(("base",)) for _ in range(2)] == [False, False]

    monkeypatch.setattr(launcher, "_writable", fails)
    monkeypatch.setattr(Machine, "_try_links", try_here)
    asyncio.run(go())
    assert len(tried) == trials
