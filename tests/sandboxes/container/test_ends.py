"""How containers end: by their sandbox, by a signal from outside, and with the instance that started them."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes.container.daemon import INSTANCE
from sandboxes.container.driver import ContainerDriver
from sandboxes.container.orphans import kill_orphans
from sandboxes.container.sandbox import ContainerSandbox
from sandboxes.effects import Effect
from sandboxes.errors import SandboxError
from sandboxes.spec import EnvironmentSpec, Limits
from tests.machine import children, wait_until
from tests.sandboxes.box import opened, run
from tests.sandboxes.docker import BASH_IMAGE, OnImage, containers, driven, first_processes

SPEC = EnvironmentSpec()


def test_spare_is_used_once(container_dir: Path) -> None:
    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "echo a > a; x=1")
        frozen = await sandbox.freeze()
        await driver.spares.background.wait()
        waiting = [box.container for boxes in driver.spares._spares.values() for box in boxes]
        one, two = await driver.restore(SPEC, frozen), await driver.restore(SPEC, frozen)
        assert [one.container, two.container] == waiting[:2]
        await run(one, "echo b > a")
        assert (await run(two, "cat a; echo $x")).out == "a\n1\n"
        other = await driver.start(SPEC.model_copy(update={"limits": Limits(pids=40)}))
        assert (await run(other, "cat a")).code == 1

    driven(OnImage(container_dir, spares=2), test)


@pytest.mark.parametrize("docker_starts", [False, True])
def test_container_killed_from_outside_is_an_error(container_dir: Path, docker_starts: bool) -> None:
    """A container that is killed from outside is an error for its rollout."""

    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        assert isinstance(sandbox, ContainerSandbox)
        call = asyncio.create_task(run(sandbox, "sleep 30; echo no"))
        await run(await driver.start(SPEC), "true")
        os.kill(first_processes(container_dir)[sandbox.container], signal.SIGKILL)
        with pytest.raises(SandboxError, match="died"):
            await call
        assert not sandbox.alive

    driven(OnImage(container_dir, spares=0, docker_starts=docker_starts), test)


def test_cancelled_call_kills_the_sandbox(container_dir: Path) -> None:
    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "x=1")
        answer = await run(sandbox, "y=2; echo part; sleep 1000 & sleep 1000", timeout_s=3.0)
        assert (answer.out, answer.code, answer.timed_out, answer.effect) == ("part\n", 124, True, Effect.NONE)
        assert (await run(sandbox, "echo $x $y; ps -e | grep -c sleep")).out == "1\n0\n"
        call = asyncio.create_task(run(sandbox, "sleep 30"))
        await asyncio.sleep(0.2)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        assert not sandbox.alive

    driven(OnImage(container_dir, spares=0), test)


PROXY = """
import asyncio, sys, pathlib
from sandboxes.container.driver import ContainerDriver
from sandboxes.spec import EnvironmentSpec
async def go():
    driver = ContainerDriver(pathlib.Path(sys.argv[1]), spares=1)
    await driver.open()
    await driver.start(EnvironmentSpec(driver="container", image=sys.argv[2]))
    await driver.spares.background.wait()
    print("ready", flush=True)
    await asyncio.sleep(100)
