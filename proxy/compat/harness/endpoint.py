"""The harness endpoint: `POST /t/{task}/r/{rollout}/harness` runs a rollout to its end and tells each turn."""

import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import AfterValidator, Field

from proxy.compat.endpoints import EndpointContext
from proxy.compat.harness.model import Model
from proxy.compat.harness.run import Run, entrance, harness_nodes, start_of
from proxy.compat.harness.turns import ENDPOINT, ModelResponse, response_of
from proxy.dialects.arguments import ToolArguments, checked_arguments
from proxy.dialects.base import json_object
from proxy.http.access import ALL, GRANT, Grant
from proxy.http.address import Address
from proxy.http.exchange import Exchange
from proxy.http.problems import failed_call
from proxy.http.sent_labels import labels_of
from proxy.refusals import Problem, RefusalError
from proxy.tree.task import Task
from proxy.tree.tree import Node, Tree
from sandboxes.http_message import is_header
from sandboxes.server_spec import Text, VariableName
from sandboxes.spec import EnvironmentSpec

_EXAMPLE = '{"upstream": "http://127.0.0.1:8000", "headers": {"authorization": "Bearer KEY"}}'


_UPSTREAM = re.compile(r"https?://[^\s/?#@]+(/[\x21\x24-\x3b\x3d\x40-\x7e]*)?")


def _upstream(url: str) -> str:
    if _UPSTREAM.fullmatch(url) is None:
        raise ValueError("write a URL such as http://gateway:8000/sessions/17, without a query")
    return url


class HarnessRequest(ToolArguments):
    """What a run needs; `command` and `env` override the spec's, and `parent` and `turn` say where it begins."""

    upstream: Annotated[str, Field(max_length=2048), AfterValidator(_upstream)]
    headers: dict[str, str] = Field(default_factory=dict, max_length=64)
    command: Annotated[Text, Field(min_length=1)] | None = None
    env: dict[VariableName, Text] = Field(default_factory=dict)
    parent: str | None = None
    turn: int | None = Field(default=None, ge=0)


class _RunStart(NamedTuple):
    """Where a rollout begins, the responses that lead from there to its turn, and what its start overrides."""

    task: Task
    tree: Tree
    node: Node
    recorded: list[ModelResponse]
    begin: Mapping[str, Any]


