"""All routes of the control plane, under `/api/v1`."""

from starlette.routing import BaseRoute

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

_MODULES = (
    tasks, nodes, images, rollouts, states, egress, trees, files, groups, scratch, activity, videos, transfer,
    trajectories, audits, reports,
)  # fmt: skip
control_routes: list[BaseRoute] = [route for module in _MODULES for route in module.router.routes]
