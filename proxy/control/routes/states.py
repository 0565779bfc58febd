"""Routes of the proxy's resources: snapshots, sandboxes, totals, and garbage collection."""

import time
from collections import Counter
from typing import Annotated, Literal

from fastapi import Query, Request

from proxy.control.paging import ListQuery, Page, list_query
from proxy.control.parts import ControlPlane
from proxy.control.routes.params import WHOLE, ControlDep, TaskQuery, api_router, granted
from proxy.control.views import resources as views
from proxy.tree.tree import Node
from sandboxes.pool.roster import Slot
from snapshots.snapshot import Snapshot, snapshot_kind

router = api_router("resources")


@router.get("/snapshots")
async def list_snapshots(
    control: ControlDep,
    request: Request,
    wanted: Annotated[ListQuery, list_query("created_at", "size_bytes", "uses", default="created_at")],
    task: TaskQuery = None,
    kind: Annotated[Literal["files", "processes"] | None, Query(description="Only snapshots of this kind.")] = None,
) -> Page[views.SnapshotView]:
    """List the snapshots: what each costs, what it saves, and why it is kept."""
    grant = granted(request)

    def visible(snapshot: Snapshot) -> bool:
        if kind is not None and snapshot_kind(snapshot) != kind:
            return False
        if task is None and grant.whole:
            return True
        name = control.store.trees.task_of(snapshot.tree)
        return task in (None, name) and grant.sees(name)

    part = wanted.sorted_part(filter(visible, control.snapshots), lambda s: (getattr(s, wanted.key), s.id))
    return part.page(lambda snapshot: _snapshot_view(control, snapshot))


@router.get("/sandboxes")
async def list_sandboxes(
    control: ControlDep,
    request: Request,
    wanted: Annotated[ListQuery, list_query("age_s", "calls", default="-age_s")],
    task: TaskQuery = None,
    state: Annotated[
        Literal["starting", "leased", "freezing", "idle"] | None, Query(description="Only sandboxes in this state.")
    ] = None,
) -> Page[views.SandboxView]:
    """List the live sandboxes: the node and rollout of each, and what it is used for."""
    grant = granted(request)
    names = {rollout.id: (rollout.task, rollout.name) for rollout in control.tasks.rollouts.running.values()}

    def visible(slot: Slot) -> bool:
        if state is not None and slot.state.value != state:
            return False
        owner, _ = names.get(slot.owner or 0, (None, ""))
        return task in (None, owner) and (grant.whole or (owner is not None and grant.sees(owner)))

    # An older sandbox has a smaller number; its age changes while pages are read.
    part = wanted.sorted_part(
        filter(visible, control.pool.roster.slots),
        lambda slot: (slot.calls, -slot.number) if wanted.key == "calls" else (-slot.number,),
    )
    now = time.monotonic()
    return part.page(lambda slot: views.sandbox_view(slot, names, now))


@router.post("/gc", name="collect_garbage", dependencies=[WHOLE])
async def collect(control: ControlDep) -> views.Collected:
    """Collect garbage: snapshots over budget, forgotten nodes, unused sandboxes, and blobs without a record."""

    def used() -> int:
        return control.cache.used_bytes + control.store.database.size_bytes()

    before = used()
    evicted, forgotten = await control.collect_garbage()
    return views.Collected(
        evicted=evicted, forgotten_nodes=forgotten, freed_bytes=max(0, before - used()),
        snapshot_bytes=control.cache.used_bytes, store_bytes=control.store.database.size_bytes(),
    )  # fmt: skip


@router.get("/stats", name="get_stats", dependencies=[WHOLE])
async def stats(control: ControlDep) -> views.StatsView:
    """Show the totals since this proxy started, and its budgets."""
    return views.StatsView(
        since=control.started_at,
        uptime_s=time.time() - control.started_at,
        sandboxes=dict(Counter(slot.state.value for slot in control.pool.roster.slots)),
        sandboxes_budget=control.pool.bound.most,
        sandboxes_bounded_by=control.pool.bound.by,
        sandboxes_evicted=control.pool.evicted,
        snapshots=len(control.snapshots),
        snapshot_bytes=control.cache.used_bytes,
        snapshot_budget_bytes=control.settings.snapshot_bytes,
        checkpoint_bytes=control.cache.checkpoint_bytes,
        checkpoint_budget_bytes=control.settings.checkpoint_bytes,
        warm_sandboxes=len(control.warm.forks()),
        costs={driver: views.costs_view(costs) for driver, costs in control.cache.costs.items()},
        snapshots_full=bool(control.cache.full),
        snapshots_unproven=len(control.cache.unproven),
        reuse_rate=control.snapshot_value.reuse.rate,
        **control.counts.as_dict(),
    )


def snapshot_of(control: ControlPlane, node: Node) -> views.SnapshotView | None:
    """Return the view of a node's snapshot; None if it has none."""
    snapshot = control.snapshots.get(node.snapshot)
    return None if snapshot is None else _snapshot_view(control, snapshot)


def _snapshot_view(control: ControlPlane, snapshot: Snapshot) -> views.SnapshotView:
    # A listing must not load trees, so a snapshot of a tree that is not in memory is shown without its value.
    worth = control.snapshot_value.prospect(snapshot)
    return views.snapshot_view(snapshot, control.store.trees.task_of(snapshot.tree), worth)
