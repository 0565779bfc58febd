"""Heads of requests to tool servers: what is refused, and which headers are passed on."""

import pytest

from sandboxes.http_message import InvalidRequestError, end_to_end, of_tool_server, request_head
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


def test_tool_servers_cannot_speak_for_the_proxy() -> None:
    """Neither as the proxy itself, nor for its origin; their own headers reach the client."""
    kept = (("Content-Type", "text/plain"), ("Set-Cookie", "a=b"), ("X-Own", "1"))
    dropped = (
        ("X-Forkpoint-Node", "n1"), ("x-forkpoint-token", "t"), ("Cache-Status", "forkpoint; hit"),
        ("Server-Timing", "tool"),
        ("Access-Control-Allow-Origin", "*"), ("access-control-allow-credentials", "true"), ("Alt-Svc", "h3=evil:443"),
        ("Strict-Transport-Security", "max-age=1"), ("Clear-Site-Data", '"*"'), ("Connection", "close, x-hop"),
        ("X-Hop", "1"), ("X-Broken", "a\x01b"),
        ("Transfer-Encoding", "chunked"), ("Trailer", "x-forkpoint-node"), ("Keep-Alive", "9"),
    )  # fmt: skip
    assert of_tool_server((*dropped[:7], *kept, *dropped[7:])) == kept
