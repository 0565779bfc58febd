"""All routes of the control plane, under `/api/v1`."""

from typing import Any

from fastapi import APIRouter

from proxy.control.routes import (
    activity,
    audits,
    egress,
    files,
    groups,
    images,
    nodes,
    reports,
    rollouts,
    scratch,
    states,
    tasks,
    trajectories,
    transfer,
    trees,
    videos,
)
from proxy.control.routes.params import PROBLEM

_PROBLEMS: dict[int | str, dict[str, Any]] = {"4XX": PROBLEM, "5XX": PROBLEM}

control_plane = APIRouter(prefix="/api/v1", responses=_PROBLEMS)
for module, tag in (
    (tasks, "tasks"),
    (nodes, "trees"),
    (images, "data"),
    (rollouts, "rollouts"),
    (states, "resources"),
    (egress, "resources"),
    (trees, "trees"),
    (files, "trees"),
    (groups, "rollouts"),
    (scratch, "scratch forks"),
    (activity, "activity"),
    (videos, "resources"),
    (transfer, "data"),
    (trajectories, "data"),
    (audits, "audits"),
    (reports, "activity"),
):
    control_plane.include_router(module.router, tags=[tag])
