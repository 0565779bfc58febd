"""Routes into throw-away forks: what two states differ in, a call tried at a node, a terminal there."""

import asyncio
import contextlib
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, Field, model_validator

from proxy.control.routes.params import ControlDep, NodePath, TaskName, place_of
from proxy.control.scratch_forks import call_of, command_call
from proxy.control.state_diff import diff
from proxy.control.views.common import AnswerView, answer_view
from proxy.control.views.diff import DiffView
from proxy.control.views.resources import NodeName, node_name
from proxy.dialects.base import Call
from proxy.engine import Engine
from proxy.http.problems import problem_of
from proxy.refusals import RefusalError
from sandboxes.driver import Sandbox, execute
from sandboxes.inspection import Terminal, TerminalSandbox
from sandboxes.spec import EnvironmentSpec

_TYPED_BYTES = 1 << 20
_SIZE = {"ge": 1, "le": 1000}


router = APIRouter()


class Trial(BaseModel):
    """A call to try: a shell command, or any request to an endpoint of the task. body: JSON, or text as it is."""

    command: str | None = Field(default=None, min_length=1)
    session: str = "main"
    timeout_s: float | None = Field(default=None, gt=0, le=86_400)
    endpoint: str | None = Field(default=None, pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,62}$")
    method: str = Field(default="POST", pattern=r"^[A-Z]{1,16}$")
    path: str = Field(default="", max_length=4096)
    query: dict[str, str] = Field(default_factory=dict)
    body: Any = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "Trial":
        if (self.command is None) == (self.endpoint is None):
            raise ValueError("give `command`, or `endpoint` with `path` and `body`")
        return self

    def call(self, spec: EnvironmentSpec) -> Call:
        """Return the call.

        Raises:
            Refused: it is none, or cannot be read.
        """
        if self.command is not None:
            return command_call(spec, self.command, self.session, self.timeout_s)
        assert self.endpoint is not None
        body = b"" if self.body is None else self.body.encode() if isinstance(self.body, str) else _json(self.body)
        return call_of(spec, self.endpoint, self.method, self.path, self.query, body)


def _json(body: Any) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise RefusalError(422, "body", f"the body is no JSON that can be sent: {error}.") from None


class TrialView(BaseModel):
    """What a call would be answered at a node now. known: the tree has an answer to it; leads_to: where that leads."""

    node: NodeName
    answer: AnswerView
    effect: list[str]
    seconds: float
    known: bool
    leads_to: NodeName | None


@router.get("/tasks/{task}/nodes/{a}/diff/{b}")
async def get_diff(control: ControlDep, task: TaskName, a: NodePath, b: NodePath) -> DiffView:
    """Show what changed from one state to another: files, shell sessions, databases."""
    engine = control.engine
    found = await engine.tasks.find(task)
    (tree, one), (other_tree, other) = place_of(engine, found, a), place_of(engine, found, b)
    if tree is not other_tree:
        detail = f"{a} and {b} lie in different trees of the task, over different root states. Compare two of one tree."
        raise RefusalError(409, "other-tree", detail)
    return await diff(control.scratch_forks, task, tree, one, other)


@router.post("/tasks/{task}/nodes/{node}/exec")
async def try_call(control: ControlDep, task: TaskName, node: NodePath, trial: Trial) -> TrialView:
    """Run a call in a throw-away fork of a node. The tree is not touched, and nothing is recorded."""
    engine = control.engine
    found = await engine.tasks.find(task)
    tree, here = place_of(engine, found, node)
    call = trial.call(tree.spec)
    async with control.scratch_forks.at(tree, here) as sandbox:
        execution = await execute(sandbox, call.call, None)
    known = here.records.get(call.key)
    return TrialView(
        node=node,
        answer=answer_view(execution.result),
        effect=execution.effect.names,
        seconds=execution.seconds,
        known=known is not None,
        leads_to=None if known is None else node_name(known.target),
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
    """Open a terminal in a throw-away fork of a node: bytes both ways, `{"resize": [columns, rows]}` as text."""
    engine = control.engine
    # A page that has a token offers both names, and would take no other answer.
    await websocket.accept("forkpoint" if "forkpoint" in websocket.scope["subprotocols"] else None)
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        try:
            found = await engine.tasks.find(task)
            tree, here = place_of(engine, found, node)
            async with control.scratch_forks.at(tree, here) as sandbox:
                opened = await _open(sandbox, tree.spec.driver, columns, rows)
                try:
                    await _pass(websocket, opened, engine)
                finally:
                    opened.close()
            await websocket.send_text('{"exit": "the shell has ended"}')
            await websocket.close(1000)
        except WebSocketDisconnect:
            raise
        except Exception as error:  # noqa: BLE001 - a request ends here
            problem = problem_of(error)
            if problem.infrastructure:
                engine.counts.failure(problem.slug)
            await websocket.send_text(problem.body().decode())
            await websocket.close(4000 + problem.status)


async def _open(sandbox: Sandbox, driver: str, columns: int, rows: int) -> Terminal:
    if not isinstance(sandbox, TerminalSandbox):
        raise RefusalError(
            409,
            "no-terminal",
            f"sandboxes of driver {driver!r} open no terminals. POST …/exec runs single calls there.",
        )
    return await sandbox.open_terminal(columns, rows)


async def _pass(websocket: WebSocket, terminal: Terminal, engine: Engine) -> None:
    """Pass bytes both ways until the shell ends or the client goes away."""
    ends = {
        asyncio.create_task(_shown(websocket, terminal)),
        asyncio.create_task(_typed(websocket, terminal)),
        asyncio.create_task(engine.lifecycle.closing.wait()),
    }
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def _shown(websocket: WebSocket, terminal: Terminal) -> None:
    while data := await terminal.read():
        await websocket.send_bytes(data)


async def _typed(websocket: WebSocket, terminal: Terminal) -> None:
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1000))
        if message.get("bytes") is not None:
            await terminal.write(message["bytes"][:_TYPED_BYTES])
        elif message.get("text") is not None:
            _resize(terminal, message["text"])


def _resize(terminal: Terminal, text: str) -> None:
    """Take a wish to resize; anything else is ignored."""
    with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        columns, rows = orjson.loads(text)["resize"]
        if isinstance(columns, int) and isinstance(rows, int):
            terminal.resize(min(max(columns, 1), 1000), min(max(rows, 1), 1000))
