"""Two responses are one edge if they are equal but for what engines draw, and only then."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compat.harness.turns import ModelResponse, Path, canonical, delivery, response_of, said, without_response
from tests.scripted_model import _SHAPES, _sse

BODY: dict[str, Any] = {
    "model": "m", "messages": [], "input": [], "contents": [],
    "tools": [{"name": "bash"}, {"type": "function", "function": {"name": "bash"}}, {"name": "shell"}],
}  # fmt: skip


def spoken(path: str, command: str | None, *, stream: bool) -> ModelResponse:
    events, whole = _SHAPES[path](BODY, lambda _: command)
    if stream:
        return ModelResponse(200, "text/event-stream; charset=utf-8", b"".join(map(_sse, events)))
    return ModelResponse(200, "application/json", json.dumps(whole).encode())


@pytest.mark.parametrize("path", _SHAPES)
@pytest.mark.parametrize("stream", [True, False])
@given(st.text(max_size=60), st.text(max_size=60))
def test_ids_chunks_and_usage_do_not_count_and_words_do(path: str, stream: bool, one: str, other: str) -> None:
    first, again = (spoken(path, one, stream=stream) for _ in range(2))
    assert first.body != again.body
    assert canonical(first) == canonical(again)
    different = spoken(path, other, stream=stream)
    assert (canonical(first) == canonical(different)) is (one == other)


@pytest.mark.parametrize("path", _SHAPES)
def test_a_call_of_a_tool_and_an_answer_differ(path: str) -> None:
    assert canonical(spoken(path, "all done", stream=True)) != canonical(spoken(path, None, stream=True))


def test_what_the_model_has_chosen_is_never_left_out() -> None:
    one, other = (
        ModelResponse(200, "application/json", json.dumps({"id": i, "content": [{"input": {"id": i}}]}).encode())
        for i in (1, 2)
    )
    assert canonical(one) != canonical(other)


@pytest.mark.parametrize("name", ["text", "content", "thinking"])
def test_two_calls_of_a_tool_are_not_one_with_both_texts(name: str) -> None:
    """Google's engines send each call as an event of its own, with arguments that may be named like texts."""

    def events(*texts: str) -> ModelResponse:
        calls = ({"functionCall": {"name": "write", "args": {name: text}}} for text in texts)
        data = (json.dumps({"candidates": [{"index": 0, "content": {"parts": [call]}}]}) for call in calls)
        return ModelResponse(200, "text/event-stream", "".join(f"data: {text}\n\n" for text in data).encode())

    assert canonical(events("a", "b")) == canonical(events("a", "b"))
    assert canonical(events("a", "b")) != canonical(events("ab"))
    assert canonical(events("a", "a")) != canonical(events("a"))


def test_the_same_words_in_other_events_are_the_same_and_in_another_order_are_not() -> None:
    def events(*texts: str) -> ModelResponse:
        data = "".join(f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': t}}]})}\n\n" for t in texts)
        return ModelResponse(200, "text/event-stream", data.encode())

    assert canonical(events("ab", "c")) == canonical(events("a", "bc"))
    assert canonical(events("ab", "c")) != canonical(events("c", "ab"))


@pytest.mark.parametrize(("choices", "end"), [("choices", "finish_reason"), ("candidates", "finishReason")])
def test_an_end_with_the_last_words_or_after_them_is_the_same_and_another_end_is_not(choices: str, end: str) -> None:
    def events(*given: tuple[str, str | None]) -> ModelResponse:
        said = [{"index": 0, "delta": {"content": text}, **({end: why} if why else {})} for text, why in given]
        data = "".join(f"data: {json.dumps({choices: [choice]})}\n\n" for choice in said)
        return ModelResponse(200, "text/event-stream", data.encode())

    assert canonical(events(("ab", "stop"))) == canonical(events(("a", None), ("b", None), ("", "stop")))
    assert canonical(events(("ab", "stop"))) != canonical(events(("ab", "length")))
    assert canonical(events(("ab", "stop"))) != canonical(events(("ab", None)))


@pytest.mark.parametrize("path", _SHAPES)
@pytest.mark.parametrize("stream", [True, False])
def test_what_a_model_says_is_shown_once(path: str, stream: bool) -> None:
    shown = "\n".join(said(canonical(spoken(path, "ls -l /root", stream=stream))))
    assert shown.count("ls -l /root") == 1
    assert shown.startswith(("bash\n{", "shell\n{", "shell_command\n{"))
    assert said(canonical(spoken(path, None, stream=stream))) == ["all done"]


def test_bytes_that_are_no_json_are_compared_as_they_are() -> None:
    one, other = (ModelResponse(400, "text/plain", text) for text in (b"\xff no", b"\xff yes"))
    assert canonical(one) == canonical(one) != canonical(other)


@pytest.mark.parametrize("depth", [100, 250, 300, 900, 2000])
@pytest.mark.parametrize(
    "form", ['{"content": [{"name": "x", "input": {"a": %s}}]}', '{"content": %s}', "data: [%s]\n\n"]
)
def test_response_of_any_depth_is_delivered(form: str, depth: int) -> None:
    """What is read may be nested more deeply than what can be written."""
    path = Path(waiting=[{"connection": 1, "target": "/v1/messages", "body": "{}"}])
    body = (form % ("[" * depth + "]" * depth)).encode()
    kind = "application/json" if form.startswith("{") else "text/event-stream"
    call, key = delivery(path, ModelResponse(200, kind, body))
    assert call.body == body
    assert delivery(path, ModelResponse(200, kind, body))[1] == key != delivery(path, ModelResponse(200, kind, b""))[1]


def test_a_recorded_response_goes_to_the_request_of_its_kind() -> None:
    def request(connection: int, tools: int) -> dict[str, Any]:
        body = json.dumps({"model": "m", "tools": [{}] * tools})
        return {"connection": connection, "target": "/v1/messages?beta=true", "body": body}

    path = Path(waiting=[request(1, 0), request(2, 3)])
    asked = delivery(Path(waiting=[request(7, 3)]), ModelResponse(200, "application/json", b"{}"))[0]
    again = response_of(asked)
    assert again is not None
    assert delivery(path, again)[0].arguments["connection"] == 2
    assert delivery(path, ModelResponse(200, "application/json", b"{}"))[0].arguments["connection"] == 1


def test_a_status_is_part_of_the_edge() -> None:
    path = Path(waiting=[{"connection": 1, "target": "/v1/messages"}])
    keys = {delivery(path, ModelResponse(status, "application/json", b"{}"))[1] for status in (200, 400)}
    assert len(keys) == 2


def test_requests_wait_in_their_order_and_leave_with_their_response_or_their_connection() -> None:
    def answer(*requests: int, gone: tuple[int, ...] = (), code: int | None = None) -> bytes:
        ended = None if code is None else {"code": code, "log": ""}
        return json.dumps(
            {"requests": [{"connection": n, "target": "/"} for n in requests], "gone": gone, "exit": ended}
        ).encode()

    def waiting() -> list[int]:
        return [request["connection"] for request in path.waiting]

    path = Path()
    path.advance(without_response(path)[0], answer(1, 2))
    assert (path.turns, waiting()) == (0, [1, 2])
    path.advance(delivery(path, ModelResponse(200, "", b""))[0], answer(3, 4))
    assert (path.turns, waiting()) == (1, [2, 3, 4])
    path.advance(delivery(path, ModelResponse(200, "", b""))[0], answer(gone=(4,), code=1))
    assert (path.turns, waiting(), path.exit) == (2, [3], {"code": 1, "log": ""})
