"""The task that a request names."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.cluster.named_task import NamedTask, named_task
from proxy.http.access import ALL
from proxy.http.address import Address


def named(method: str, path: str) -> NamedTask | None:
    access = SimpleNamespace(admit=lambda _scope, _tokens: ALL)
    addressing = SimpleNamespace(address=lambda _: Address("t", "1", "shell", "exec"))
    path, _, query = path.partition("?")
    scope = {"method": method, "path": path, "query_string": query.encode(), "headers": []}
    return named_task(scope, cast("Any", access), cast("Any", addressing))


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/t/t/r/1/shell/exec", NamedTask("t", "1", creates=True, endpoint="shell")),
        ("PUT", "/api/v1/tasks/t", NamedTask("t", "", creates=True)),
        ("GET", "/api/v1/tasks/t/tree", NamedTask("t", "", creates=False)),
        ("DELETE", "/api/v1/tasks/t", NamedTask("t", "", creates=False)),
        ("PATCH", "/api/v1/tasks/t/rollouts/1/labels", NamedTask("t", "", creates=False)),
        ("DELETE", "/api/v1/tasks/t/nodes/n1", NamedTask("t", "", creates=False)),
        ("POST", "/api/v1/tasks/t/import", NamedTask("t", "", creates=True)),
        ("POST", "/api/v1/tasks/t/verify", NamedTask("t", "", creates=True)),
        ("GET", "/api/v1/events?limit=3&task=t", NamedTask("t", "", creates=False)),
        ("GET", "/api/v1/events", None),
        ("GET", "/healthz", None),
    ],
)
def test_path_names_the_task(method: str, path: str, expected: NamedTask | None) -> None:
    assert named(method, path) == expected
