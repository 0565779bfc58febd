"""Routes of the proxy's resources: snapshots, sandboxes, totals, and garbage collection."""

import itertools
import time
from collections import Counter
from typing import Annotated

from fastapi import APIRouter, Query, Request

from proxy.control.garbage import collect_garbage
from proxy.control.routes.params import (
    ControlDep,
    EngineDep,
    granted,
)
from proxy.control.views.resources import (
    Collected,
    SandboxView,
    SnapshotView,
    StatsView,
    costs_view,
    sandbox_view,
    snapshot_view,
)
from proxy.engine import Engine
from proxy.tree.tree import Node
from snapshots.snapshot import Snapshot

router = APIRouter()


@router.get("/snapshots")
async def list_snapshots(
    engine: EngineDep, request: Request, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000
) -> list[SnapshotView]:
    """List the snapshots: what each costs, what it saves, and why it is kept."""
    grant = granted(request)
    visible = (s for s in engine.snapshots if grant.whole or grant.sees(engine.store.trees.task_of(s.tree)))
    return [_snapshot_view(engine, snapshot) for snapshot in itertools.islice(visible, limit)]


@router.get("/sandboxes")
async def list_sandboxes(engine: EngineDep, request: Request) -> list[SandboxView]:
    """List the live sandboxes: the node and rollout of each, and what it is used for."""
    grant = granted(request)
    names = {rollout.id: (rollout.task, rollout.name) for rollout in engine.tasks.rollouts.running.values()}
    now = time.monotonic()
    views = [sandbox_view(slot, names, now) for slot in engine.pool.roster.slots]
    return [view for view in views if grant.whole or (view.task is not None and grant.sees(view.task))]


@router.post("/gc", name="collect_garbage")
async def collect(engine: EngineDep, request: Request) -> Collected:
    """Collect garbage: snapshots over budget, forgotten nodes, unused sandboxes, and blobs without a record."""
    granted(request).require_whole()
    return await collect_garbage(engine)


@router.get("/stats", name="get_stats")
async def stats(control: ControlDep, request: Request) -> StatsView:
    """Show the totals since this proxy started, and its budgets."""
    engine = control.engine
    granted(request).require_whole()
    return StatsView(
        since=control.started_at,
        uptime_s=time.time() - control.started_at,
        sandboxes=dict(Counter(slot.state.value for slot in engine.pool.roster.slots)),
        sandboxes_budget=engine.settings.max_sandboxes,
        snapshots=len(engine.snapshots),
        snapshot_bytes=engine.cache.used_bytes,
        snapshot_budget_bytes=engine.settings.snapshot_bytes,
        checkpoint_bytes=engine.cache.checkpoint_bytes,
        checkpoint_budget_bytes=engine.settings.checkpoint_bytes,
        warm_sandboxes=len(engine.warm.forks()),
        costs={driver: costs_view(costs) for driver, costs in engine.cache.costs.items()},
        snapshots_full=bool(engine.cache.full),
        snapshots_unproven=len(engine.cache.unproven),
        reuse_rate=engine.snapshot_value.reuse.rate,
        **engine.counts.as_dict(),
    )


def snapshot_of(engine: Engine, node: Node) -> SnapshotView | None:
    """Return the view of a node's snapshot; None if it has none."""
    snapshot = engine.snapshots.get(node.snapshot)
    return None if snapshot is None else _snapshot_view(engine, snapshot)


def _snapshot_view(engine: Engine, snapshot: Snapshot) -> SnapshotView:
    # A listing must not load trees, so a snapshot of a tree that is not in memory is shown without its value.
    tree = engine.trees.get(snapshot.tree)
    worth = None if tree is None else engine.snapshot_value.prospect(snapshot, tree.nodes.get(snapshot.node))
    return snapshot_view(snapshot, engine.store.trees.task_of(snapshot.tree), worth)
