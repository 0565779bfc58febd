"""Views of snapshots, sandboxes and costs, with the reason why each sandbox or snapshot exists. Pure."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from proxy.execution.sandbox_maker import Owner
from proxy.times import UtcTime
from proxy.tree.tree import Node
from sandboxes.pool.lifecycle import SandboxState
from sandboxes.pool.roster import Slot
from snapshots.costs import Costs
from snapshots.policy import Prospect, value, why
from snapshots.snapshot import Snapshot, snapshot_kind

NodeName = Annotated[str, Field(pattern=r"^n[0-9]{1,18}$")]
"""A node's name in URLs and JSON, such as `n12`."""


def node_name(node: Node) -> str:
    """Return a node's name in URLs and JSON."""
    return f"n{node.id}"


class SnapshotView(BaseModel):
    """A snapshot.

    Attributes:
        kind: Whether it holds files and dumped sessions, or images of live processes too.
        cost_s: Seconds that taking it took.
        restore_s: Seconds that its last restore took.
        uses: Number of restores so far.
        leases: Number of restores in progress.
        saved_s: Seconds that each use is expected to save.
        risk_s: How many of these are no replay, but the mean price of the rollouts that a replay loses.
        expected_uses: Expected number of uses.
        value: Expected seconds saved per byte; snapshots with the least value are evicted first.
    """

    id: str
    task: str
    node: str
    kind: Literal["files", "processes"]
    size_bytes: int
    cost_s: float
    restore_s: float
    created_at: UtcTime
    uses: int
    leases: int
    saved_s: float
    risk_s: float = 0.0
    expected_uses: float
    value: float
    why: str


class SandboxView(BaseModel):
    """A live sandbox.

    Attributes:
        id: Name of the sandbox; null while it starts.
        task: Task of the rollout that used it last; null if no running rollout did.
        node: Node whose state the sandbox is in; null if it is in none.
        rollout: The running rollout that used it last; null if there is none.
        warm: Whether it is a warm fork: made ahead of its use, and not used yet.
        why: What the sandbox is used for, or who may use it.
    """

    id: str | None
    state: Literal["starting", "leased", "freezing", "idle"]
    task: str | None
    node: str | None
    rollout: str | None
    warm: bool
    why: str
    calls: int
    age_s: float
    idle_s: float


class CostsView(BaseModel):
    """Costs of the ways to a sandbox with one driver: running means, and guesses until the first measurement.

    Attributes:
        fresh_s: Seconds to start a sandbox in the root state.
        replay_overhead_s: Seconds that each replayed call takes beside the tool itself.
        freeze_s: Seconds to take a snapshot, by its kind.
        restore_s: Seconds to restore a snapshot, by its kind.
        measured: Number of measurements behind each mean.
    """

    fresh_s: float
    replay_overhead_s: float
    freeze_s: dict[str, float]
    restore_s: dict[str, float]
    measured: dict[str, int]


class CallTotalsView(BaseModel):
    """Totals of answered calls.

    Attributes:
        waits: Calls that shared the execution of another rollout's identical call.
        bypasses: Calls whose record serves their own rollout alone.
        hit_rate: Hits and waits as a share of all calls, from 0 to 1.
        executed_s: Seconds that tools ran for misses and bypasses.
        saved_s: Seconds of tool time that hits and waits saved.
    """

    calls: int
    hits: int
    waits: int
    misses: int
    bypasses: int
    hit_rate: float
    executed_s: float
    saved_s: float


class StatsView(CallTotalsView):
    """Totals since this proxy started, and its budgets.

    Attributes:
        restores: Sandboxes restored from snapshots.
        starts: Sandboxes started afresh.
        divergences: Replays that reached another state than the recorded one.
        root_changes: Trees whose base, archive, image or database changed while the proxy ran.
        audit_checked: Recorded calls that audits ran again.
        audit_differing: Checked calls whose answer or state differs from the record.
        warm_made: Warm forks made.
        warm_used: Warm forks that a rollout used.
        model_tokens_saved: Tokens that models of video tools would have counted again for hits and waits.
        errors: Failures of the infrastructure.
        recovered: How many of these failed no call, because the proxy took another way.
        hits_refused: Calls that the tree knows and that were executed all the same, by reason: their records lead to
            states that nothing could bring back. `unfreezable`: the driver cannot keep the state; `not-kept`: nothing
            kept it in time.
        failures: These failures by kind.
        refusals: Requests that could not be served, by problem type.
        sandboxes_bounded_by: What bounds it, such as `memory` or `max_sandboxes`.
        sandboxes_evicted: Sandboxes that were closed for room before their rollouts had ended. The next calls of these
            restore their states.
        checkpoint_bytes: Bytes of snapshots that hold live processes; part of `snapshot_bytes`.
        snapshots_full: Whether states without another way exceed a budget of snapshots, so that nothing can be evicted.
        snapshots_unproven: Snapshots that wait for a replay before they may be evicted.
        reuse_rate: Learnt share of states that need a sandbox again.
    """

    since: UtcTime
    uptime_s: float
    replayed_calls: int
    replayed_s: float
    restores: int
    starts: int
    snapshots_taken: int
    evictions: int
    divergences: int
    root_changes: int
    audit_checked: int
    audit_differing: int
    warm_made: int
    warm_used: int
    model_tokens_saved: int
    errors: int
    recovered: int = 0
    hits_refused: dict[str, int]
    failures: dict[str, int]
    refusals: dict[str, int]
    sandboxes: dict[str, int]
    sandboxes_budget: int
    sandboxes_bounded_by: str
    sandboxes_evicted: int
    warm_sandboxes: int
    snapshots: int
    snapshot_bytes: int
    snapshot_budget_bytes: int
    checkpoint_bytes: int
    checkpoint_budget_bytes: int
    costs: dict[str, CostsView]
    snapshots_full: bool
    snapshots_unproven: int
    reuse_rate: float


