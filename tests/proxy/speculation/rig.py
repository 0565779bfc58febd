"""An engine that speculates over in-memory sandboxes that tell their CPU time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from proxy.engine import Engine
from proxy.speculation.speculator import Speculator
from proxy.tree.rollout import Rollout
from sandboxes.calls import Execution, ToolCall
from sandboxes.listener import Listener
from tests.proxy.rig import engine
from tests.sandboxes.memory_driver import Gate, MemoryDriver, MemorySandbox

CALL_S = 5.0
"""How long each call is said to run."""


class MeteredSandbox(MemorySandbox):
    """A sandbox that needs a second of CPU time for each call, and says so."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cpu_s = 0.0
        self.background = False

    def set_background(self, *, background: bool) -> bool:
        self.background = background
        return True

    async def execute(self, call: ToolCall, listener: Listener | None = None) -> Execution:
        execution = await super().execute(call, listener)
        self.cpu_s += 1.0
        return replace(execution, seconds=CALL_S)


async def _no_rounds(_speculator: Speculator) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def speculating(
    data: Path, *, gate: Gate | None = None, idle: float = 8.0, driver: MemoryDriver | None = None, **settings: Any
) -> AsyncIterator[Engine]:
    """Run an engine that speculates with all cores, on a machine with so many idle ones; tests make its rounds."""
    driver = driver or MemoryDriver(gate, MeteredSandbox)
    options = {"speculate": 1.0, "memory_reserve_bytes": 0, **settings}
    with patch.object(Speculator, "work", _no_rounds):
        async with engine(data, driver, **options) as running:
            running.speculator._idle_cores = lambda: idle
            yield running
    assert not driver.live


def think(*rollouts: Rollout) -> None:
    """Let a second pass since the rollouts' last calls."""
    for rollout in rollouts:
        rollout.used_at -= 1.0


async def speculated(running: Engine, *rollouts: Rollout) -> None:
    """Make one round while rollouts think, and wait for what it began."""
    think(*rollouts)
    running.speculator.round()
    await running.speculator._tasks.wait()
    await running.capture.drain()
