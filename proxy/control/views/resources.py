"""What the control plane shows of snapshots, sandboxes and costs, and why each of them is there."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from proxy.execution.restore import Owner
from proxy.tree.tree import Node
from sandboxes.pool.lifecycle import SandboxState
from sandboxes.pool.roster import Slot
from snapshots.costs import Costs
from snapshots.policy import Prospect, value, why
from snapshots.snapshot import Snapshot, snapshot_kind

NodeName = Annotated[str, Field(pattern=r"^n[0-9]{1,18}$")]


def node_name(node: Node) -> str:
    """Return the name of a node on the wire."""
    return f"n{node.id}"


class SnapshotView(BaseModel):
    """A kept sandbox state. kind: what it holds. cost_s: what taking it took; restore_s: what its last restore took.

    uses, leases: restores so far, and those under way. saved_s, expected_uses: seconds that each use saves, and how
    many are expected. value: seconds saved per byte; the least goes first. why: it is kept, in words.
    """

    id: str
    task: str
    node: str
    kind: Literal["files", "processes"]
    size_bytes: int
    cost_s: float
    restore_s: float
    created_at: float
    uses: int
    leases: int
    saved_s: float
    expected_uses: float
    value: float
    why: str


class SandboxView(BaseModel):
    """A live sandbox. node: the one that it stands at, of a tree of task. rollout: the running one that used it last.

    warm: made ahead, and not used yet. idle_s: since it was used last. why: it lives, in words.
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
    """What ways to a sandbox cost with one driver: running means of what was measured here, guesses until then."""

    fresh_s: float
    replay_overhead_s: float
    freeze_s: dict[str, float]
    restore_s: dict[str, float]
    measured: dict[str, int]


class StatsView(BaseModel):
    """Totals since this proxy started; seconds are those of tools."""

    since: float
    uptime_s: float
    calls: int
    hits: int
    waits: int
    misses: int
    bypasses: int
    hit_rate: float
    executed_s: float
    saved_s: float
    replayed_calls: int
    replayed_s: float
    restores: int
    starts: int
    snapshots_taken: int
    evictions: int
    divergences: int
    audit_checked: int
    audit_differing: int
    warm_made: int
    warm_used: int
    errors: int
    failures: dict[str, int]
    refusals: dict[str, int]
    sandboxes: dict[str, int]
    sandboxes_budget: int
    warm_sandboxes: int
    snapshots: int
    snapshot_bytes: int
    snapshot_budget_bytes: int
    checkpoint_bytes: int
    checkpoint_budget_bytes: int
    costs: dict[str, CostsView]
    reuse_rate: float


class Collected(BaseModel):
    """What was freed. freed_bytes: of kept states and of the store's files, which do not shrink at once."""

    evicted: int
    forgotten_nodes: int
    freed_bytes: int
    snapshot_bytes: int
    store_bytes: int


class Batch(BaseModel):
    """A batch to come: how many of its rollouts shall find a sandbox ready."""

    count: int = Field(ge=1, le=1 << 20)


class WarmView(BaseModel):
    """Forks at a task's root. granted: of those asked for, what the settings allow. ready: stand there now."""

    task: str
    node: str
    granted: int
    ready: int
    expires_s: float


def snapshot_view(snapshot: Snapshot, task: str, worth: Prospect | None) -> SnapshotView:
    """Return a snapshot with what its keeper thinks of it; None where its tree is not in memory."""
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
        expected_uses=0.0 if worth is None else worth.uses,
        value=0.0 if worth is None else value(worth),
        why="its task is not in memory: it is weighed when room is needed" if worth is None else why(worth),
    )


def sandbox_view(slot: Slot, tasks: Mapping[int, tuple[str, str]], now: float) -> SandboxView:
    """Return a live sandbox. tasks: of each running rollout's id its task and name."""
    node = slot.position if isinstance(slot.position, Node) else None
    task, rollout = tasks.get(slot.owner or 0, (None, None))
    return SandboxView(
        id=slot.sandbox.id if slot.sandbox is not None else None,
        state=slot.state.value,  # type: ignore[arg-type]
        task=task,
        node=None if node is None else node_name(node),
        rollout=rollout,
        warm=slot.warm,
        why=_why_it_lives(slot, rollout),
        calls=slot.calls,
        age_s=max(0.0, now - slot.started_at) if slot.started_at else 0.0,
        idle_s=max(0.0, now - slot.used_at) if slot.used_at else 0.0,
    )


def _why_it_lives(slot: Slot, rollout: str | None) -> str:
    if slot.owner == Owner.SCRATCH:
        return "somebody looks at this state"
    if slot.state is not SandboxState.IDLE:
        making = "is made ready" if slot.warm else "runs a call, or is brought to where one will run"
        return {SandboxState.FREEZING: "its state is being kept", SandboxState.STARTING: "starts"}.get(
            slot.state, making
        )
    if slot.warm:
        return "a warm fork: rollouts are expected to leave the tree here"
    return f"rollout {rollout} may go on in it" if rollout else "whoever comes to its node may have it"


def costs_view(costs: Costs) -> CostsView:
    return CostsView(
        fresh_s=costs.fresh.seconds,
        replay_overhead_s=costs.replay_overhead.seconds,
        freeze_s={"files": costs.files.freeze.seconds, "processes": costs.processes.freeze.seconds},
        restore_s={"files": costs.files.restore.seconds, "processes": costs.processes.restore.seconds},
        measured={
            "fresh": costs.fresh.samples,
            "replay_overhead": costs.replay_overhead.samples,
            "freeze_files": costs.files.freeze.samples,
            "freeze_processes": costs.processes.freeze.samples,
            "restore_files": costs.files.restore.samples,
            "restore_processes": costs.processes.restore.samples,
        },
    )
