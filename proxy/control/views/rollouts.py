"""Views of tasks and of their rollouts. Pure."""

import json
from typing import Any, Literal

from pydantic import BaseModel

from proxy.control.paging import Page
from proxy.control.views.nodes import CallView, EffectName, ResourcesView
from proxy.control.views.resources import CallTotalsView, node_name
from proxy.times import UtcTime
from proxy.tree.labels import typed
from proxy.tree.rollout import Rollout
from proxy.tree.task import Task
from sandboxes.calls import Mark
from sandboxes.spec import EnvironmentSpec


class TaskView(BaseModel):
    """A task.

    Attributes:
        spec: Its environment, without secret values.
        default: Whether the task has the default environment because no other was put.
        nodes: Number of nodes in all trees of the task.
        rollouts: Number of rollouts in all trees of the task, finished rollouts included.
        advice: What makes states of the task dear on this machine, and what it costs; empty if nothing is known.
    """

    task: str
    spec: EnvironmentSpec
    default: bool
    root: str
    created_at: UtcTime
    nodes: int
    rollouts: int
    running: int
    advice: str = ""


class TaskSummary(CallTotalsView):
    """A task with the totals of its rollouts since its creation; the totals may be some seconds old.

    Attributes:
        rollouts: Number of rollouts, finished rollouts included.
        used_at: When a rollout made its latest call, or began; null without a rollout.
    """

    task: str
    created_at: UtcTime
    nodes: int
    rollouts: int
    running: int = 0
    used_at: UtcTime | None = None


RolloutState = Literal["running", "idle", "lost", "finished"]


class RolloutView(BaseModel):
    """A rollout.

    Attributes:
        id: Number of the rollout, unique in this proxy.
        start: The node that it began at.
        calls: Number of its answered calls.
        labels: Its labels: `step` and `epoch` as whole numbers, `reward` as a number, all others as texts.
        state: `running` if a call is in flight or was made within `sandbox_idle_s`, `idle` without one, `lost` if its
            calls are refused (`lost` says why), `finished` after its end.
        used_at: When it made its last call, or began; up to two seconds old.
        lost: Why its position is not known any more, so that its calls are refused; empty for nearly all.
        base_url: Base URL of its agent's tools.
        token: Identifies the rollout to clients whose base URL cannot have a path. Only the response that begins a
            rollout shows it; null in every other view.
    """

    id: int
    task: str
    rollout: str
    root: str
    node: str
    start: str
    calls: int
    finished: bool
    state: RolloutState
    used_at: UtcTime
    labels: dict[str, str | int | float] = {}
    lost: str = ""
    created_at: UtcTime
    base_url: str
    token: str | None = None


class StepView(BaseModel):
    """One call of a rollout.

    Attributes:
        turn: Number of the call in the rollout, from 0.
        call: The call; null if its record was forgotten since.
        seconds: How long the tool ran when the call was recorded.
        node: The node that the call led to; null if its record was forgotten since.
        resources: What the call used of the machine when it was recorded; null if nothing is known.
        marks: Which limits the call reached, whether it found its sandbox broken (`broken`), and whether the machine or
            a tool server failed (`machine`).
    """

    turn: int
    outcome: Literal["hit", "miss", "wait", "bypass"]
    record: int
    call: CallView | None
    effect: list[EffectName]
    seconds: float
    node: str | None
    resources: ResourcesView | None = None
    marks: list[Mark] = []


class RolloutDetail(RolloutView):
    """A rollout with its calls.

    Attributes:
        steps: A page of its calls; `limit`, `cursor` and `sort` choose it.
        marks: How many of all its calls have each mark; marks without calls are left out.
    """

    steps: Page[StepView]
    marks: dict[str, int] = {}


def task_view(task: Task, row: dict[str, Any], advice: str) -> TaskView:
    """Return the view of a task; `row` is its summary from the store, and `advice` is its driver's."""
    return TaskView(
        task=task.name,
        spec=task.spec.redacted(),
        default=task.origin is None,
        root=node_name(task.tree.root),
        created_at=task.created_at,
        nodes=row["nodes"],
        rollouts=row["rollouts"],
        running=len(task.rollouts),
        advice=advice,
    )


def rollout_view(row: dict[str, Any], base_url: str, live: Rollout | None, *, used_since: float) -> dict[str, Any]:
    """Return the members of a `RolloutView` of a row of the store; `live`, the running rollout, has a later position.

    A rollout whose last call is older than `used_since` (seconds since 1970) counts as idle.
    """
    return {
        "id": row["id"],
        "task": row["task"],
        "rollout": row["name"],
        "root": f"n{row['root']}",
        "node": f"n{row['node']}" if live is None else node_name(live.node),
        "start": f"n{row['start']}",
        "calls": row["calls"] if live is None else live.calls,
        "finished": bool(row["finished"]),
        "state": _state(row, live, used_since),
        "used_at": row["used_at"],
        "labels": typed(json.loads(row["labels"])),
        "lost": "" if row["finished"] else row["lost"],
        "created_at": row["created_at"],
        "base_url": f"{base_url.rstrip('/')}/t/{row['task']}/r/{row['name']}",
    }


def _state(row: dict[str, Any], live: Rollout | None, used_since: float) -> RolloutState:
    if row["finished"]:
        return "finished"
    if row["lost"]:
        return "lost"
    # A call that is newer than the store's row waits in the journal.
    in_use = live is not None and (live.waiting > 0 or live.calls != row["calls"])
    return "running" if in_use or row["used_at"] >= used_since else "idle"
