"""Calls and answers in few bytes come back as they were, and foreign bytes are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.hits.calls import Heads, KnownAnswer, pack_call, pack_known, unpack_call, unpack_known
from proxy.cluster.messages import CallQuestion, Kind, MessageError
from proxy.cluster.protocol import Position

HEAD = b"POST /t/a%20b/r/1/x?q=%2F HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nX-A: \xe9\r\nContent-Length: 7"


@given(st.binary(max_size=100), st.booleans(), st.integers(0, 2**64 - 1))
def test_call_comes_back(body: bytes, is_https: bool, number: int) -> None:
    """It is the call that travels as a message too, so that both ways have the same answer."""
    call = unpack_call(pack_call(3, number, 7, b"a b", HEAD, body, is_https=is_https), Heads())
    headers = [("host", "h"), ("x-a", "1"), ("x-a", "\xe9"), ("content-length", "7")]
    scheme = "https" if is_https else "http"
    question = CallQuestion(
        "a b", 3, number, 7, "POST", "/t/a%20b/r/1/x", "q=%2F", headers, scheme, Kind.CALL, body
    )  # fmt: skip
    assert (call.task, call.view, call.number, call.oldest, call.kind) == (*question[:4], question.kind)
    assert (call.body, call.scope()) == (question.body, question.scope())


def test_scopes_share_nothing() -> None:
    """Whoever gets the scope of a remembered head may change it."""
    heads = Heads()
    content = pack_call(3, 9, 7, b"t", HEAD, b"", is_https=False)
    scope = unpack_call(content, heads).scope()
    unchanged = unpack_call(content, heads).scope()
    scope["headers"].clear()
    scope["query_string"] = b""
    assert unpack_call(content, heads).scope() == unchanged


def test_known_answer_comes_back() -> None:
    answer = KnownAnswer(3, 1 << 40, Position(2, 1 << 41), b"HTTP/1.1 200 OK\r\n\r\nx")
    assert unpack_known(pack_known(*answer)) == answer


@pytest.mark.parametrize(
    "head", [b"", b"nonsense", b"GET / HTTP/1.0", b"GET http://x/ HTTP/1.1", b"GET / HTTP/1.1\r\nConnection: close"]
)
def test_foreign_heads_are_refused(head: bytes) -> None:
    with pytest.raises(MessageError):
        unpack_call(pack_call(3, 9, 7, b"t", head, b"", is_https=False), Heads())


def test_cut_frames_are_refused() -> None:
    content = pack_call(3, 9, 7, b"t", HEAD, b"", is_https=False)
    for end in range(len(content)):
        with pytest.raises(MessageError):
            unpack_call(content[:end], Heads())
    with pytest.raises(MessageError):
        unpack_known(b"\0" * 27)
