"""Parameters and dependencies that the routes share: names in paths, and the objects that they name."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Path, Query
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection

from proxy.control.browsing import OwnPart, own_part, own_rows
from proxy.control.parts import ControlPlane
from proxy.control.views.resources import NodeName
from proxy.http.access import ALL, GRANT, Grant
from proxy.names import NAME_PATTERN
from proxy.refusals import RefusalError
from proxy.tree.labels import MAX_LABELS, checked
from proxy.tree.rollout import Rollout
from proxy.tree.task import Task
from proxy.tree.tree import Node, Tree
from sandboxes.spec import EnvironmentSpec

TaskName = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the task.")]
TaskQuery = Annotated[str | None, Query(pattern=NAME_PATTERN, description="Only those of this task.")]
RolloutName = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the rollout.")]
NodePath = Annotated[NodeName, Path(description="Name of a node, such as n12, as the header X-Forkpoint-Node has it.")]
RootQuery = Annotated[
    NodeName | None,
    Query(description="Selects a tree of the task by its root or any of its nodes. Default: the current tree."),
]
NewName = Annotated[str, Body(pattern=NAME_PATTERN, embed=True)]
NewLabels = Annotated[
    dict[str, Any] | None,
    Body(embed=True, description="Labels of the rollout by name.", examples=[{"run": "r7", "step": 3}]),
]
LabelQuery = Annotated[
    list[str] | None,
    Query(max_length=MAX_LABELS, description="Only rollouts with this label, such as `run=r7`. It may be repeated."),
]
OwnQuery = Annotated[
    bool, Query(description="Whether to show only what this task's rollouts did, in a tree that tasks share.")
]


async def control_of(connection: HTTPConnection) -> ControlPlane:
    """Return the application's control plane. It is a coroutine because FastAPI runs plain functions in threads."""
    control: ControlPlane = connection.app.state.control
    return control


ControlDep = Annotated[ControlPlane, Depends(control_of)]


async def known_task(control: ControlDep, task: TaskName) -> Task:
    """Return the task that the path names. An unknown one is refused with status 404."""
    return await control.tasks.find(task)


TaskDep = Annotated[Task, Depends(known_task)]


async def selected_tree(control: ControlDep, task: TaskDep, root: RootQuery = None) -> Tree:
    """Return the tree of the task that `root` selects."""
    return tree_of(control, task, root)


async def position_in_path(control: ControlDep, task: TaskDep, node: NodePath) -> tuple[Tree, Node]:
    """Return the node that the path names, with its tree."""
    return position_of(control, task, node)


async def require_whole(connection: HTTPConnection) -> None:
    """Refuse a token that does not see the whole proxy."""
    granted(connection).require_whole()


TreeDep = Annotated[Tree, Depends(selected_tree)]
PositionDep = Annotated[tuple[Tree, Node], Depends(position_in_path)]
WHOLE = Depends(require_whole)
"""For `dependencies` of a route that shows or changes more than one task."""

PROBLEM: dict[str, Any] = {
    "description": "Problem details (RFC 9457): type, title, status, detail.",
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


def operation_id(route: APIRoute) -> str:
    """Return the name of a route's operation. Generated clients name their functions after it, so it never changes."""
    return route.name


def api_router(tag: str, path: str = "", *dependencies: Any) -> APIRouter:
    """Return a router below `/api/v1`; an application takes its routes as they are.

    The routes of an included router would be built again, twice for each application: half of the CPU of its start.
    """
    return APIRouter(
        prefix=f"/api/v1{path}", tags=[tag], responses={"4XX": PROBLEM, "5XX": PROBLEM}, dependencies=dependencies,
        generate_unique_id_function=operation_id,
    )  # fmt: skip


async def own_of(control: ControlPlane, task: Task, tree: Tree) -> OwnPart:
    """Return what a task's rollouts did in a tree that tasks share."""
    return own_part(tree, await control.read(partial(own_rows, task=task.name, tree=tree.id)))


def granted(request: HTTPConnection) -> Grant:
    """Return which tasks the request's token may access."""
    grant: Grant = request.scope.get(GRANT, ALL)
    return grant


def confined(request: HTTPConnection, spec: EnvironmentSpec) -> EnvironmentSpec:
    """Return a spec as the request's token may have it: one that sees some tasks only names allowed sources only."""
    return spec if granted(request).whole else spec.model_copy(update={"confined": True})


def wanted_labels(queried: list[str] | None) -> dict[str, str]:
    """Return the labels that a query asks for. Raises RefusalError (422) if one is no label."""
    pairs = [text.partition("=") for text in queried or ()]
    if not all(separator for _, separator, _ in pairs):
        raise RefusalError(422, "labels", "write a label as run=r7.")
    return checked({name: value for name, _, value in pairs})


def position_of(control: ControlPlane, task: Task, name: str) -> tuple[Tree, Node]:
    """Return a node of any of a task's trees, with its tree. Raises RefusalError (404) if there is no such node."""
    position = control.tasks.position(task, int(name[1:]))
    if position is None:
        detail = f"task {task.name!r} has no node {name}. GET …/tree lists its nodes, GET …/trees its other trees."
        raise RefusalError(404, "no-such-node", detail)
    return position


def tree_of(control: ControlPlane, task: Task, root: str | None) -> Tree:
    """Return a task's tree with this root or node, or its current tree. Raises RefusalError (404) without one."""
    return task.tree if root is None else position_of(control, task, root)[0]


async def running(control: ControlPlane, task: str, name: str) -> Rollout:
    """Return a running rollout. Raises RefusalError if there is none (404), or its position is lost (409)."""
    await control.tasks.find(task)
    rollout = await control.tasks.running(task, name)
    if rollout is None:
        raise no_rollout(task, name)
    return rollout


def no_rollout(task: str, name: str) -> RefusalError:
    """Return the refusal of a name that no running rollout has."""
    return RefusalError(
        404, "no-such-rollout", f"no rollout {name!r} runs in task {task!r}. GET …/rollouts lists them."
    )
