"""Calls and answers in few bytes come back as they were, and foreign bytes are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.hits.calls import HeadCall, Heads, KnownAnswer, passed_call
from proxy.cluster.messages import CallQuestion, Kind
from proxy.cluster.protocol import Position
from sandboxes.ipc.codec import decode_bytes, encode
from sandboxes.ipc.frames import MalformedFrameError

HEAD = b"POST /t/a%20b/r/1/x?q=%2F HTTP/1.1\r\nHost: h\r\nX-A: 1\r\nX-A: \xe9\r\nContent-Length: 7"


@given(st.binary(max_size=100), st.booleans(), st.integers(0, 2**64 - 1))
def test_call_comes_back(body: bytes, is_https: bool, number: int) -> None:
    """It is the call that travels as a message too, so that both ways have the same answer."""
    call = passed_call(encode(HeadCall("a b", 3, number, 7, HEAD, is_https, body)), Heads())
    headers = [("host", "h"), ("x-a", "1"), ("x-a", "\xe9"), ("content-length", "7")]
    scheme = "https" if is_https else "http"
    question = CallQuestion(
        "a b", 3, number, 7, "POST", "/t/a%20b/r/1/x", "q=%2F", headers, scheme, Kind.CALL, body
    )  # fmt: skip
    assert (call.task, call.view, call.number, call.oldest, call.kind) == ("a b", 3, number, 7, Kind.CALL)
    assert (call.body, call.scope()) == (question.body, question.scope())


def test_scopes_share_nothing() -> None:
    """Whoever gets the scope of a remembered head may change it."""
    heads = Heads()
    content = encode(HeadCall("t", 3, 9, 7, HEAD, False, b""))
    scope = passed_call(content, heads).scope()
    unchanged = passed_call(content, heads).scope()
    scope["headers"].clear()
    scope["query_string"] = b""
    assert passed_call(content, heads).scope() == unchanged


def test_known_answer_comes_back() -> None:
    answer = KnownAnswer(3, 1 << 40, Position(2, 1 << 41), b"HTTP/1.1 200 OK\r\n\r\nx")
    assert decode_bytes(encode(answer), KnownAnswer) == answer


@pytest.mark.parametrize(
    "head", [b"", b"nonsense", b"GET / HTTP/1.0", b"GET http://x/ HTTP/1.1", b"GET / HTTP/1.1\r\nConnection: close"]
)
def test_foreign_heads_are_refused(head: bytes) -> None:
    with pytest.raises(MalformedFrameError):
        passed_call(encode(HeadCall("t", 3, 9, 7, head, False, b"")), Heads())


def test_cut_frames_are_refused() -> None:
    content = encode(HeadCall("t", 3, 9, 7, HEAD, False, b""))
    for end in range(len(content)):
        with pytest.raises(MalformedFrameError):
            passed_call(content[:end], Heads())
    with pytest.raises(MalformedFrameError):
        decode_bytes(b"\0" * 27, KnownAnswer)
