"""Recorded calls of SQL, video and API tools become the requests that make them again."""

from typing import Any

import pytest

from proxy.cli.replay.workload import request_of


@pytest.mark.parametrize(
    ("call", "method", "path", "arguments"),
    [
        ({"tool": "sql", "args": {"sql": "SELECT 1"}}, "POST", "sql/query", {"sql": "SELECT 1"}),
        ({"tool": "sql/schema", "args": {"table": "t"}}, "POST", "sql/schema", {"table": "t"}),
        ({"tool": "video/get_frame", "args": {"t": 1.5}}, "POST", "video/get_frame", {"t": 1.5}),
        ({"request": {"path": "/shop/orders?x=1", "json": {"a": 1}}}, "POST", "shop/orders?x=1", {"a": 1}),
        ({"request": {"path": "shop/orders", "method": "GET"}}, "GET", "shop/orders", None),
    ],
)  # fmt: skip
def test_call_becomes_its_request(call: dict[str, Any], method: str, path: str, arguments: Any) -> None:
    request = request_of(call, 3)
    assert (request.index, request.method, request.path, request.arguments) == (3, method, path, arguments)
    assert not request.is_command
