"""The end of an engine: nothing keeps it from closing its sandboxes, and what is cut off is no answer."""

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from proxy import engine as engines
from proxy.engine import build_engine
from proxy.lifecycle import UNFINISHED, EngineEnd
from proxy.settings import Settings
from sandboxes.calls import ToolCall
from tests.proxy.rig import SPEC, ask, engine
from tests.sandboxes.memory_driver import MemoryDriver


class Stubborn:
    """Waits until `end`, also when it is cancelled."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def wait(self) -> None:
        while not self.end.is_set():
            try:
                await self.end.wait()
            except asyncio.CancelledError:
                continue


def test_a_stage_that_does_not_end_is_left() -> None:
    """It ignores even its cancellation. The log names what the proxy waited for, and the next stage has its turn."""

    async def body() -> None:
        stubborn, failures = Stubborn(), list[str]()
        ending = EngineEnd(failures.append)
        with capture_logs() as logs:
            await ending.stage("first", stubborn.wait(), within_s=0.01)
            await ending.stage("second", asyncio.sleep(0))
        assert failures == [UNFINISHED]
        (line,) = logs
        assert line["stage"] == "first"
        assert any(name.startswith("first: ") and "test_lifecycle.py" in name for name in line["waits_for"])
        assert not ending.errors
        stubborn.end.set()

    asyncio.run(body())


def test_an_error_does_not_keep_sandboxes_open(tmp_path: Path) -> None:
    """A part fails while the proxy stops: what comes after it is closed all the same, and then the error is raised."""

    async def fail() -> None:
        raise ValueError("broken")

    async def body() -> None:
        running = build_engine(Settings(data=tmp_path, default_spec=SPEC), {"memory": (driver := MemoryDriver())})
        await running.open()
        running.lifecycle.before_close.append(fail)
        await ask(running, await running.tasks.rollout("task", "a"), "echo 1 > f")
        with pytest.raises(ValueError, match="broken"):
            await running.aclose()
        assert not driver.live
        # What would make sandboxes ahead of calls has ended too, so none appears after its driver was closed.
        assert running.warm.max_forks == 0

    asyncio.run(body())


def test_a_call_that_is_cut_off_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy stops although a call does not end. After a restart its rollout is where it was, and makes it again."""
    monkeypatch.setattr(engines, "IN_FLIGHT_S", 0.05)
    reached = asyncio.Event()

    async def gate(call: ToolCall) -> None:
        if call.arguments["command"] == "echo 2 >> f":
            reached.set()
            await asyncio.Event().wait()

    async def body() -> None:
        driver = MemoryDriver(gate)
        with capture_logs() as logs:
            async with engine(tmp_path, driver) as running:
                rollout = await running.tasks.rollout("task", "a")
                await ask(running, rollout, "echo 1 > f")
                stuck = asyncio.ensure_future(ask(running, rollout, "echo 2 >> f"))
                await reached.wait()
        assert not driver.live
        (line,) = [log for log in logs if log["log_level"] == "error"]
        assert any(name.startswith("call of task/a: ") for name in line["waits_for"])
        with pytest.raises(asyncio.CancelledError):
            await stuck
        async with engine(tmp_path, driver := MemoryDriver()) as again:
            rollout = await again.tasks.rollout("task", "a")
            assert rollout.calls == 1
            await ask(again, rollout, "echo 2 >> f")
            assert (await ask(again, rollout, "cat f"))[0]["stdout"] == "1\n2\n"
            assert driver.executed == ["echo 2 >> f", "cat f"]

    asyncio.run(body())
