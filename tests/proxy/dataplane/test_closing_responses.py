"""The responses of connections that are closed."""

import json

import pytest

from proxy.dataplane import closing_responses


@pytest.mark.parametrize("name", ["INVALID", "TOO_LARGE", "TOO_SLOW", "CROWDED"])
def test_response_is_a_whole_problem_and_closes(name: str) -> None:
    """Clients that read the details of problems get some from every response of an error."""
    head, _, body = getattr(closing_responses, name).partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    assert {b"content-type: application/problem+json", b"content-length: %d" % len(body)} < set(headers)
    assert headers[-1] == b"connection: close"
    problem = json.loads(body)
    assert status == f"HTTP/1.1 {problem['status']} {problem['title']}".encode()
    assert problem["type"].startswith("urn:forkpoint:")
