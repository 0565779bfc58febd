"""Routes of rollouts: begin, list, show, finish and fork them."""

import asyncio
import json
import secrets
import time
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Body, Query, Request

from proxy.control.paging import ListQuery, Page, list_query
from proxy.control.parts import ControlPlane
from proxy.control.reasons import WhyView, reasons
from proxy.control.routes import params
from proxy.control.routes.params import api_router
from proxy.control.views.resources import NodeName
from proxy.control.views.rollouts import RolloutDetail, RolloutView, rollout_view
from proxy.http.sent_labels import OWNER, owned
from proxy.refusals import RefusalError
from proxy.storage.rollout_lists import RolloutFilters, RolloutIndex
from proxy.tree.labels import Labels, changed, checked, inherited
from proxy.tree.rollout import Rollout
from proxy.tree.task import Task
from proxy.tree.tree import Node, Tree

router = api_router("rollouts")


@router.post("/tasks/{task}/rollouts", status_code=201)
async def begin_rollout(
    control: params.ControlDep,
    task: params.TaskName,
    request: Request,
    rollout: params.NewName,
    labels: params.NewLabels = None,
) -> RolloutView:
    """Begin a rollout at the root. The first call of a new rollout does the same."""
    known = await control.tasks.open(task)
    return begin(control, known, rollout, known.tree, known.tree.root, request, checked(labels or {}))


@router.get("/tasks/{task}/rollouts")
async def list_rollouts(
    control: params.ControlDep,
    task: params.TaskDep,
    request: Request,
    wanted: Annotated[ListQuery, list_query("created_at", "rollout", default="created_at")],
    label: params.LabelQuery = None,
    finished: Annotated[
        bool | None, Query(description="Only rollouts that have ended (true), or that have not (false).")
    ] = None,
) -> Page[RolloutView]:
    """List the rollouts of a task, those that have ended too."""
    filters = RolloutFilters(params.wanted_labels(label), finished)
    # Rollouts are numbered as they begin, and two of one time keep their order.
    by_name = wanted.key == "rollout"
    end, values = wanted.sql("name", "id") if by_name else wanted.sql("id")
    control.journal.fold()
    index = RolloutIndex.NAME if by_name else RolloutIndex.BEGUN
    rows, total = await asyncio.to_thread(control.store.rollout_lists.part, task.name, index, end, values, filters)
    part = wanted.part(rows, total, lambda row: (row["name"], row["id"]) if by_name else (row["id"],))
    live = {rollout.id: rollout for rollout in task.rollouts.values()}
    return part.page(lambda row: RolloutView(**_view(control, row, live.get(row["id"]), request)))


@router.get("/tasks/{task}/rollouts/{rollout}")
async def get_rollout(
    control: params.ControlDep,
    task: params.TaskDep,
    rollout: params.RolloutName,
    request: Request,
    wanted: Annotated[ListQuery, list_query("turn", default="turn")],
) -> RolloutDetail:
    """Show the newest rollout of this name, with its calls in order and how each was answered."""
    control.journal.fold()
    row = _newest(control, task.name, rollout)
    steps = control.reader.steps(row, control.trees.load(row["tree"]), wanted)
    view, marks = _view(control, row, task.rollouts.get(rollout), request), control.reader.marks(row)
    return RolloutDetail(**view, steps=steps, marks=marks)


@router.get("/tasks/{task}/rollouts/{rollout}/why", name="explain_calls")
async def explain(
    control: params.ControlDep,
    task: params.TaskDep,
    rollout: params.RolloutName,
    wanted: Annotated[ListQuery, list_query("turn", default="turn")],
    turn: Annotated[int | None, Query(ge=0, lt=1 << 62, description="Only the call of this turn.")] = None,
) -> Page[WhyView]:
    """Explain why each call of the newest rollout of this name was answered from the tree or not."""
    if turn is not None:
        wanted = replace(wanted, after=(turn - 1,), limit=1, descending=False)
    control.journal.fold()
    row = _newest(control, task.name, rollout)
    tree = control.trees.load(row["tree"])
    steps = control.reader.steps(row, tree, wanted)
    items = await reasons(control, control.reader, tree, row, steps.items)
    return Page(items=items, total=steps.total, next=steps.next) if turn is None else Page.whole(items)


