"""Routes for looking at trees of any size: which a task has, children by page, search, answers as they were given."""

import asyncio
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Response

from proxy.control.browsing import ChildrenView, Order, SearchView, matching, rollouts_through
from proxy.control.routes.params import (
    ControlDep,
    EngineDep,
    NodePath,
    RootQuery,
    TaskName,
    place_of,
    standing,
    tree_of,
)
from proxy.control.tree_listing import TreeSummary, summaries
from proxy.control.views.common import PassedRollout
from proxy.refusals import RefusalError

_SHOWN_TYPES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
"""What a browser may show by itself: no script can be in it."""
_LOOKED_AT = 50_000


router = APIRouter()


@router.get("/tasks/{task}/trees")
async def list_trees(
    engine: EngineDep,
    task: TaskName,
    offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> list[TreeSummary]:
    """List a task's trees, the current one first: one for each environment that its rollouts began in."""
    found = await engine.tasks.find(task)
    ask = partial(
        summaries, task=task, shared_owner=engine.store.trees.shared_owner(task), current=found.tree.id,
        default=engine.settings.default_spec, templates=engine.settings.e2b_templates, offset=offset, limit=limit,
    )  # fmt: skip
    return await asyncio.to_thread(engine.store.database.read_apart, ask)


@router.get("/tasks/{task}/nodes/{node}/children")
async def list_children(
    control: ControlDep,
    task: TaskName,
    node: NodePath,
    order: Annotated[Order, Query(description="by what lies below; 'recorded': the first one first")] = "recorded",
    offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    fold: Annotated[int, Query(ge=1, le=1000, description="nodes shown of those that follow one by one")] = 20,
) -> ChildrenView:
    """List a node's children, a page of them, each with the run of single children after it and sums below."""
    engine = control.engine
    browser = control.browser
    found = await engine.tasks.find(task)
    tree, shown = place_of(engine, found, node)
    summed = await control.subtree_totals.of(tree)
    return browser.children(task, shown, summed, standing(found), order=order, offset=offset, limit=limit, fold=fold)


@router.get("/tasks/{task}/search")
async def search(
    control: ControlDep,
    task: TaskName,
    q: Annotated[str, Query(min_length=1, max_length=1000, description="part of a command, whatever its case")],
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    root: RootQuery = None,
) -> SearchView:
    """Find calls of a tree by the text of their command, statement or arguments."""
    engine = control.engine
    browser = control.browser
    tree = tree_of(engine, await engine.tasks.find(task), root)
    ask = partial(matching, tree=tree.id, query=q, most=_LOOKED_AT)
    rows = await asyncio.to_thread(engine.store.database.read_apart, ask)
    return browser.search(task, tree, q, rows, limit)


@router.get("/tasks/{task}/nodes/{node}/rollouts")
async def list_passed(
    engine: EngineDep, task: TaskName, node: NodePath, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> list[PassedRollout]:
    """List the rollouts that a call led to this node, the latest first."""
    return await rollouts_through(engine, *place_of(engine, await engine.tasks.find(task), node), limit)


@router.get("/tasks/{task}/nodes/{node}/answer", response_class=Response, responses={200: {"content": {"*/*": {}}}})
async def get_answer(
    engine: EngineDep,
    task: TaskName,
    node: NodePath,
    record: Annotated[int | None, Query(ge=1, le=1 << 62, description="of a call that changed nothing")] = None,
) -> Response:
    """Download a recorded answer's body as it is: of the call that led here, or of a record made here."""
    _, shown = place_of(engine, await engine.tasks.find(task), node)
    records = [r for r in (shown.origin, *shown.records.values()) if r is not None]
    wanted = next((r for r in records if r.id == record), None) if record is not None else shown.origin
    if wanted is None:
        raise RefusalError(
            404, "no-answer", f"{node} has no such recorded answer. GET …/nodes/{node} lists what it has."
        )
    result = engine.store.records.result(wanted)
    kind = result.media_type.partition(";")[0].strip().lower()
    headers = {
        "content-security-policy": "default-src 'none'; sandbox", "x-content-type-options": "nosniff",
        "x-forkpoint-media-type": result.media_type.encode("ascii", "replace").decode()[:200],
    }  # fmt: skip
    if kind not in _SHOWN_TYPES:
        headers["content-disposition"] = f'attachment; filename="{node}-{wanted.id}.bin"'
        kind = "application/octet-stream"
    return Response(result.body, media_type=kind, headers=headers)
