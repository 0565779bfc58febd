"""The control plane under `/api/v1`: tasks, rollouts, trees, nodes, and what the proxy is doing."""

import itertools
import time
from collections import Counter
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response

from proxy.control.browsing import rollouts_through
from proxy.control.garbage import collect_garbage
from proxy.control.parts import ControlPlane
from proxy.control.routes.activity import live_routes
from proxy.control.routes.audits import audit_routes
from proxy.control.routes.params import (
    PROBLEM,
    NewName,
    NodePath,
    RolloutName,
    RootQuery,
    TaskName,
    granted,
    no_rollout,
    place_of,
    running,
    tree_of,
)
from proxy.control.routes.scratch import visit_routes
from proxy.control.routes.transfer import carry_routes
from proxy.control.routes.trees import tree_routes
from proxy.control.routes.videos import video_routes
from proxy.control.task_totals import Totals
from proxy.control.views.common import (
    Forgotten,
    NodeDetail,
    Pin,
    Reader,
    RolloutDetail,
    RolloutView,
    TaskSummary,
    TaskView,
    TreeView,
    rollout_view,
    task_view,
)
from proxy.control.views.resources import (
    Batch,
    Collected,
    NodeName,
    SandboxView,
    SnapshotView,
    StatsView,
    WarmView,
    costs_view,
    node_name,
    sandbox_view,
    snapshot_view,
)
from proxy.engine import Engine
from proxy.refusals import RefusalError
from proxy.storage.errors import StoreError
from proxy.tree.rollout import Rollout
from proxy.tree.task import Task
from proxy.tree.tree import Node
from sandboxes.errors import NotFreezableError
from sandboxes.spec import EnvironmentSpec
from snapshots.snapshot import Snapshot

_PASSED_SHOWN = 50
_PROBLEMS: dict[int | str, dict[str, Any]] = {"4XX": PROBLEM, "5XX": PROBLEM}


def control_plane(control: ControlPlane) -> APIRouter:
    """Return the routes under `/api/v1` of a running engine."""
    router = APIRouter(prefix="/api/v1", responses=_PROBLEMS)
    engine = control.engine
    _task_routes(router, control)
    _tree_routes(router, engine)
    _rollout_routes(router, engine)
    _state_routes(router, engine)
    tree_routes(router, control)
    visit_routes(router, control)
    live_routes(router, control)
    video_routes(router, engine)
    carry_routes(router, engine)
    audit_routes(router, engine)
    return router


def _task_routes(router: APIRouter, control: ControlPlane) -> None:
    engine = control.engine

    @router.get("/tasks")
    async def list_tasks(
        request: Request,
        offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    ) -> list[TaskSummary]:
        """List the tasks by name, with what each one's rollouts were answered."""
        totals = await control.task_totals.totals()
        grant = granted(request)
        if grant.whole:
            rows = engine.store.tasks.page(offset=offset, limit=limit)
        else:
            rows = [row for row in engine.store.tasks.page() if grant.sees(row["name"])][offset : offset + limit]
        return [_summary(row, totals.get(row["name"]) or Totals()) for row in rows]

    @router.put("/tasks/{task}", responses={201: {"model": TaskView}})
    async def put_task(task: TaskName, response: Response, spec: EnvironmentSpec | None = None) -> TaskView:
        """Give a task its environment. Another spec starts another tree; rollouts that run stay in theirs."""
        put, new = await engine.tasks.put(task, spec or EnvironmentSpec())
        response.status_code = 201 if new else 200
        return _task_view(engine, put)

    @router.get("/tasks/{task}")
    async def get_task(task: TaskName) -> TaskView:
        """Show a task."""
        return _task_view(engine, await engine.tasks.find(task))

    @router.delete("/tasks/{task}", status_code=204)
    async def delete_task(task: TaskName) -> None:
        """Delete a task with its trees and rollouts."""
        await engine.forgetting.delete_task(task)

    @router.post("/tasks/{task}/warm", status_code=202)
    async def warm_task(task: TaskName, batch: Batch, root: RootQuery = None) -> WarmView:
        """Have sandboxes ready at a tree's root for the next batch of rollouts. They are made in the background."""
        tree = tree_of(engine, await engine.tasks.open(task), root)
        granted = engine.warm.request(tree, batch.count)
        return WarmView(
            task=task,
            node=node_name(tree.root),
            granted=granted,
            ready=engine.warm.ready(tree.root),
            expires_s=engine.settings.sandbox_idle_s,
        )


