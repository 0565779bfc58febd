"""Routes of trees and nodes: show them, forget a subtree, pin a state, and take a snapshot."""

from typing import Annotated

from fastapi import APIRouter, Query

from proxy.control.browsing import rollouts_through
from proxy.control.routes.params import (
    ControlDep,
    EngineDep,
    NodePath,
    RootQuery,
    TaskName,
    place_of,
    tree_of,
)
from proxy.control.routes.states import snapshot_of
from proxy.control.views.common import (
    Forgotten,
    NodeDetail,
    Pin,
    TreeView,
)
from proxy.control.views.resources import (
    NodeName,
)
from proxy.refusals import RefusalError
from proxy.storage.errors import StoreError
from sandboxes.errors import NotFreezableError

_ROLLOUTS_SHOWN = 50
"""A node's view lists at most this many of the rollouts that passed it."""

router = APIRouter()


@router.get("/tasks/{task}/tree")
async def get_tree(
    control: ControlDep,
    task: TaskName,
    node: Annotated[NodeName | None, Query(description="start here; the root where it is left out")] = None,
    root: RootQuery = None,
    depth: Annotated[int | None, Query(ge=0, le=1_000_000)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> TreeView:
    """Show a tree, the current one by default, or what lies below a node of any tree, parents first."""
    engine = control.engine
    reader = control.reader
    found = await engine.tasks.find(task)
    tree = tree_of(engine, found, node or root)
    top = tree.root if node is None else tree.nodes[int(node[1:])]
    return reader.tree(found, tree, top, depth=depth, limit=limit)


@router.get("/tasks/{task}/nodes/{node}")
async def get_node(control: ControlDep, task: TaskName, node: NodePath) -> NodeDetail:
    """Show a node: its call, answer, effect, seconds, hits, who passed, and why its state is kept or not."""
    engine = control.engine
    reader = control.reader
    found = await engine.tasks.find(task)
    tree, shown = place_of(engine, found, node)
    passed = await rollouts_through(engine, tree, shown, _ROLLOUTS_SHOWN)
    kept = engine.snapshot_value.explain(shown, tree)
    return reader.detail(found, shown, snapshot_of(engine, shown), kept, passed)


@router.delete("/tasks/{task}/nodes/{node}")
async def forget_node(
    engine: EngineDep,
    task: TaskName,
    node: NodePath,
    end_rollouts: Annotated[bool, Query(description="end the rollouts that stand there")] = False,
) -> Forgotten:
    """Forget a node and all that came from it: their calls run again. Rollouts that stand there go on alone."""
    tree, top = place_of(engine, await engine.tasks.find(task), node)
    done = await engine.forgetting.forget(tree, top, end_rollouts=end_rollouts)
    return Forgotten(nodes=done.nodes, rollouts=done.ended, going_on=done.going_on)


@router.post("/tasks/{task}/nodes/{node}/pin")
async def pin_node(control: ControlDep, task: TaskName, node: NodePath, pin: Pin | None = None) -> NodeDetail:
    """Keep a node's snapshot whatever the budget says, or stop doing so."""
    engine = control.engine
    reader = control.reader
    found = await engine.tasks.find(task)
    _, pinned = place_of(engine, found, node)
    pinned.pinned = pin is None or pin.pinned
    engine.store.records.save_node(pinned)
    return reader.detail(found, pinned, snapshot_of(engine, pinned))


@router.post("/tasks/{task}/nodes/{node}/snapshot")
async def snapshot_node(control: ControlDep, task: TaskName, node: NodePath) -> NodeDetail:
    """Take a node's snapshot now. Where it has one, nothing is done."""
    engine = control.engine
    reader = control.reader
    found = await engine.tasks.find(task)
    tree, kept = place_of(engine, found, node)
    try:
        await engine.restorer.take_snapshot(tree, kept)
    except NotFreezableError as reason:
        raise RefusalError(409, "not-freezable", f"the state {node} cannot be frozen: {reason}") from reason
    if kept.snapshot is None:
        raise StoreError(f"the snapshot of {node} could not be written. Free disk space, and ask again.")
    return reader.detail(found, kept, snapshot_of(engine, kept))
