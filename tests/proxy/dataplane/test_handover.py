"""The first of several requests that came together."""

from proxy.dataplane.handover import first_scope


def test_first_request_decides() -> None:
    """The connection goes to its worker, whatever comes behind it."""
    held = b"GET /t/a/x HTTP/1.1\r\nhost: h\r\n\r\nGET /t/b/x HTTP/1.1\r\nhost: h\r\n\r\n"
    scope = first_scope(held, "http")
    assert scope is not None
    assert (scope["raw_path"], scope["headers"]) == (b"/t/a/x", [(b"host", b"h")])


def test_other_bytes_have_no_scope() -> None:
    assert first_scope(b"\x16\x03\x01\r\n\r\nGET / HTTP/1.1\r\n\r\n", "http") is None