@router.delete("/tasks/{task}/rollouts/{rollout}", status_code=204)
async def finish_rollout(control: params.ControlDep, task: params.TaskName, rollout: params.RolloutName) -> None:
    """Finish a rollout. Its sandbox and its name are free for other rollouts."""
    if not await control.tasks.dismiss(task, rollout):
        await control.tasks.rollouts.finish(await params.running(control, task, rollout))


@router.post("/tasks/{task}/rollouts/{rollout}/fork", status_code=201)
async def fork_rollout(
    control: params.ControlDep,
    task: params.TaskDep,
    rollout: params.RolloutName,
    request: Request,
    name: params.NewName,
    node: Annotated[NodeName | None, Body()] = None,
    labels: params.NewLabels = None,
) -> RolloutView:
    """Begin a rollout at the node of another rollout, or at a given node, for tree search.

    It takes over the labels of the other rollout except its reward; `labels` changes them.
    """
    source = await params.running(control, task.name, rollout)
    tree, start = (source.tree, source.node) if node is None else params.position_of(control, task, node)
    if start.detached:
        raise RefusalError(409, "forgotten", f"the node of rollout {rollout!r} was forgotten. Fork at another node.")
    own = json.loads(_newest(control, task.name, rollout)["labels"])
    return begin(control, task, name, tree, start, request, changed(inherited(own), labels or {}))


@router.patch("/tasks/{task}/rollouts/{rollout}/labels")
async def change_labels(
    control: params.ControlDep,
    task: params.TaskDep,
    rollout: params.RolloutName,
    request: Request,
    labels: Annotated[dict[str, Any], Body(examples=[{"reward": 1.0, "note": None}])],
) -> RolloutView:
    """Change labels of the newest rollout of this name, which may have ended; null removes a label."""
    if OWNER in labels and params.granted(request).name:
        raise RefusalError(403, "hidden", "the label owner is the name of the token that began the rollout.")
    row, live = _newest(control, task.name, rollout), task.rollouts.get(rollout)
    control.tasks.rollouts.put_labels(task.name, row["id"], live, changed(json.loads(row["labels"]), labels))
    return RolloutView(**_view(control, _newest(control, task.name, rollout), live, request))


def _newest(control: ControlPlane, task: str, name: str) -> dict[str, Any]:
    rows = control.store.rollouts.of_task(task, name=name, newest=True, limit=1)
    if not rows:
        raise params.no_rollout(task, name)
    return rows[0]


def _view(control: ControlPlane, row: dict[str, Any], live: Rollout | None, request: Request) -> dict[str, Any]:
    used_since = time.time() - control.settings.sandbox_idle_s
    return rollout_view(row, str(request.base_url), live, used_since=used_since)


def begin(
    control: ControlPlane, task: Task, name: str, tree: Tree, node: Node, request: Request, labels: Labels | None = None
) -> RolloutView:
    """Begin a rollout, and show its token: the only time, because the store keeps no more than its digest."""
    token = _new_token(control)
    begun = control.tasks.rollouts.begin(task, name, tree, node, token, owned(labels or {}, params.granted(request)))
    control.warm.note_step(begun)
    return RolloutView(**_view(control, _newest(control, task.name, name), begun, request), token=token)


def _new_token(control: ControlPlane) -> str:
    # 192 random bits, so that a token cannot be guessed.
    token = f"fp_{secrets.token_urlsafe(24)}"
    # A request may have nothing but its token, which then leads to the worker that has the rollout.
    while control.share is not None and not control.share.has(token):
        token = f"fp_{secrets.token_urlsafe(24)}"
    return token
