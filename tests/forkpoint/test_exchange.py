"""Responses become results and errors; a busy proxy is asked again. All of it is pure."""

import inspect
import json
from typing import Any

import pytest

from forkpoint import ForkpointError
from forkpoint.client import AsyncRollout, Rollout
from forkpoint.exchange import MAX_PAUSE_S, ApiRequest, Reply, error_of, path_of, retry_pause_s
from forkpoint.results import how_answered
from proxy.dialects.shell import ExecArguments

BUSY = json.dumps({"type": "urn:forkpoint:overloaded", "title": "All sandboxes are busy", "detail": "Wait."}).encode()


def busy(retry_after: str = "5", *, status: int = 503, body: bytes = BUSY) -> Reply:
    return Reply(status, {"retry-after": retry_after}, body)


@pytest.mark.parametrize(
    ("reply", "spent_s", "pause_s"),
    [
        (busy(), 0.0, 5.0),
        (busy(status=429), 0.0, 5.0),
        (busy("3600"), 0.0, MAX_PAUSE_S),
        (busy("-1"), 0.0, 0.0),
        (busy(), 116.0, None),
        (busy("soon"), 0.0, None),
        (Reply(503, {}, BUSY), 0.0, None),
        (busy(body=b"upstream is down"), 0.0, None),
        (busy(status=409), 0.0, None),
        (busy(status=200), 0.0, None),
    ],
)
def test_only_the_proxys_own_refusals_are_sent_again(reply: Reply, spent_s: float, pause_s: float | None) -> None:
    assert retry_pause_s(reply, spent_s=spent_s, patience_s=120.0) == pause_s


def test_error_has_the_problem_of_the_response() -> None:
    error = error_of(busy())
    assert (error.status, error.slug, error.detail) == (503, "overloaded", "Wait.")
    assert str(error) == "503 overloaded: Wait."


@pytest.mark.parametrize("body", [b"\xff<html>", b"[]", b'{"type": 7, "detail": null}', b""])
def test_error_of_any_body_can_be_raised(body: bytes) -> None:
    error = error_of(Reply(502, {}, body))
    assert (error.status, error.slug) == (502, "")


def test_refusal_of_a_request_raises() -> None:
    request: ApiRequest[int] = ApiRequest("GET", "/", lambda reply: reply.status)
    with pytest.raises(ForkpointError, match="409"):
        request.result(Reply(409, {}, b""))
    assert request.result(Reply(201, {}, b"")) == 201


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ("forkpoint; hit", "hit"),
        ("forkpoint; fwd=miss; stored", "miss"),
        ("forkpoint; fwd=miss; collapsed", "wait"),
        ("forkpoint; fwd=bypass", "bypass"),
        # The tree knew the call, and not its state.
        ("forkpoint; fwd=miss; stored; detail=not-kept", "miss"),
        ("forkpoint; detail=hit-or-miss", None),
        ("other; hit", None),
    ],
)
def test_headers_say_how_a_call_was_answered(status: str, outcome: str | None) -> None:
    timing = "tool;dur=12.500, restore;dur=3.000, replay;dur=0.000, wait;dur=1.000, cpu;dur=250.000, memory;desc=0"
    headers = {
        "cache-status": status,
        "server-timing": timing,
        "x-forkpoint-node": "n7",
        "x-forkpoint-marks": "disk, output",
    }
    answered: dict[str, Any] = how_answered(Reply(200, headers, b""))
    assert answered == {
        "outcome": outcome, "node": "n7", "tool_s": 0.0125, "restore_s": 0.003, "replay_s": 0.0, "wait_s": 0.001,
        "cpu_s": 0.25, "peak_bytes": 0, "read_bytes": None, "written_bytes": None, "marks": ("disk", "output"),
    }  # fmt: skip


def test_segments_of_paths_are_quoted() -> None:
    assert path_of("a/b", "c d", "é", "x:1@2") == "/a%2Fb/c%20d/%C3%A9/x:1@2"


def test_operations_keep_signature_and_docstring() -> None:
    """`help` and editors show an operation as the method that it is, on both kinds of objects."""
    for kind in (Rollout, AsyncRollout):
        assert inspect.signature(kind.exec).parameters.keys() == {"self", *ExecArguments.model_fields}
        assert (inspect.getdoc(kind.exec) or "").startswith("Run a command in the rollout's shell.")
