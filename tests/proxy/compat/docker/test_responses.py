"""Docker: tails of logs, and filters of lists."""

import pytest

from proxy.compat.docker import requests as docker
from proxy.compat.docker import responses
from proxy.compat.docker.containers import Container, ContainerState
from sandboxes.process_output import Frames, output


def test_tail_keeps_last_lines_in_order() -> None:
    """`docker logs --tail` counts the lines of both streams together."""
    kept = Frames()
    for kind, data in ((1, b"a\nb\n"), (2, b"c\n"), (1, b"d")):
        kept.add(kind, data)
    body = kept.end(0)
    assert output(responses.tail(body, "2"), 1) + output(responses.tail(body, "2"), 2) == b"dc\n"
    assert responses.tail(body, "all") == responses.tail(body, "9") == body


@pytest.mark.parametrize(
    ("filters", "expected"),
    [({}, True), ({"name": ["age"]}, True), ({"name": ["other"]}, False), ({"label": ["a=1", "b"]}, True),
     ({"label": ["a=2"]}, False), ({"status": ["running", "exited"]}, True), ({"ancestor": ["x"]}, True)],
)  # fmt: skip
def test_lists_are_filtered(filters: dict[str, list[str]], *, expected: bool) -> None:
    """Filters of one name are alternatives, except labels, which must all match."""
    spec = docker.container_spec({"Image": "x:1", "Labels": {"a": "1", "b": ""}}, {})
    container = Container("id", "agent", "task", "", "id", spec, 0.0, state=ContainerState.RUNNING)
    assert responses.matches(container, filters) is expected
