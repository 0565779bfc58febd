"""Which worker a request belongs to."""

from typing import Any

import pytest

from proxy.shares import Share
from proxy.workers.routing import Routes

WORKERS = 1 << 16
"""So many that two names hardly ever have the same worker."""


def scope(target: str, **headers: str) -> dict[str, Any]:
    path, _, query = target.partition("?")
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"raw_path": path.encode(), "path": path, "query_string": query.encode(), "headers": named}


@pytest.mark.parametrize(
    ("target", "headers", "name"),
    [
        ("/t/a%20b/r/1/shell/exec", {}, "a b"),
        ("/t/task/mcp", {}, "task"),
        ("/ng-rollout/task-7/seed_session", {}, "task"),
        ("/e/shell/exec", {"x_forkpoint_task": "task", "x_forkpoint_rollout": "1"}, "task"),
        ("/e/shell/exec", {"authorization": "Bearer fp_token"}, "fp_token"),
        ("/api/v1/tasks/task", {}, "task"),
        ("/api/v1/tasks/a%2Fb/nodes/n1", {}, "a/b"),
        ("/api/v1/events?limit=3&task=task", {}, "task"),
    ],
)
def test_requests_belong_to_their_task(target: str, headers: dict[str, str], name: str) -> None:
    """Twice, because the second look-up is remembered."""
    routes = Routes(Share(0, WORKERS))
    assert [routes.worker_of(scope(target, **headers)) for _ in range(2)] == [Share(0, WORKERS).worker_of(name)] * 2


@pytest.mark.parametrize("target", ["/", "/healthz", "/api/v1/tasks", "/api/v1/tasks/", "/e/shell/exec", "/ui/", "/e/"])
def test_requests_without_a_task_stay(target: str) -> None:
    assert Routes(Share(0, WORKERS)).worker_of(scope(target)) is None
