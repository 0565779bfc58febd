"""Requests of the cache API are read as their sender means them, or refused."""

import orjson
import pytest

from proxy.compat.tvcache.requests import key_of, read
from proxy.dialects.base import Request
from proxy.refusals import RefusalError


def request(method: str, target: str, fields: object = None, headers: tuple[tuple[str, str], ...] = ()) -> Request:
    return Request(method, target, headers, b"" if fields is None else orjson.dumps(fields))


def put(**changes: object) -> Request:
    fields = {
        "task_name": "t", "history": ["a", "b"], "env_id": None, "values": ["1"], "tool_exec_times": [0.5],
        "start_idx": 1,
    }  # fmt: skip
    return request("PUT", "/put", fields | changes)


def test_chain_comes_from_the_query() -> None:
    """Calls are repeated members of the query, in UTF-8."""
    question = read(request("GET", "/get?task_name=t&tool_calls=%C3%A9&tool_calls="))
    assert (question.verb, question.task, question.chain, question.whole) == ("get", "t", ("é", ""), False)


def test_whole_chains_are_declared() -> None:
    """By the URL, or by the header that only the synchronous client sends. Their calls have keys of their own."""
    assert read(request("GET", "/whole/get?task_name=t")).whole
    assert read(request("GET", "/get?task_name=t", headers=(("x-task-name", "t"),))).whole
    assert key_of("a", whole=True) != key_of("a", whole=False)


@pytest.mark.parametrize(
    ("changes", "answers"),
    [
        ({}, [b'"1"']),
        ({"values": ["Failed to execute: x"]}, [None]),
        ({"values": ["1", "2"], "start_idx": 0, "tool_exec_times": [0.1, 0.2]}, [b'"1"', b'"2"']),
        # An answer that reads SKIP was left out: which one, nobody knows.
        ({"values": ["2"], "tool_exec_times": [0.1, 0.2]}, [None]),
    ],
)
def test_answers_that_are_certain_are_reported(changes: dict[str, object], answers: list[bytes | None]) -> None:
    """Failures of the client's sandbox are not answers, and neither are values without a call."""
    assert [each.answer for each in read(put(**changes)).reported] == answers


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        (request("GET", "/get"), 422),
        (request("GET", "/get?task_name=%FF"), 400),
        (request("POST", "/get?task_name=t"), 405),
        (request("POST", "/can_extend", {"task_name": "t"}), 501),
        (request("POST", "/prefix_match", {"task_name": "../t"}), 400),
        (request("POST", "/prefix_match", {"task_name": "t", "tool_calls": [1]}), 422),
        (put(values=None), 422),
        (put(values=[], tool_exec_times=[], start_idx=2), 422),
        (put(start_idx=0), 422),
        (put(values=["1", "2", "3"], tool_exec_times=[0.1] * 3, start_idx=-1), 422),
        (put(tool_exec_times=["x"]), 422),
        (put(env_id=7), 422),
        (request("PUT", "/put", [1]), 422),
    ],
)
def test_malformed_requests_are_refused(wrong: Request, status: int) -> None:
    """Each with a status and a text, and never with a trace."""
    with pytest.raises(RefusalError) as refusal:
        read(wrong)
    assert refusal.value.status == status