class HarnessEndpoint:
    """Serves the harness endpoint of all tasks."""

    def __init__(self, context: EndpointContext) -> None:
        self._context, self._count = context, context.count
        self._running: dict[tuple[str, str], Run] = {}

    async def serve(self, scope: Mapping[str, Any], address: Address, body: bytes, exchange: Exchange) -> None:
        """Run a rollout's harness, with an event for each turn as a line of JSON. Raises RefusalError if it cannot."""
        request = _read(scope["method"], body)
        grant: Grant = scope.get(GRANT, ALL)
        grant.require_rollout(address.rollout, request.parent or "")
        if not address.rollout:
            raise RefusalError(400, "no-rollout", "name the rollout in the URL: /t/{task}/r/{rollout}/harness.")
        name = (address.task, address.rollout)
        if (earlier := self._running.get(name)) is not None:
            await earlier.ended_if_cut()
        task, tree, node, recorded, begin = await self._place(address.task, address.rollout, request)
        # What is refused has begun no rollout. Nothing awaits from here to the begin: the place stays free.
        self._check(request, task.name, tree.spec)
        labels = labels_of(scope, scope["headers"])
        rollouts = self._context.tasks.rollouts
        rollout = task.rollouts.get(address.rollout) or rollouts.begin(task, address.rollout, tree, node, labels=labels)
        if name in self._running:
            raise RefusalError(409, "running", f"the harness of rollout {rollout.name!r} runs already.")
        run = Run(self._context, rollout, Model(request.upstream.rstrip("/"), request.headers), begin, recorded)

        async def content(send: Any) -> None:
            try:
                async with aclosing(run.events()) as events:
                    async for event in events:
                        await send(orjson.dumps(event) + b"\n")
            # The head of the response has been sent, so the problem is its last line.
            except Exception as error:  # noqa: BLE001
                problem = failed_call(scope, error, self._count)
                await send(orjson.dumps({"error": orjson.loads(problem.body())}) + b"\n")

        self._running[name] = run
        try:
            await exchange.stream((("content-type", "application/x-ndjson"),), content)
        finally:
            del self._running[name]

    async def refuse(self, scope: Mapping[str, Any], address: Address, problem: Problem, exchange: Exchange) -> None:  # noqa: ARG002 - every client reads the same form
        """Answer a request with a problem that was noticed before the request was read."""
        await exchange.problem(problem)

    def _check(self, request: HarnessRequest, task: str, spec: EnvironmentSpec) -> None:
        """Raise RefusalError or ForbiddenSourceError if an environment runs no such harness."""
        if spec.harness is None:
            raise RefusalError(404, "no-harness", f"task {task!r} has no harness. PUT it with one in its spec.")
        if request.parent is not None and (request.command or request.env):
            raise RefusalError(422, "harness", "a branch has its parent's agent: leave `command` and `env` out.")
        if request.parent is None and not (request.command or spec.harness.command):
            raise RefusalError(422, "harness", "the task's harness has no command: send one with the request.")
        if spec.confined:
            self._context.settings.source_rules.check_url(request.upstream)

    async def _place(self, task_name: str, name: str, request: HarnessRequest) -> _RunStart:
        """Return where the request begins a rollout of this name, or goes on with the one that runs."""
        tasks = self._context.tasks
        if request.parent is None:
            task = await tasks.open(task_name)
            task = task if name in task.rollouts else await tasks.current(task)
            tree = (task.rollouts.get(name) or task).tree
            return _RunStart(
                task, tree, tree.root, [], request.model_dump(include={"command", "env"}, exclude_defaults=True)
            )
        task = await tasks.find(task_name)
        tree, node = self._position(task_name, request.parent)
        nodes = await harness_nodes(self._context, node)
        turn = len(nodes) - 1 if request.turn is None else request.turn
        if not 0 <= turn < len(nodes):
            raise RefusalError(404, "no-such-turn", f"rollout {request.parent!r} has no turn {turn}.")
        begin = start_of(self._context, nodes)
        if (running := task.rollouts.get(name)) is not None:
            made = await harness_nodes(self._context, running.node)
            return _RunStart(task, running.tree, running.node, self._rest(name, made, nodes[: turn + 1]), begin)
        entered, responses = entrance(self._context, nodes, turn)
        return _RunStart(task, tree, entered or tree.root, responses, begin)

    def _rest(self, name: str, made: Sequence[Node], shared: Sequence[Node]) -> list[ModelResponse]:
        """Return what the model is still to say in a run that was cut off, so that it comes to its parent's turn."""
        call_of = self._context.store.records.call
        calls = [[call_of(node.origin) for node in nodes if node.origin is not None] for nodes in (made, shared)]
        if any(one.arguments.get("said") != other.arguments.get("said") for one, other in zip(*calls, strict=False)):
            raise RefusalError(
                409, "rollout-exists", f"rollout {name!r} is running and began otherwise. Choose another name."
            )
        responses = map(response_of, calls[1][len(made) :])
        return [response for response in responses if response is not None]

    def _position(self, task_name: str, name: str) -> tuple[Tree, Node]:
        context = self._context
        if (running := context.tasks.rollouts.running.get((task_name, name))) is not None:
            return running.tree, running.node
        context.journal.fold()
        task = context.tasks.get(task_name)
        rows = context.store.rollouts.of_task(task_name, name=name, newest=True, limit=1)
        position = context.tasks.position(task, rows[0]["node"]) if rows and task is not None else None
        if position is None:
            raise RefusalError(404, "no-such-rollout", f"there is no rollout {name!r} whose turns could be entered.")
        return position


def _read(method: str, body: bytes) -> HarnessRequest:
    if method != "POST":
        raise RefusalError(405, "method", f"send POST, with a body such as {_EXAMPLE}.")
    request = checked_arguments(ENDPOINT, HarnessRequest, json_object(body, _EXAMPLE))
    if not all(is_header(name, value) for name, value in request.headers.items()):
        raise RefusalError(422, "harness", "a header has characters that no header may have.")
    return request
