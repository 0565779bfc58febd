"""One run of a harness: turn by turn, until it ends.

A turn that the tree knows needs no sandbox: its answer has the next request. Any other turn runs in the sandbox, which
waits frozen while the model works. Its state is kept meanwhile, because no replay would ever reach it again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from proxy.compat.harness import turns
from proxy.compat.harness.model import Model
from proxy.compat.harness.turns import Path
from proxy.engine import Engine
from proxy.execution.step_notes import Answer
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Node
from sandboxes.errors import NotFreezableError
from sandboxes.task_owner import start

SLOW_S = 10.0
"""A turn that took longer is one of those that `slow` keeps."""


def path_to(engine: Engine, node: Node) -> Path:
    """Return the turns from the root to a node. It reads their answers. Raises DamagedError if one is damaged."""
    records, path = [], Path()
    while (origin := node.origin) is not None:
        records.append(origin)
        node = origin.source
    for record in reversed(records):
        call = engine.store.records.call(record)
        if call.endpoint == turns.ENDPOINT:
            path.advance(call, engine.store.records.result(record).body)
    return path


def node_at(engine: Engine, node: Node, turn: int) -> Node | None:
    """Return the node on the path to another one at which the harness has had so many responses; None without one."""
    nodes = []
    while (origin := node.origin) is not None:
        if engine.store.records.call(origin).endpoint == turns.ENDPOINT:
            nodes.append(node)
        node = origin.source
    nodes.reverse()
    return nodes[turn] if turn < len(nodes) else None


class Run:
    """Takes one rollout from where it stands to the end of its harness."""

    def __init__(self, engine: Engine, rollout: Rollout, model: Model, begin: Mapping[str, Any]) -> None:
        """Read where a rollout stands. `begin` has a command and variables in place of the spec's; mostly nothing."""
        self._engine, self._rollout, self._model, self._begin = engine, rollout, model, begin
        self._path = path_to(engine, rollout.node)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield an event for each turn, and one for the end. Errors are those of a call, and RefusalError (502)."""
        keeping: asyncio.Task[str] | None = None
        try:
            while self._path.exit is None:
                began = time.perf_counter()
                if self._path.waiting:
                    response = await self._model.respond(self._path.waiting[0])
                    # In a thread: the text of a long response is looked through.
                    call, key = await asyncio.to_thread(turns.delivery, self._path, response)
                else:
                    call, key = turns.without_response(self._path, self._begin)
                model_s = time.perf_counter() - began
                not_kept = "" if keeping is None else await keeping
                answer = await self._engine.step.run(self._rollout, call, key)
                body = self._engine.answers.of(answer.record).body
                self._path.advance(call, body)
                keeping = start(self._keep(answer)) if self._is_kept(answer) else None
                yield self._event(answer, model_s, not_kept)
        finally:
            if keeping is not None:
                await asyncio.shield(keeping)
        yield {"exit": self._path.exit["code"], "log": self._path.exit["log"], "turns": self._path.turns}

    def _is_kept(self, answer: Answer) -> bool:
        """Return whether the state after a turn is to be kept: its sandbox goes on, and then it would be lost."""
        harness, turn = self._rollout.tree.spec.harness, self._path.turns
        assert harness is not None
        if answer.outcome is Outcome.HIT or answer.record.target.snapshot is not None or self._path.exit is not None:
            return False
        return any(
            rule == "all"
            or (rule == "first" and turn == 0)
            or (rule == "slow" and answer.record.seconds > SLOW_S)
            or (rule.startswith("every ") and turn % int(rule[6:]) == 0)
            for rule in harness.keep
        )

    async def _keep(self, answer: Answer) -> str:
        """Keep the state after a turn while the model works; return why it could not be kept, or nothing."""
        try:
            await self._engine.restorer.take_snapshot(self._rollout.tree, answer.record.target)
        except NotFreezableError as error:
            return str(error)
        return ""

    def _event(self, answer: Answer, model_s: float, not_kept: str) -> dict[str, Any]:
        record = answer.record
        event = {
            "turn": self._path.turns,
            "node": f"n{record.target.id}",
            "outcome": answer.outcome.name.lower(),
            "seconds": round(record.seconds, 6),
            "model_s": round(model_s, 6),
            "waiting": len(self._path.waiting),
        }
        return event | ({"not_kept": not_kept} if not_kept else {})
