"""What the routes of the control plane have in common: the names in their paths, and what these stand for."""

from typing import Annotated, Any

from fastapi import Body, Depends, Path, Query
from starlette.requests import HTTPConnection

from proxy.control.parts import ControlPlane
from proxy.control.views.resources import NodeName
from proxy.engine import Engine
from proxy.http.access import ALL, GRANT, Grant
from proxy.names import NAME_PATTERN
from proxy.refusals import RefusalError
from proxy.tree.rollout import Rollout
from proxy.tree.task import Task
from proxy.tree.tree import Node, Tree

TaskName = Annotated[str, Path(pattern=NAME_PATTERN, description="a task's name")]
RolloutName = Annotated[str, Path(pattern=NAME_PATTERN, description="a rollout's name")]
NodePath = Annotated[NodeName, Path(description="a node as X-Forkpoint-Node names it, n12")]
RootQuery = Annotated[
    NodeName | None,
    Query(description="which of the task's trees: its root, or any node of it; the current one where it is left out"),
]
NewName = Annotated[str, Body(pattern=NAME_PATTERN, embed=True)]


async def control_of(connection: HTTPConnection) -> ControlPlane:
    """Return the application's control plane. A coroutine, because FastAPI runs plain functions in threads."""
    control: ControlPlane = connection.app.state.control
    return control


async def engine_of(connection: HTTPConnection) -> Engine:
    """Return the application's engine."""
    return (await control_of(connection)).engine


ControlDep = Annotated[ControlPlane, Depends(control_of)]
EngineDep = Annotated[Engine, Depends(engine_of)]

PROBLEM: dict[str, Any] = {
    "description": "problem details (RFC 9457): type, title, status, detail",
    "content": {
        "application/problem+json": {
            "schema": {
                "type": "object",
                "properties": {
                    "type": {"type": "string"},
                    "title": {"type": "string"},
                    "status": {"type": "integer"},
                    "detail": {"type": "string"},
                },
                "required": ["type", "title", "status", "detail"],
            }
        }
    },
}


def granted(request: HTTPConnection) -> Grant:
    """Return what a request may see."""
    grant: Grant = request.scope.get(GRANT, ALL)
    return grant


def place_of(engine: Engine, task: Task, name: str) -> tuple[Tree, Node]:
    """Return a node of any of a task's trees, with the tree.

    Raises:
        Refused: 404, there is none of this name.
    """
    found = engine.tasks.position(task, int(name[1:]))
    if found is None:
        detail = f"task {task.name!r} has no node {name}. GET …/tree lists them, GET …/trees its other trees."
        raise RefusalError(404, "no-such-node", detail)
    return found


def tree_of(engine: Engine, task: Task, root: str | None) -> Tree:
    """Return the tree of a task that a query means, its current one by default.

    Raises:
        Refused: 404, there is no such node.
    """
    return task.tree if root is None else place_of(engine, task, root)[0]


async def running(engine: Engine, task: str, name: str) -> Rollout:
    """Return a rollout that runs.

    Raises:
        Refused: 404, none of this name does.
    """
    rollout = (await engine.tasks.find(task)).rollouts.get(name)
    if rollout is None:
        raise no_rollout(task, name)
    return rollout


def no_rollout(task: str, name: str) -> RefusalError:
    return RefusalError(
        404, "no-such-rollout", f"no rollout {name!r} runs in task {task!r}. GET …/rollouts lists them."
    )


def standing(task: Task) -> dict[Node, list[str]]:
    """Return the names of the rollouts that run in a task, by where they stand."""
    found: dict[Node, list[str]] = {}
    for rollout in task.rollouts.values():
        found.setdefault(rollout.node, []).append(rollout.name)
    return found
