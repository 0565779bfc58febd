"""An engine over the in-memory driver, and the answers that a rollout would get alone."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from proxy.engine import Engine, build_engine
from proxy.settings import Settings
from proxy.tree.keys import call_key
from proxy.tree.rollout import Outcome, Rollout
from sandboxes.calls import ToolCall
from sandboxes.spec import EnvironmentSpec
from snapshots.policy import Reuse
from tests.sandboxes.memory_driver import Gate, MemoryDriver

KEEPS_ALL = Reuse(1e9, 1.0)
"""States need sandboxes so often that each gets a snapshot: for tests of snapshots, not of the policy."""
SPEC = EnvironmentSpec(driver="memory", files={"/root/seed": "seed\n"})


def shell(command: str) -> ToolCall:
    """Return a shell call."""
    return ToolCall("shell", "exec", {"command": command, "session": "main", "timeout_s": 10.0})


@asynccontextmanager
async def opened(running: Engine) -> AsyncIterator[Engine]:
    """Open an engine that was built; close it afterwards."""
    await running.open()
    try:
        yield running
    finally:
        await running.aclose()


@asynccontextmanager
async def engine(
    data: Path,
    driver: MemoryDriver | None = None,
    *,
    gate: Gate | None = None,
    reuse: Reuse = KEEPS_ALL,
    **settings: Any,
) -> AsyncIterator[Engine]:
    """Run an engine on a data directory, with the default spec `SPEC` and without warm forks unless set otherwise."""
    driver = driver or MemoryDriver(gate)
    running = build_engine(
        Settings(data=data, **{"default_spec": SPEC, "warm_sandboxes": 0, **settings}), {"memory": driver}
    )
    running.snapshot_value.reuse = reuse
    async with opened(running):
        yield running


async def ask(running: Engine, rollout: Rollout, command: str) -> tuple[dict[str, Any], Outcome]:
    """Take one step as the data plane does; return the answer and how it was obtained."""
    call = shell(command)
    key = call_key(call)
    record, outcome = running.step.known(rollout, key), Outcome.HIT
    if record is None:
        answer = await running.step.run(rollout, call, key)
        record, outcome = answer.record, answer.outcome
    return orjson.loads(running.store.records.result(record).body), outcome


async def alone(trajectory: list[str], spec: EnvironmentSpec = SPEC) -> list[dict[str, Any]]:
    """Return the answers of a trajectory in a fresh sandbox of its own."""
    sandbox = await MemoryDriver().start(spec)
    return [orjson.loads((await sandbox.execute(shell(command))).result.body) for command in trajectory]
