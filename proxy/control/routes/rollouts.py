"""Routes of rollouts: begin, list, show, finish and fork them."""

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request

from proxy.control.routes.params import (
    ControlDep,
    EngineDep,
    NewName,
    RolloutName,
    TaskName,
    no_rollout,
    place_of,
    running,
)
from proxy.control.views.common import (
    RolloutDetail,
    RolloutView,
    rollout_view,
)
from proxy.control.views.resources import (
    NodeName,
)
from proxy.engine import Engine
from proxy.refusals import RefusalError
from proxy.tree.rollout import Rollout

router = APIRouter()


@router.post("/tasks/{task}/rollouts", status_code=201)
async def begin_rollout(engine: EngineDep, task: TaskName, request: Request, rollout: NewName) -> RolloutView:
    """Begin a rollout at the root. A first call under a new name does the same."""
    opened = await engine.tasks.open(task)
    begun = engine.tasks.begin(opened, rollout, opened.tree, opened.tree.root)
    engine.warm.note_step(begun)
    return RolloutView(**_shown(engine, begun, request))


@router.get("/tasks/{task}/rollouts")
async def list_rollouts(
    engine: EngineDep,
    task: TaskName,
    request: Request,
    offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
    limit: Annotated[int, Query(ge=1, le=100_000)] = 100_000,
    newest: Annotated[bool, Query(description="the latest first, instead of the oldest")] = False,
) -> list[RolloutView]:
    """List the rollouts of a task, oldest first, finished ones too."""
    found = await engine.tasks.find(task)
    engine.journal.fold()
    live = {rollout.id: rollout for rollout in found.rollouts.values()}
    rows = engine.store.rollouts.of_task(task, newest=newest, offset=offset, limit=limit)
    return [RolloutView(**rollout_view(row, str(request.base_url), live.get(row["id"]))) for row in rows]


@router.get("/tasks/{task}/rollouts/{rollout}")
async def get_rollout(
    control: ControlDep,
    task: TaskName,
    rollout: RolloutName,
    request: Request,
    offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> RolloutDetail:
    """Show a rollout, the latest of this name, with its calls in order and how each was answered."""
    engine = control.engine
    reader = control.reader
    found = await engine.tasks.find(task)
    engine.journal.fold()
    rows = engine.store.rollouts.of_task(task, name=rollout)
    if not rows:
        raise no_rollout(task, rollout)
    row = rows[-1]
    live = found.rollouts.get(rollout)
    tree = engine.trees.load(row["tree"])
    steps = reader.steps(row["id"], tree, offset=offset, limit=limit)
    return RolloutDetail(**rollout_view(row, str(request.base_url), live), steps=steps)


@router.delete("/tasks/{task}/rollouts/{rollout}", status_code=204)
async def finish_rollout(engine: EngineDep, task: TaskName, rollout: RolloutName) -> None:
    """Finish a rollout: its sandbox is free for others, its name for a new one."""
    await engine.tasks.finish(await running(engine, task, rollout))


@router.post("/tasks/{task}/rollouts/{rollout}/fork", status_code=201)
async def fork_rollout(
    engine: EngineDep,
    task: TaskName,
    rollout: RolloutName,
    request: Request,
    name: NewName,
    node: Annotated[NodeName | None, Body()] = None,
) -> RolloutView:
    """Begin a rollout where another stands, or at a node: for tree search."""
    source = await running(engine, task, rollout)
    found = await engine.tasks.find(task)
    tree, start = (source.tree, source.node) if node is None else place_of(engine, found, node)
    if start.detached:
        raise RefusalError(409, "forgotten", f"the state that rollout {rollout!r} stands at was forgotten.")
    begun = engine.tasks.begin(found, name, tree, start)
    engine.warm.note_step(begun)
    return RolloutView(**_shown(engine, begun, request))


def _shown(engine: Engine, rollout: Rollout, request: Request) -> dict[str, Any]:
    row = engine.store.rollouts.of_task(rollout.task, name=rollout.name)[-1]
    return rollout_view(row, str(request.base_url), rollout)
