"""One run of a harness: turn by turn, until it ends.

A turn that the tree knows needs no sandbox: its answer has the next request. Any other turn runs in the sandbox, which
waits frozen while the model works. Its state is kept meanwhile, because no replay would ever reach it again.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from proxy.compat.endpoints import EndpointContext
from proxy.compat.harness import turns
from proxy.compat.harness.model import Model
from proxy.compat.harness.turns import ModelResponse, Path
from proxy.execution.step_notes import Answer
from proxy.tree.rollout import Outcome, Rollout
from proxy.tree.tree import Node, Record
from sandboxes.calls import ToolCall
from sandboxes.errors import NotFreezableError, SandboxError
from sandboxes.task_owner import start

SLOW_S = 10.0
"""A turn that took longer is one of those that `slow` keeps."""
_AT_ONCE = 200
"""How many turns are looked up before the event loop goes on with other work: some milliseconds."""


async def harness_nodes(context: EndpointContext, node: Node) -> list[Node]:
    """Return the nodes at the ends of the turns from the root to a node. 20 us for each call of the path."""
    nodes = []
    while (origin := node.origin) is not None:
        if context.store.records.call_without_upload(origin.call).endpoint == turns.ENDPOINT:
            nodes.append(node)
        node = origin.source
        # Paths of ten thousand calls must not keep hits waiting.
        if len(nodes) % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    return nodes[::-1]


async def path_to(context: EndpointContext, node: Node) -> Path:
    """Return the turns from the root to a node. Raises DamagedError if an answer is damaged."""
    nodes, records = await harness_nodes(context, node), context.store.records
    begin = len(nodes)
    # Before a response without others, one request had waited: what was asked earlier has had its response.
    while begin > 0:
        begin -= 1
        if not records.call_without_upload(_origin(nodes[begin]).call).arguments.get("others", True):
            break
    path = Path(turns=begin - 1)
    for reached in nodes[begin:]:
        origin = _origin(reached)
        path.advance(records.call_without_upload(origin.call), records.result(origin).body)
    return path


def entrance(context: EndpointContext, nodes: Sequence[Node], turn: int) -> tuple[Node | None, list[ModelResponse]]:
    """Return the nearest kept turn (None: the root) on the way to a turn, and the responses that lead on from there."""
    at = next((number for number in range(turn, -1, -1) if nodes[number].snapshot is not None), -1)
    calls = [context.store.records.call(_origin(node)) for node in nodes[at + 1 : turn + 1]]
    responses = [turns.response_of(call) for call in calls]
    return (nodes[at] if at >= 0 else None), [response for response in responses if response is not None]


def start_of(context: EndpointContext, nodes: Sequence[Node]) -> Mapping[str, Any]:
    """Return what the start of the harness on a path has overridden: a branch that starts it once more does so too."""
    call = context.store.records.call(_origin(nodes[0]))
    return call.arguments if call.tool == "start" else {}


def _origin(node: Node) -> Record:
    assert node.origin is not None, "a turn ends at no root"
    return node.origin


class Run:
    """Takes one rollout from where it stands to the end of its harness."""

    def __init__(
        self,
        context: EndpointContext,
        rollout: Rollout,
        model: Model,
        begin: Mapping[str, Any],
        recorded: Sequence[ModelResponse] = (),
    ) -> None:
        """Prepare a run. `begin` overrides the spec's command and variables; `recorded` answers before the model."""
        self._context, self._rollout, self._model, self._begin = context, rollout, model, begin
        self._recorded = deque(recorded)
        self._path = Path()
        self._is_cut = False
        self._ended = asyncio.Event()

    async def ended_if_cut(self) -> None:
        """Wait until the turn of a run that was cut off is done and its state is kept. Others are not waited for."""
        if self._is_cut:
            await self._ended.wait()

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield an event for each turn, and one for the end. Errors are those of a call, and RefusalError (502)."""
        node = self._rollout.node
        self._path = await path_to(self._context, node)
        # A run that was cut off may have left the state of its last turn in a sandbox alone.
        keeping = start(self._keep(node)) if self._path.turns >= 0 and self._is_kept(node) else None
        turn: asyncio.Task[Answer] | None = None
        try:
            while self._path.exit is None:
                began = time.perf_counter()
                response = await self._response() if self._path.waiting else None
                if response is None:
                    call, key = turns.without_response(self._path, self._begin)
                else:
                    # In a thread: the text of a long response is looked through.
                    call, key = await asyncio.to_thread(turns.delivery, self._path, response)
                model_s = time.perf_counter() - began
                # Shielded: a run that is cut off here must not take the state with it that is being kept.
                not_kept = "" if keeping is None else await asyncio.shield(keeping)
                # A turn that was cut off goes on to its end.
                turn = start(self._context.step.run(self._rollout, call, key))
                answer = await asyncio.shield(turn)
                if not self._is_of(answer, call):
                    # In a cluster, a request that another owner has begun to answer gets the steps from then first.
                    self._recorded.extendleft([] if response is None else [response])
                    continue
                self._path.advance(call, self._context.answers.of(answer.record).body)
                keeping = self._keeping(answer)
                yield self._event(answer, model_s, not_kept)
        except (asyncio.CancelledError, GeneratorExit):
            self._is_cut = True
            if turn is not None and not turn.done():
                keeping = self._keeping(await turn)
            raise
        finally:
            if keeping is not None:
                await asyncio.shield(keeping)
            self._ended.set()
        yield {"exit": self._path.exit["code"], "log": self._path.exit["log"], "turns": self._path.turns}

    async def _response(self) -> ModelResponse:
        """Return what the model says next: what was recorded comes first."""
        return self._recorded.popleft() if self._recorded else await self._model.respond(self._path.waiting[0])

    def _is_of(self, answer: Answer, call: ToolCall) -> bool:
        """Return whether an answer is that of a call. No two turns of a path deliver to one connection."""
        made = self._context.store.records.call_without_upload(answer.record.call)
        return made.tool == call.tool and made.arguments.get("connection") == call.arguments.get("connection")

    def _is_kept(self, node: Node) -> bool:
        """Return whether the state after a turn is to be kept: its sandbox goes on, and then it would be lost."""
        harness, turn, origin = self._rollout.tree.spec.harness, self._path.turns, node.origin
        if harness is None or origin is None or node.snapshot is not None or node.unfreezable:
            return False
        # Files alone, mostly: what follows, such as grading, can only be shared from there.
        return self._path.exit is not None or any(
            rule == "all"
            or (rule == "first" and turn == 0)
            or (rule == "slow" and origin.seconds > SLOW_S)
            or (rule.startswith("every ") and turn % int(rule[6:]) == 0)
            for rule in harness.keep
        )

    def _keeping(self, answer: Answer) -> asyncio.Task[str] | None:
        is_kept = answer.outcome is not Outcome.HIT and self._is_kept(answer.record.target)
        return start(self._keep(answer.record.target)) if is_kept else None

    async def _keep(self, node: Node) -> str:
        """Keep the state after a turn while the model works; return why it could not be kept, or nothing."""
        try:
            await self._context.restorer.take_snapshot(self._rollout.tree, node)
        except (NotFreezableError, SandboxError) as error:
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
