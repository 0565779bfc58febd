"""The responses of connections that are closed."""

import pytest

from proxy.dataplane import closing_responses


@pytest.mark.parametrize("name", ["INVALID", "TOO_LARGE", "TOO_SLOW", "CROWDED"])
def test_response_is_whole_and_closes(name: str) -> None:
    head, _, text = getattr(closing_responses, name).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 ")
    assert head.endswith(b"content-length: %d\r\nconnection: close" % len(text))
