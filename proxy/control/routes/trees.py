"""Routes of trees of any size: list a task's trees, page through children, search, download answers."""

from functools import partial
from typing import Annotated

from fastapi import Query, Request, Response

from proxy.control.browsing import ChildrenView, SearchView, matching, passed, rollouts_through
from proxy.control.paging import ListQuery, Page, list_query
from proxy.control.routes.params import ControlDep, NodePath, PositionDep, TaskDep, TreeDep, api_router, granted
from proxy.control.tree_listing import TreeSummary, summaries
from proxy.control.tree_reader import rollouts_by_node
from proxy.control.views.nodes import PassedRollout
from proxy.refusals import RefusalError

_SHOWN_TYPES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
"""Media types that a download keeps: a browser shows them, and they cannot contain scripts."""
_MAX_CANDIDATES = 50_000
"""Calls whose titles a search compares: about a second."""


router = api_router("trees")


@router.get("/tasks/{task}/trees")
async def list_trees(
    control: ControlDep,
    task: TaskDep,
    request: Request,
    wanted: Annotated[ListQuery, list_query("current", "created_at", "calls", "nodes", "rollouts", default="-current")],
) -> Page[TreeSummary]:
    """List a task's trees, the current tree first. Each environment that rollouts began in has its own."""
    read = partial(
        summaries, task=task.name, shared_owner=control.store.trees.shared_owner(task.name), current=task.tree.id,
        default=control.settings.default_spec, templates=control.settings.e2b_templates, sees=granted(request).sees,
        wanted=wanted,
    )  # fmt: skip
    return await control.read(read)


@router.get("/tasks/{task}/nodes/{node}/children")
async def list_children(
    control: ControlDep,
    task: TaskDep,
    position: PositionDep,
    wanted: Annotated[ListQuery, list_query("recorded", "hits", "saved_s", "nodes", default="recorded")],
    fold: Annotated[
        int, Query(ge=1, le=1000, description="Number of nodes to show of each chain of only children.")
    ] = 20,
) -> ChildrenView:
    """List one page of a node's children, each with the chain that it begins and the totals of its subtree."""
    tree, shown = position
    summed = await control.subtree_totals.of(tree)
    return control.browser.children(task.name, shown, summed, rollouts_by_node(task), wanted, fold=fold)


@router.get("/tasks/{task}/search", name="search_calls")
async def search(
    control: ControlDep,
    tree: TreeDep,
    q: Annotated[str, Query(min_length=1, max_length=1000, description="Part of a command, in any case.")],
    wanted: Annotated[ListQuery, list_query("record", default="record")],
) -> SearchView:
    """Search the calls of a tree by the text of their command, statement or arguments."""
    read = partial(matching, tree=tree.id, query=q, wanted=wanted, most=_MAX_CANDIDATES)
    rows = await control.read(read)
    return control.browser.search(tree, q, rows, wanted)


@router.get("/tasks/{task}/nodes/{node}/rollouts", name="list_node_rollouts")
async def list_passed(
    control: ControlDep,
    position: PositionDep,
    wanted: Annotated[ListQuery, list_query("created_at", default="-created_at")],
) -> Page[PassedRollout]:
    """List the rollouts that reached a node by a call, the latest first."""
    tree, node = position
    return rollouts_through(await control.read(partial(passed, tree=tree.id, node=node.id)), wanted)


@router.get("/tasks/{task}/nodes/{node}/answer", response_class=Response, responses={200: {"content": {"*/*": {}}}})
async def get_answer(
    control: ControlDep,
    position: PositionDep,
    node: NodePath,
    record: Annotated[
        int | None,
        Query(
            ge=1,
            le=1 << 62,
            description="Number of a record that was made at the node. Default: the call that led there.",
        ),
    ] = None,
) -> Response:
    """Download the unchanged body of a recorded answer."""
    _, shown = position
    records = [r for r in (shown.origin, *shown.records.values()) if r is not None]
    selected = next((r for r in records if r.id == record), None) if record is not None else shown.origin
    if selected is None:
        raise RefusalError(
            404, "no-answer", f"node {node} has no such recorded answer. GET …/nodes/{node} lists its records."
        )
    result = control.store.records.result(selected)
    kind = result.media_type.partition(";")[0].strip().lower()
    headers = {
        "content-security-policy": "default-src 'none'; sandbox", "x-content-type-options": "nosniff",
        "x-forkpoint-media-type": result.media_type.encode("ascii", "replace").decode()[:200],
    }  # fmt: skip
    if kind not in _SHOWN_TYPES:
        headers["content-disposition"] = f'attachment; filename="{node}-{selected.id}.bin"'
        kind = "application/octet-stream"
    return Response(result.body, media_type=kind, headers=headers)