class Collected(BaseModel):
    """The result of a garbage collection.

    Attributes:
        freed_bytes: Bytes by which the snapshots and the store's files shrank; the files may shrink later.
    """

    evicted: int
    forgotten_nodes: int
    freed_bytes: int
    snapshot_bytes: int
    store_bytes: int


class Batch(BaseModel):
    """A batch of rollouts that is about to start, and how many sandboxes to prepare."""

    count: int = Field(ge=1, le=1 << 20)


class WarmView(BaseModel):
    """Warm forks at a tree's root: `granted` of the requested ones, of which `ready` are ready now."""

    task: str
    node: str
    granted: int
    ready: int
    expires_s: float


def snapshot_view(snapshot: Snapshot, task: str, worth: Prospect | None) -> SnapshotView:
    """Return the view of a snapshot. `worth` is the eviction policy's view; None if its tree is not in memory."""
    return SnapshotView(
        id=snapshot.id,
        task=task,
        node=f"n{snapshot.node}",
        kind=snapshot_kind(snapshot),
        size_bytes=snapshot.size_bytes,
        cost_s=snapshot.cost_s,
        restore_s=snapshot.restore_s,
        created_at=snapshot.created_at,
        uses=snapshot.uses,
        leases=snapshot.leases,
        saved_s=0.0 if worth is None else worth.saved_s,
        risk_s=0.0 if worth is None else worth.risk_s,
        expected_uses=0.0 if worth is None else worth.uses,
        value=0.0 if worth is None else value(worth),
        why="its tree is not in memory; its value is computed before an eviction" if worth is None else why(worth),
    )


def sandbox_view(slot: Slot, tasks: Mapping[int, tuple[str, str]], now: float) -> SandboxView:
    """Return the view of a live sandbox at a monotonic time; `tasks` has task and name by rollout number."""
    node = slot.position if isinstance(slot.position, Node) else None
    task, rollout = tasks.get(slot.owner or 0, (None, None))
    return SandboxView(
        id=slot.sandbox.id if slot.sandbox is not None else None,
        state=slot.state.value,  # type: ignore[arg-type]
        task=task,
        node=None if node is None else node_name(node),
        rollout=rollout,
        warm=slot.warm,
        why=_purpose(slot, rollout),
        calls=slot.calls,
        age_s=max(0.0, now - slot.started_at) if slot.started_at else 0.0,
        idle_s=max(0.0, now - slot.used_at) if slot.used_at else 0.0,
    )


def _purpose(slot: Slot, rollout: str | None) -> str:
    if slot.owner == Owner.SCRATCH:
        return "scratch fork opened from the page or the API"
    if slot.state is SandboxState.FREEZING:
        return "its snapshot is being taken"
    if slot.state is SandboxState.STARTING:
        return "starting"
    if slot.state is not SandboxState.IDLE:
        return "being prepared as a warm fork" if slot.warm else "running a call, or replaying calls before one"
    if slot.warm:
        return "warm fork: rollouts are expected to leave the tree here"
    return f"idle, reserved for rollout {rollout}" if rollout else "idle, available to any rollout at this node"


def costs_view(costs: Costs) -> CostsView:
    """Return the view of a driver's costs."""
    kinds = {"files": costs.files, "processes": costs.processes}
    return CostsView(
        fresh_s=costs.fresh.seconds,
        replay_overhead_s=costs.replay_overhead.seconds,
        freeze_s={name: kind.freeze.seconds for name, kind in kinds.items()},
        restore_s={name: kind.restore.seconds for name, kind in kinds.items()},
        measured={
            "fresh": costs.fresh.samples,
            "replay_overhead": costs.replay_overhead.samples,
            **{f"freeze_{name}": kind.freeze.samples for name, kind in kinds.items()},
            **{f"restore_{name}": kind.restore.samples for name, kind in kinds.items()},
        },
    )
