"""Routes of scratch forks: compare two states, try a call at a node, open a terminal at a node."""

import asyncio
import contextlib
from typing import Annotated, Any

import orjson
from fastapi import Query, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, Field, model_validator

from proxy.control.parts import ControlPlane
from proxy.control.routes.params import ControlDep, NodePath, PositionDep, TaskDep, TaskName, api_router, position_of
from proxy.control.scratch_forks import call_of
from proxy.control.state_diff import diff
from proxy.control.views.answers import AnswerView, answer_view
from proxy.control.views.diff import DiffView
from proxy.control.views.nodes import ResourcesView
from proxy.control.views.resources import NodeName, node_name
from proxy.dialects.base import Call
from proxy.dialects.shell import ExecArguments
from proxy.http.problems import problem_of
from proxy.refusals import RefusalError
from sandboxes.driver import Sandbox, execute
from sandboxes.inspection import Terminal, TerminalSandbox
from sandboxes.spec import EnvironmentSpec
from sandboxes.task_owner import start

_TYPED_BYTES = 1 << 20
"""Longest input that a terminal takes in one message; the rest of the message is dropped."""
_MAX_SIZE = 1000
"""Largest width and height of a terminal, in characters."""
_SIZE = {"ge": 1, "le": _MAX_SIZE}


router = api_router("scratch forks")


class Trial(ExecArguments):
    """A call to try: a shell command with the options of `exec`, or any request to an endpoint of the task.

    Attributes:
        command: The shell command; null for a request.
        endpoint: The endpoint of the request; null for a command.
        path: Path of the request below the endpoint.
        body: Body of the request: JSON, or a string that is sent as it is.
    """

    command: str | None = Field(default=None, min_length=1)  # type: ignore[assignment]
    endpoint: str | None = Field(default=None, pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,62}$")
    method: str = Field(default="POST", pattern=r"^[A-Z]{1,16}$")
    path: str = Field(default="", max_length=4096)
    query: dict[str, str] = Field(default_factory=dict)
    body: Any = None

    @model_validator(mode="after")
    def _require_command_or_endpoint(self) -> "Trial":
        if (self.command is None) == (self.endpoint is None):
            raise ValueError("give either `command`, or `endpoint` with `path` and `body`")
        return self

    def call(self, spec: EnvironmentSpec) -> Call:
        """Return the tool call. Raises RefusalError if the request is malformed, or is not a tool call."""
        if self.command is not None:
            body = self.model_dump_json(include=set(ExecArguments.model_fields)).encode()
            return call_of(spec, "shell", "POST", "exec", {}, body)
        assert self.endpoint is not None
        body = b"" if self.body is None else self.body.encode() if isinstance(self.body, str) else _json(self.body)
        return call_of(spec, self.endpoint, self.method, self.path, self.query, body)


def _json(body: Any) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise RefusalError(422, "body", f"the body cannot be sent as JSON: {error}.") from None


class TrialView(BaseModel):
    """The result of a tried call.

    Attributes:
        node: The node that the call was tried at.
        effect: What the call changed in the fork.
        known: Whether the tree has a record of the call at this node.
        leads_to: The node that this record leads to; null if there is no record.
        resources: What the call used of the machine; null if nothing is known.
    """

    node: NodeName
    answer: AnswerView
    effect: list[str]
    seconds: float
    known: bool
    leads_to: NodeName | None
    resources: ResourcesView | None = None


@router.get("/tasks/{task}/nodes/{a}/diff/{b}")
async def get_diff(control: ControlDep, task: TaskDep, a: NodePath, b: NodePath) -> DiffView:
    """Show what changed from node a to node b: files, shell sessions and databases."""
    (tree, before), (other_tree, after) = (position_of(control, task, name) for name in (a, b))
    if tree is not other_tree:
        detail = f"nodes {a} and {b} are in different trees of the task. Compare two nodes of the same tree."
        raise RefusalError(409, "other-tree", detail)
    return await diff(control.scratch_forks, task.name, tree, before, after)


@router.post("/tasks/{task}/nodes/{node}/exec", name="execute_at_node")
async def try_call(control: ControlDep, position: PositionDep, trial: Trial) -> TrialView:
    """Run a call in a scratch fork of a node. The tree stays as it is, and nothing is recorded."""
    tree, at_node = position
    call = trial.call(tree.spec)
    async with control.scratch_forks.at(tree, at_node) as sandbox:
        execution = await execute(sandbox, call.call, None)
    record = at_node.records.get(call.key)
    return TrialView(
        node=node_name(at_node),
        answer=answer_view(execution.result),
        effect=execution.effect.names,
        seconds=execution.seconds,
        known=record is not None,
        leads_to=None if record is None else node_name(record.target),
        resources=ResourcesView.of(execution.resources),
    )


@router.websocket("/tasks/{task}/nodes/{node}/terminal")
async def terminal(
    control: ControlDep,
    websocket: WebSocket,
    task: TaskName,
    node: NodePath,
    columns: Annotated[int, Query(**_SIZE)] = 80,
    rows: Annotated[int, Query(**_SIZE)] = 24,
) -> None:
    """Open a terminal in a scratch fork of a node: bytes both ways, `{"resize": [columns, rows]}` as text."""
    # A page with a token offers the protocols `forkpoint` and its token. A browser fails if neither is accepted.
    await websocket.accept("forkpoint" if "forkpoint" in websocket.scope["subprotocols"] else None)
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        try:
            known = await control.tasks.find(task)
            tree, at_node = position_of(control, known, node)
            async with control.scratch_forks.at(tree, at_node) as sandbox:
                opened = await _open(sandbox, tree.spec.driver, columns, rows)
                try:
                    await _forward(websocket, opened, control)
                finally:
                    opened.close()
            await websocket.send_text('{"exit": "the shell has ended"}')
            await websocket.close(1000)
        except WebSocketDisconnect:
            raise
        except Exception as error:  # noqa: BLE001 - every error becomes a message to the client
            problem = problem_of(error)
            if problem.infrastructure:
                control.counts.failure(problem.slug)
            await websocket.send_text(problem.body().decode())
            await websocket.close(4000 + problem.status)


async def _open(sandbox: Sandbox, driver: str, columns: int, rows: int) -> Terminal:
    if not isinstance(sandbox, TerminalSandbox):
        raise RefusalError(
            409, "no-terminal", f"driver {driver!r} offers no terminals. Use POST …/exec for single calls."
        )
    return await sandbox.open_terminal(columns, rows)


async def _forward(websocket: WebSocket, terminal: Terminal, control: ControlPlane) -> None:
    ends = {
        start(_send_output(websocket, terminal)),
        start(_receive_input(websocket, terminal)),
        start(control.lifecycle.closing.wait()),
    }
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def _send_output(websocket: WebSocket, terminal: Terminal) -> None:
    while data := await terminal.read():
        await websocket.send_bytes(data)


async def _receive_input(websocket: WebSocket, terminal: Terminal) -> None:
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1000))
        if message.get("bytes") is not None:
            await terminal.write(message["bytes"][:_TYPED_BYTES])
        elif message.get("text") is not None:
            _resize(terminal, message["text"])


def _resize(terminal: Terminal, text: str) -> None:
    with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        columns, rows = orjson.loads(text)["resize"]
        if isinstance(columns, int) and isinstance(rows, int):
            terminal.resize(min(max(columns, 1), _MAX_SIZE), min(max(rows, 1), _MAX_SIZE))
