"""Titles: a call in one line, for lists of nodes."""

import pytest

from proxy.control.call_titles import title
from sandboxes.calls import ToolCall


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (ToolCall("shell", "exec", {"command": "ls -l", "timeout_s": 9.0}), "ls -l"),
        (ToolCall("shell", "exec", {"command": "ls", "service": "db"}), "db: ls"),
        (ToolCall("sql", "query", {"sql": "SELECT 1"}), "SELECT 1"),
        (ToolCall("shell", "get", {"path": "/f"}), 'shell/get {"path":"/f"}'),
        (
            ToolCall("rex", "run", {"method": "POST", "target": "/run", "headers": [["a", "b"]]}, b'{"command":"ls"}'),
            'POST rex/run {"command":"ls"}',
        ),
        (ToolCall("rex", "GET /up", {"method": "GET", "target": "/up?x=1", "headers": []}), "GET rex/up?x=1"),
    ],
)  # fmt: skip
def test_title_shows_what_a_call_does(call: ToolCall, expected: str) -> None:
    """Headers of a request to a tool server come before its body, and are nearly always the same."""
    assert title(call) == expected