asyncio.run(go())
"""


@pytest.fixture
def killed(container_dir: Path) -> Callable[..., None]:
    """Starts an instance in a process of its own, with a sandbox and a spare, and kills it."""

    def kill(*, keepers: int | None = None) -> None:
        """keepers: a signal that they get first, SIGCONT follows."""
        process = subprocess.Popen(
            [sys.executable, "-c", PROXY, str(container_dir), BASH_IMAGE], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # A sandbox, a spare, and their pattern.
        assert len(containers(container_dir)) == 3
        results = [pid for doorman in children(process.pid) for pid in children(doorman)]
        assert len(results) == 3
        if keepers is not None:
            for pid in results:
                os.kill(pid, keepers)
        doormen = children(process.pid)
        process.kill()
        process.wait()
        process.stdout.close()
        wait_until(lambda: not any(Path(f"/proc/{doorman}").exists() for doorman in doormen), "the doorman lives")
        if keepers == signal.SIGSTOP:
            for pid in results:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    return kill


def test_orphaned_keeper_kills_its_container(container_dir: Path, killed: Callable[..., None]) -> None:
    killed(keepers=signal.SIGSTOP)
    wait_until(lambda: not containers(container_dir), "containers outlive their keepers", within_s=90)


def test_unsaved_root_image_is_removed_at_start(container_dir: Path) -> None:
    async def ran(driver: ContainerDriver) -> set[str]:
        sandbox = await driver.start(EnvironmentSpec(setup=("echo 1 > /root/a",)))
        assert (await run(sandbox, "cat /root/a")).out == "1\n"
        return {
            image
            for image, labels in driver.daemon.images()
            if labels.get(INSTANCE) == driver.spares.boxes.labels[INSTANCE]
        }

    async def unnoted(driver: ContainerDriver) -> None:
        before = await ran(driver)
        assert before <= {root.image for root in driver.roots.all()}
        for note in (container_dir / "roots").iterdir():
            note.unlink()

    async def again(driver: ContainerDriver) -> None:
        assert await ran(driver) == {root.image for root in driver.roots.all()}

    driven(OnImage(container_dir, spares=0), unnoted)
    driven(OnImage(container_dir, spares=0), again)


def test_orphaned_container_is_killed(container_dir: Path) -> None:
    async def test(driver: ContainerDriver) -> None:
        living, forgotten = await driver.start(SPEC), await driver.start(SPEC)
        # As after a kill of the daemon: it runs on, and nobody knows its name.
        driver.spares.boxes.names.discard(forgotten.id)
        assert len(kill_orphans(driver.spares.boxes.folder, driver.spares.boxes.names)) == 1
        with pytest.raises(SandboxError, match="died"):
            await run(forgotten, "echo on")
        assert (await run(living, "echo on")).out == "on\n"

    driven(OnImage(container_dir, spares=0), test)


def test_unreported_container_is_removed_by_the_sweep(container_dir: Path) -> None:
    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        labels = {**driver.spares.boxes.labels, "forkpoint.sandbox": "lost"}
        options = [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]
        create = ["docker", "create", *options, BASH_IMAGE, "true"]
        await asyncio.to_thread(subprocess.run, create, capture_output=True, check=True)
        assert len(containers(container_dir)) == 3
        await asyncio.to_thread(driver._sweep)
        assert len(containers(container_dir)) == 2
        assert (await run(sandbox, "echo on")).out == "on\n"

    driven(OnImage(container_dir, spares=0), test)


def test_killed_instance_leaves_no_container(container_dir: Path, killed: Callable[..., None]) -> None:
    killed()
    wait_until(lambda: not containers(container_dir), "a container outlives its instance", within_s=90)


def test_killed_instance_is_swept_by_any_instance(
    container_dir: Path, data_dir: Path, killed: Callable[..., None]
) -> None:
    async def nothing(_driver: ContainerDriver) -> None:
        # Docker lists one for a moment longer than it has it.
        await asyncio.to_thread(wait_until, lambda: containers(container_dir) == [], "a container is left")

    killed(keepers=signal.SIGKILL)
    driven(OnImage(container_dir), nothing)
    killed(keepers=signal.SIGKILL)
    driven(OnImage(data_dir / "another"), nothing)


def test_second_instance_is_refused(container_dir: Path, data_dir: Path) -> None:
    async def test(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        with pytest.raises(SandboxError, match="in use"):
            await OnImage(container_dir).open()
        async with opened(OnImage(data_dir / "another", spares=0)):
            assert (await run(sandbox, "echo on")).out == "on\n"

    driven(OnImage(container_dir, spares=0), test)
