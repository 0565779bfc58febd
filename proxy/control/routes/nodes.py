"""Routes of trees and nodes: show them, forget a subtree, pin a snapshot, and take one."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated

from fastapi import Query

from proxy.control.browsing import passed, rollouts_through
from proxy.control.paging import ListQuery, Page, list_query
from proxy.control.parts import ControlPlane
from proxy.control.routes.params import (
    ControlDep,
    OwnQuery,
    PositionDep,
    RootQuery,
    TaskDep,
    api_router,
    own_of,
    tree_of,
)
from proxy.control.routes.states import snapshot_of
from proxy.control.views.nodes import Forgotten, NodeDetail, NodeView, Pin, TreeView
from proxy.control.views.resources import NodeName, node_name
from proxy.refusals import RefusalError
from proxy.storage.errors import StoreError
from proxy.tree.tree import Node, Tree
from sandboxes.driver import FrozenState
from sandboxes.errors import NotFreezableError, StateGoneError

_LATEST = ListQuery("created_at", descending=True, limit=50)
"""A node's view lists at most this many of the rollouts that passed it; another route lists all."""

router = api_router("trees")


@router.get("/tasks/{task}/tree")
async def get_tree(
    control: ControlDep,
    task: TaskDep,
    node: Annotated[NodeName | None, Query(description="Start at this node. Default: the root.")] = None,
    root: RootQuery = None,
    depth: Annotated[int | None, Query(ge=0, le=1_000_000)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    own: OwnQuery = False,
) -> TreeView:
    """Show a tree (by default the current one) or the subtree of a node, parents first."""
    tree = tree_of(control, task, node or root)
    top = tree.root if node is None else tree.nodes[int(node[1:])]
    part = await own_of(control, task, tree) if own else None
    return control.reader.tree(task, tree, top, depth=depth, limit=limit, own=part)


@router.get("/tasks/{task}/nodes/{node}")
async def get_node(control: ControlDep, task: TaskDep, position: PositionDep) -> NodeDetail:
    """Show a node: its call, answer, effect and hits, the rollouts that passed, and why it has a snapshot or not."""
    tree, shown = position
    latest = rollouts_through(await control.read(partial(passed, tree=tree.id, node=shown.id)), _LATEST)
    kept = control.snapshot_value.explain(shown, tree)
    return control.reader.detail(task, shown, snapshot_of(control, shown), kept, latest.items)


@router.get("/tasks/{task}/nodes/{node}/path")
async def get_path(
    control: ControlDep,
    task: TaskDep,
    position: PositionDep,
    wanted: Annotated[ListQuery, list_query("depth", default="depth")],
) -> Page[NodeView]:
    """List the nodes from the root to a node: the calls that rebuild its state, in order."""
    return control.reader.path(task, position[1], wanted)


@router.delete("/tasks/{task}/nodes/{node}")
async def forget_node(
    control: ControlDep,
    position: PositionDep,
    end_rollouts: Annotated[bool, Query(description="Also end the rollouts in the subtree.")] = False,
) -> Forgotten:
    """Forget a subtree, so that its calls run again. Its rollouts continue without sharing their records."""
    result = await control.forgetting.forget(*position, end_rollouts=end_rollouts)
    return Forgotten(nodes=result.nodes, rollouts=result.ended, going_on=result.going_on)


@router.post("/tasks/{task}/nodes/{node}/pin")
async def pin_node(control: ControlDep, task: TaskDep, position: PositionDep, pin: Pin | None = None) -> NodeDetail:
    """Pin a node's snapshot, so that it is never evicted, or unpin it."""
    tree, pinned = position
    control.pin(tree, pinned, on=pin is None or pin.pinned)
    return control.reader.detail(task, pinned, snapshot_of(control, pinned))


@router.post("/tasks/{task}/nodes/{node}/snapshot")
async def snapshot_node(control: ControlDep, task: TaskDep, position: PositionDep) -> NodeDetail:
    """Take a node's snapshot now, if it has none."""
    _, kept = position
    await take_snapshot(control, *position)
    return control.reader.detail(task, kept, snapshot_of(control, kept))


async def take_snapshot(control: ControlPlane, tree: Tree, node: Node) -> None:
    """Take a node's snapshot, if it has none. Raises RefusalError (409) if it cannot be frozen, or StoreError."""
    name = node_name(node)
    try:
        await control.restorer.take_snapshot(tree, node)
    except NotFreezableError as reason:
        raise RefusalError(409, "not-freezable", f"no snapshot of node {name} can be taken: {reason}") from reason
    if node.snapshot is None:
        raise StoreError(f"the snapshot of node {name} could not be written. Free disk space and retry.")


@asynccontextmanager
async def leased_state(control: ControlPlane, tree: Tree, node: Node) -> AsyncIterator[FrozenState]:
    """Lease a node's snapshot, which is taken if there is none, for the block."""
    await take_snapshot(control, tree, node)
    try:
        # No await since the snapshot was there, so nothing has evicted it.
        with control.cache.leased(node) as frozen:
            yield frozen
    except StateGoneError as error:
        # The next attempt replays the state.
        control.cache.failed(node, error, time.monotonic(), reproducible=False)
        raise
