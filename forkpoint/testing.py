"""Tests that every driver must pass, for pytest. Subclass `DriverContract` in a test module of your own.

The suite knows nothing of what a driver's tools do. The subclass names one call that changes the state and one that
only reads it; the suite then checks what the proxy relies on: digests, effects, freezing, restoring and collecting.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandboxes.calls import Execution, ToolCall
from sandboxes.driver import Driver, FrozenState, Sandbox
from sandboxes.effects import Effect
from sandboxes.errors import StateGoneError
from sandboxes.spec import EnvironmentSpec

DriverTest = Callable[[Driver], Awaitable[None]]


class DriverContract(ABC):
    """The contract suite. pytest collects each subclass whose name begins with `Test`."""

    @abstractmethod
    def make_driver(self, directory: Path) -> Driver:
        """Return a driver with this data directory, not opened yet. The suite may make another one on it later."""

    @abstractmethod
    def spec(self) -> EnvironmentSpec:
        """Return the environment of every sandbox in the suite."""

    @abstractmethod
    def change(self, number: int) -> ToolCall:
        """Return a call that changes the state. Different numbers must lead to different states."""

    @abstractmethod
    def observe(self) -> ToolCall:
        """Return a call that changes nothing, and whose result differs between the states that `change` leads to."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        """Give the driver's data directory; override it where a driver needs one elsewhere."""
        return tmp_path / "driver"

    def test_observation_changes_nothing(self, directory: Path) -> None:
        """A call that only reads has no effect and leaves the digest as it was."""

        async def test(driver: Driver) -> None:
            sandbox = await driver.start(self.spec())
            changed = await sandbox.execute(self.change(1))
            first, second = await sandbox.execute(self.observe()), await sandbox.execute(self.observe())
            assert (first.effect, second.effect) == (Effect.NONE, Effect.NONE)
            assert first.state == second.state == changed.state
            assert _response(first) == _response(second)

        self._run(directory, test)

    def test_change_has_an_effect_and_a_new_digest(self, directory: Path) -> None:
        """States differ exactly where an observation can tell them apart."""

        async def test(driver: Driver) -> None:
            sandbox = await driver.start(self.spec())
            before = await sandbox.execute(self.observe())
            changes = [await sandbox.execute(self.change(number)) for number in (1, 2)]
            assert all(execution.effect is not Effect.NONE for execution in changes)
            digests = [execution.state for execution in (before, *changes)]
            assert None not in digests
            assert len({digest.exact for digest in digests if digest is not None}) == 3

        self._run(directory, test)

    def test_equal_histories_reach_equal_states(self, directory: Path) -> None:
        """A replay must reach the recorded state: in another sandbox, and from another driver on a new directory."""

        async def test(driver: Driver) -> None:
            first, second = await self._after(driver, 1, 2), await self._after(driver, 1, 2)
            async with _opened(self.make_driver(directory.with_name("other"))) as other:
                third = await self._after(other, 1, 2)
                observed = [await sandbox.execute(self.observe()) for sandbox in (first, second, third)]
            assert len({_response(execution) for execution in observed}) == 1
            assert len({execution.state.content for execution in observed if execution.state is not None}) == 1

        self._run(directory, test)

    def test_restored_state_equals_the_frozen_one(self, directory: Path) -> None:
        """A restored sandbox answers as the frozen one did and has its digest; the frozen one goes on."""

        async def test(driver: Driver) -> None:
            source = await self._after(driver, 1)
            frozen = await source.freeze()
            expected = await source.execute(self.observe())
            assert frozen.state == expected.state
            restored = await driver.restore(self.spec(), frozen)
            observed = await restored.execute(self.observe())
            assert (_response(observed), observed.state) == (_response(expected), expected.state)

        self._run(directory, test)

    def test_restored_sandboxes_are_independent(self, directory: Path) -> None:
        """What one of them changes, neither the other nor the source sees."""

        async def test(driver: Driver) -> None:
            source = await self._after(driver, 1)
            frozen = await source.freeze()
            expected = _response(await source.execute(self.observe()))
            first, second = [await driver.restore(self.spec(), frozen) for _ in range(2)]
            await first.execute(self.change(2))
            assert _response(await first.execute(self.observe())) != expected
            assert _response(await second.execute(self.observe())) == expected
            assert _response(await source.execute(self.observe())) == expected

        self._run(directory, test)

    def test_frozen_state_outlives_the_driver(self, directory: Path) -> None:
        """A frozen state is on disk: a new driver on the same directory restores it."""

        async def run() -> None:
            async with _opened(self.make_driver(directory)) as driver:
                source = await self._after(driver, 1)
                frozen = await source.freeze()
                expected = _response(await source.execute(self.observe()))
            async with _opened(self.make_driver(directory)) as again:
                restored = await again.restore(self.spec(), frozen)
                assert _response(await restored.execute(self.observe())) == expected

        asyncio.run(run())

    def test_collect_keeps_what_is_named(self, directory: Path) -> None:
        """After `collect`, named states can be restored; restoring a deleted one raises StateGoneError."""

        async def test(driver: Driver) -> None:
            kept = await self._frozen(driver, 1)
            deleted = await self._frozen(driver, 2)
            if not deleted.parts:
                pytest.skip("this driver's frozen states have no parts to delete")
            await driver.collect(kept.parts)
            restored = await driver.restore(self.spec(), kept)
            assert (await restored.execute(self.observe())).state == kept.state
            if not set(deleted.parts) <= set(kept.parts):
                with pytest.raises(StateGoneError):
                    await driver.restore(self.spec(), deleted)

        self._run(directory, test)

    def test_close_is_idempotent(self, directory: Path) -> None:
        """A sandbox may be closed twice, and is not alive afterwards."""

        async def test(driver: Driver) -> None:
            sandbox = await driver.start(self.spec())
            assert sandbox.alive
            await sandbox.close()
            await sandbox.close()
            assert not sandbox.alive

        self._run(directory, test)

    def test_identity_depends_on_the_spec_alone(self, directory: Path) -> None:
        """Two drivers give one identity to equal specs, so that trees outlive a restart."""

        async def test(driver: Driver) -> None:
            async with _opened(self.make_driver(directory.with_name("other"))) as other:
                assert await driver.identity(self.spec()) == await other.identity(self.spec())

        self._run(directory, test)

    async def _after(self, driver: Driver, *numbers: int) -> Sandbox:
        sandbox = await driver.start(self.spec())
        for number in numbers:
            await sandbox.execute(self.change(number))
        return sandbox

    async def _frozen(self, driver: Driver, number: int) -> FrozenState:
        sandbox = await self._after(driver, number)
        frozen = await sandbox.freeze()
        await sandbox.close()
        return frozen

    def _run(self, directory: Path, test: DriverTest) -> None:
        async def run() -> None:
            async with _opened(self.make_driver(directory)) as driver:
                await test(driver)

        asyncio.run(run())


@asynccontextmanager
async def _opened(driver: Driver) -> AsyncIterator[Driver]:
    await driver.open()
    try:
        yield driver
    finally:
        await driver.aclose()


def _response(execution: Execution) -> tuple[int, bytes]:
    return execution.result.status, execution.result.body
