"""Short words for tests that run commands in sandboxes."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import orjson
import pytest

from sandboxes import process_output as process
from sandboxes.calls import Execution, ToolCall
from sandboxes.driver import Driver, Sandbox, execute
from sandboxes.effects import Effect
from sandboxes.linux import spawn
from sandboxes.linux.cgroups import Cgroups
from sandboxes.listener import Listener
from sandboxes.local.driver import LocalDriver
from sandboxes.shell_files import copies
from sandboxes.spec import EnvironmentSpec, Limits
from snapshots.criu.checkpoints import CriuCheckpointer

DriverT = TypeVar("DriverT", bound=Driver)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="checks control groups and mounts, which need root")
needs_forks = pytest.mark.skipif(not Path(spawn.ANCHOR).exists(), reason="no C compiler has made the library")


def local_driver(data_dir: Path, *, checkpoints: bool = True, images_dir: Path | None = None) -> LocalDriver:
    """Return a local driver; with checkpoints, live processes are frozen where CRIU works."""
    return LocalDriver(data_dir, CriuCheckpointer(data_dir, images_dir=images_dir) if checkpoints else None)


def probed_groups() -> Cgroups:
    """Return groups that were opened and closed again; their `problem` says why none can be written here, if so.

    Each process of the tests has a name of its own: two that made and removed one group would take it from each other.
    """
    groups = Cgroups(f"forkpoint-test-probe-{os.getpid()}")
    groups.open()
    groups.close()
    return groups


class Answer:
    """What a command answered, and what running it taught."""

    def __init__(self, execution: Execution) -> None:
        body = orjson.loads(execution.result.body)
        self.out: str = body["stdout"]
        self.err: str = body["stderr"]
        self.code: int = body["exit_code"]
        self.timed_out: bool = body["timed_out"]
        self.truncated: bool = body["truncated"]
        self.effect = execution.effect
        self.state = execution.state
        self.witness = execution.witness
        self.restless = execution.restless

    @property
    def printed(self) -> tuple[str, str, int]:
        """What two equal runs must have in common beside background processes, which may have worked meanwhile."""
        return self.out, self.err, self.code

    @property
    def outcome(self) -> tuple[str, str, int, Effect]:
        """What two equal runs must have in common."""
        return *self.printed, self.effect


def written_uppers(data_dir: Path) -> list[str]:
    """Return the names of the uppers of a local driver that hold something; those of spares are empty."""
    uppers = (data_dir / "uppers").iterdir()
    return [upper.name for upper in uppers if any((upper / "diff").iterdir()) or len(list(upper.iterdir())) > 2]


async def run(sandbox: Sandbox, command: str, *, session: str = "main", timeout_s: float = 30.0) -> Answer:
    arguments = {"command": command, "timeout_s": timeout_s, "session": session}
    return Answer(await sandbox.execute(ToolCall("shell", "exec", arguments)))


async def reads(sandbox: Sandbox, command: str) -> bool:
    """Return whether a command is an observation as soon as what earlier ones woke sleeps again, within 30 s."""
    deadline = time.monotonic() + 30.0
    while (await run(sandbox, command)).effect is not Effect.NONE:
        if time.monotonic() > deadline:
            return False
    return True


async def file(sandbox: Sandbox, tool: str, path: str, body: bytes = b"", **more: Any) -> tuple[int, bytes]:
    result = (await sandbox.execute(ToolCall("shell", tool, {"path": path, **more}, body))).result
    return result.status, result.body


class Ran:
    """What a process of its own answered, and what running it taught."""

    def __init__(self, execution: Execution) -> None:
        assert execution.result.media_type == process.MEDIA_TYPE, execution.result.body
        body = execution.result.body
        self.out, self.err = process.output(body, process.OUT), process.output(body, process.ERR)
        self.ending = process.ending(body)
        self.effect, self.state, self.shareable = execution.effect, execution.state, execution.shareable


async def ran(sandbox: Sandbox, *argv: str, stdin: bytes = b"", listener: Listener | None = None, **more: Any) -> Ran:
    """Run a process of its own in sandbox."""
    request = {"argv": list(argv), "env": {}, "cwd": None, "user": None, "tty": False, "timeout_s": 20.0, **more}
    return Ran(await execute(sandbox, ToolCall("process", "run", request, stdin), listener))


@asynccontextmanager
async def opened(driver: Driver) -> AsyncIterator[Driver]:
    await driver.open()
    try:
        yield driver
    finally:
        await driver.aclose()


class _KeptDriver:
    """A local driver that stays open from test to test: to open and close one takes longer than most of the tests."""

    def __init__(self) -> None:
        self._offers: WeakKeyDictionary[Driver, tuple[object, Callable[[], LocalDriver]]] = WeakKeyDictionary()
        self._open: tuple[object, asyncio.Runner, LocalDriver] | None = None

    def offer(self, key: object, make: Callable[[Path], LocalDriver], data_dir: Path) -> LocalDriver:
        """Return a driver that is not open, for which `run` uses the one that is kept open under this key."""
        # A test may have replaced how shells are made, which a driver looks at once.
        driver, key = make(data_dir), (key, data_dir, copies.made_or_none)
        self._offers[driver] = key, lambda: make(data_dir / "kept")
        return driver

    def run(self, driver: Driver, test: Callable[[Any], Awaitable[None]]) -> bool:
        """Run a test, unless this driver was not offered; close the sandboxes that the test leaves."""
        if (offer := self._offers.get(driver)) is None:
            return False
        key, make = offer
        if self._open is None or self._open[0] != key:
            self.close()
            self._open = key, asyncio.Runner(), make()
            self._open[1].run(self._open[2].open())
        _, runner, kept = self._open

        async def go() -> None:
            try:
                await test(kept)
            finally:
                for sandbox in kept.sandboxes:
                    await sandbox.close()

        runner.run(go())
        return True

    def close(self) -> None:
        """Close the driver, if one is open."""
        if self._open is not None:
            (_, runner, driver), self._open = self._open, None
            with runner:
                runner.run(driver.aclose())


kept_driver = _KeptDriver()


def driven(driver: DriverT, test: Callable[[DriverT], Awaitable[None]]) -> None:
    """Run a test with an opened driver: this one, or one that is kept open for several tests."""

    async def go() -> None:
        async with opened(driver):
            await test(driver)

    if not kept_driver.run(driver, test):
        asyncio.run(go())


def in_sandbox(data_dir: Path, test: Callable[[Sandbox], Awaitable[None]], **spec: Any) -> None:
    """Run test on a fresh sandbox of a local driver, which freezes no live processes."""

    async def go(driver: Driver) -> None:
        await test(await driver.start(EnvironmentSpec(**spec)))

    driven(kept_driver.offer("", LocalDriver, data_dir), go)


def with_local(data_dir: Path, test: Callable[[LocalDriver], Awaitable[None]]) -> None:
    """Run a test with a local driver that freezes live processes where CRIU works."""
    driven(kept_driver.offer("with CRIU", local_driver, data_dir), test)


SMALL = Limits(memory_mb=96, pids=32, disk_mb=24, timeout_s=20)


async def is_stopped(sandbox: Sandbox, command: str) -> bool:
    """Return whether a command is killed, or what it leaves ends the sandbox within 30 s."""
    if (await run(sandbox, command)).code != 0:
        return True
    for _ in range(300):
        if not sandbox.alive:
            return True
        await asyncio.sleep(0.1)
    return False
