"""Rollouts that walk through a whole engine with SQL, while things go wrong around them."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pytest

from proxy.dialects.sql import parse
from proxy.engine import Engine
from proxy.tree.keys import call_key
from proxy.tree.rollout import Outcome
from sandboxes.errors import SandboxError
from sandboxes.pool.lifecycle import SandboxState
from sandboxes.pool.pool import OverloadedError

Statement = tuple[str, str]
"""A tool, and what it is given as `sql`."""


class Trouble:
    """Drops snapshots, closes sandboxes and kills worker processes, as its dice say. workers: names the processes."""

    def __init__(self, seed: int, chance: float, workers: Callable[[], list[int]], kill: Callable[[int], None]) -> None:
        self.dice = random.Random(seed)  # noqa: S311 - dice of a test
        self._chance, self._workers, self._kill = chance, workers, kill

    async def between_calls(self, engine: Engine) -> None:
        for _ in range(self.dice.randrange(4)):
            await asyncio.sleep(0)
        if self.dice.random() < self._chance:
            for snapshot in engine.snapshots:
                node = engine.trees.node(snapshot.tree, snapshot.node)
                if node is not None and self.dice.random() < 0.5 and not snapshot.leases:
                    engine.cache.drop(node)
        if self.dice.random() < self._chance:
            await engine.pool.close_where(lambda slot: slot.state is SandboxState.IDLE and self.dice.random() < 0.5)
        if self.dice.random() < self._chance and (pids := self._workers()):
            self._kill(self.dice.choice(pids))


async def walk(engine: Engine, name: str, walked: Sequence[Statement], trouble: Trouble) -> list[dict[str, Any]]:
    """Walk one rollout; a call that fails is made again, as an agent's client would."""
    answers = []
    for statement in walked:
        await trouble.between_calls(engine)
        for _ in range(100):
            try:
                answer = await ask(engine, name, statement)
            except (SandboxError, OverloadedError):
                continue
            if (answer["error"] or {}).get("kind") != "limit":
                answers.append(answer)
                break
            # Its worker was killed twice, which is reported as the kernel's end of a process without memory.
        else:
            pytest.fail(f"{statement} never got an answer")
    return answers


async def ask(engine: Engine, name: str, statement: Statement) -> dict[str, Any]:
    """Take one step as the data plane does; return the answer, with how it was come by as `outcome`."""
    rollout = await engine.tasks.rollout("task", name)
    tool, sql = statement
    call = parse("POST", tool, "", orjson.dumps({"sql": sql}), rollout.tree.spec)
    key = call_key(call)
    record, outcome = engine.step.known(rollout, key), Outcome.HIT
    if record is None:
        answer = await engine.step.run(rollout, call, key)
        record, outcome = answer.record, answer.outcome
    body: dict[str, Any] = orjson.loads(engine.store.records.result(record).body)
    return body | {"outcome": outcome}
