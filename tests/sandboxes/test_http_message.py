"""Heads of requests to tool servers: what is refused, and which headers are passed on."""

import pytest

from sandboxes.http_message import InvalidRequestError, end_to_end, request_head
from sandboxes.listener import Headers


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("GET", "http://other.example/", ()),
        ("GET", "//x y", ()),
        ("GET", "/x\r\nHost: other", ()),
        ("GET", "", ()),
        ("get", "/", ()),
        ("GET /x", "/", ()),
        ("GET", "/", (("x y", "1"),)),
        ("GET", "/", (("x", "1\r\nhost: other"),)),
        ("GET", "/", (("x", "1\n 2"),)),
        ("GET", "/", (("", "1"),)),
    ],
)
def test_request_part_cannot_smuggle_another_request(method: str, target: str, headers: Headers) -> None:
    with pytest.raises(InvalidRequestError):
        request_head(method, target, headers, "x", 0)


def test_request_has_one_host_and_one_framing() -> None:
    given = (
        ("Host", "other"), ("Content-Length", "99"), ("Transfer-Encoding", "chunked"), ("Connection", "x-a, close"),
        ("X-A", "1"), ("Keep-Alive", "5"), ("Upgrade", "h2c"), ("X-B", "2"),
    )  # fmt: skip
    head = request_head("POST", "/a?b", given, "127.0.0.1:1", 3).decode()
    assert head == (
        "POST /a?b HTTP/1.1\r\nHost: 127.0.0.1:1\r\nX-B: 2\r\nContent-Length: 3\r\nConnection: close\r\n\r\n"
    )
    assert end_to_end(given, without=frozenset({"x-b"})) == (("Host", "other"), ("Content-Length", "99"))