def _tree_routes(router: APIRouter, engine: Engine) -> None:
    reader = Reader(engine.store)

    @router.get("/tasks/{task}/tree")
    async def get_tree(
        task: TaskName,
        node: Annotated[NodeName | None, Query(description="start here; the root where it is left out")] = None,
        root: RootQuery = None,
        depth: Annotated[int | None, Query(ge=0, le=1_000_000)] = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> TreeView:
        """Show a tree, the current one by default, or what lies below a node of any tree, parents first."""
        found = await engine.tasks.find(task)
        tree = tree_of(engine, found, node or root)
        top = tree.root if node is None else tree.nodes[int(node[1:])]
        return reader.tree(found, tree, top, depth=depth, limit=limit)

    @router.get("/tasks/{task}/nodes/{node}")
    async def get_node(task: TaskName, node: NodePath) -> NodeDetail:
        """Show a node: its call, answer, effect, seconds, hits, who passed, and why its state is kept or not."""
        found = await engine.tasks.find(task)
        tree, shown = place_of(engine, found, node)
        passed = await rollouts_through(engine, tree, shown, _PASSED_SHOWN)
        kept = engine.snapshot_value.explain(shown, tree)
        return reader.detail(found, shown, _snapshot_of(engine, shown), kept, passed)

    @router.delete("/tasks/{task}/nodes/{node}")
    async def forget_node(
        task: TaskName,
        node: NodePath,
        end_rollouts: Annotated[bool, Query(description="end the rollouts that stand there")] = False,
    ) -> Forgotten:
        """Forget a node and all that came from it: their calls run again. Rollouts that stand there go on alone."""
        tree, top = place_of(engine, await engine.tasks.find(task), node)
        done = await engine.forgetting.forget(tree, top, end_rollouts=end_rollouts)
        return Forgotten(nodes=done.nodes, rollouts=done.ended, going_on=done.going_on)

    @router.post("/tasks/{task}/nodes/{node}/pin")
    async def pin_node(task: TaskName, node: NodePath, pin: Pin | None = None) -> NodeDetail:
        """Keep a node's snapshot whatever the budget says, or stop doing so."""
        found = await engine.tasks.find(task)
        _, pinned = place_of(engine, found, node)
        pinned.pinned = pin is None or pin.pinned
        engine.store.records.save_node(pinned)
        return reader.detail(found, pinned, _snapshot_of(engine, pinned))

    @router.post("/tasks/{task}/nodes/{node}/snapshot")
    async def snapshot_node(task: TaskName, node: NodePath) -> NodeDetail:
        """Take a node's snapshot now. Where it has one, nothing is done."""
        found = await engine.tasks.find(task)
        tree, kept = place_of(engine, found, node)
        try:
            await engine.restorer.take_snapshot(tree, kept)
        except NotFreezableError as reason:
            raise RefusalError(409, "not-freezable", f"the state {node} cannot be frozen: {reason}") from reason
        if kept.snapshot is None:
            raise StoreError(f"the snapshot of {node} could not be written. Free disk space, and ask again.")
        return reader.detail(found, kept, _snapshot_of(engine, kept))


def _rollout_routes(router: APIRouter, engine: Engine) -> None:
    reader = Reader(engine.store)

    @router.post("/tasks/{task}/rollouts", status_code=201)
    async def begin_rollout(task: TaskName, request: Request, rollout: NewName) -> RolloutView:
        """Begin a rollout at the root. A first call under a new name does the same."""
        opened = await engine.tasks.open(task)
        begun = engine.tasks.begin(opened, rollout, opened.tree, opened.tree.root)
        engine.warm.note_step(begun)
        return RolloutView(**_shown(engine, begun, request))

    @router.get("/tasks/{task}/rollouts")
    async def list_rollouts(
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
        task: TaskName,
        rollout: RolloutName,
        request: Request,
        offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    ) -> RolloutDetail:
        """Show a rollout, the latest of this name, with its calls in order and how each was answered."""
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
    async def finish_rollout(task: TaskName, rollout: RolloutName) -> None:
        """Finish a rollout: its sandbox is free for others, its name for a new one."""
        await engine.tasks.finish(await running(engine, task, rollout))

    @router.post("/tasks/{task}/rollouts/{rollout}/fork", status_code=201)
    async def fork_rollout(
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


def _state_routes(router: APIRouter, engine: Engine) -> None:
    began = time.time()

    @router.get("/snapshots")
    async def list_snapshots(
        request: Request, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000
    ) -> list[SnapshotView]:
        """List the kept sandbox states: what each costs, what it saves, and why it is kept."""
        grant = granted(request)
        seen = (s for s in engine.snapshots if grant.whole or grant.sees(engine.store.trees.task_of(s.tree)))
        return [_snapshot_view(engine, snapshot) for snapshot in itertools.islice(seen, limit)]

    @router.get("/sandboxes")
    async def list_sandboxes(request: Request) -> list[SandboxView]:
        """List the live sandboxes: where each stands, for whom, and why it lives."""
        grant = granted(request)
        names = {rollout.id: (rollout.task, rollout.name) for rollout in engine.tasks.rollouts.values()}
        now = time.monotonic()
        views = [sandbox_view(slot, names, now) for slot in engine.pool.roster.slots]
        return [view for view in views if grant.whole or (view.task is not None and grant.sees(view.task))]

    @router.post("/gc")
    async def collect(request: Request) -> Collected:
        """Free what nothing needs: states over their budgets, forgotten ones, answers that no call has."""
        granted(request).require_whole()
        return await collect_garbage(engine)

    @router.get("/stats")
    async def stats(request: Request) -> StatsView:
        """Show totals since this proxy started."""
        granted(request).require_whole()
        return StatsView(
            since=began,
            uptime_s=time.time() - began,
            sandboxes=dict(Counter(slot.state.value for slot in engine.pool.roster.slots)),
            sandboxes_budget=engine.settings.max_sandboxes,
            snapshots=len(engine.snapshots),
            snapshot_bytes=engine.cache.used_bytes,
            snapshot_budget_bytes=engine.settings.snapshot_bytes,
            checkpoint_bytes=engine.cache.checkpoint_bytes,
            checkpoint_budget_bytes=engine.settings.checkpoint_bytes,
            warm_sandboxes=len(engine.warm.forks()),
            costs={driver: costs_view(costs) for driver, costs in engine.cache.costs.items()},
            reuse_rate=engine.snapshot_value.reuse.rate,
            **engine.counts.as_dict(),
        )


def _task_view(engine: Engine, task: Task) -> TaskView:
    return task_view(task, engine.store.tasks.summary(task.name))


def _snapshot_of(engine: Engine, node: Node) -> SnapshotView | None:
    snapshot = engine.snapshots.get(node.snapshot)
    return None if snapshot is None else _snapshot_view(engine, snapshot)


def _snapshot_view(engine: Engine, snapshot: Snapshot) -> SnapshotView:
    # A listing reads no tree back: what nobody has asked for lately is shown without its worth.
    tree = engine.trees.get(snapshot.tree)
    worth = None if tree is None else engine.snapshot_value.prospect(snapshot, tree.nodes.get(snapshot.node))
    return snapshot_view(snapshot, engine.store.trees.task_of(snapshot.tree), worth)


def _shown(engine: Engine, rollout: Rollout, request: Request) -> dict[str, Any]:
    row = engine.store.rollouts.of_task(rollout.task, name=rollout.name)[-1]
    return rollout_view(row, str(request.base_url), rollout)


def _summary(row: dict[str, Any], totals: Totals) -> TaskSummary:
    told = {name: getattr(totals, name) for name in (*Totals.__slots__, "hit_rate")}
    return TaskSummary(
        task=row["name"], created_at=row["created_at"], nodes=row["nodes"], rollouts=row["rollouts"], **told
    )
