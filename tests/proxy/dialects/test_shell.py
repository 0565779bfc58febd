"""Requests to the shell endpoint, as calls."""

import orjson
import pytest

from proxy.dialects import BuiltIn, shell
from proxy.dialects.base import Call, Local, Request
from proxy.refusals import RefusalError
from sandboxes.spec import EnvironmentSpec


def read(body: bytes) -> Call | Local:
    return BuiltIn(shell.parse, EnvironmentSpec()).read(Request("POST", "/exec", (), body))


@pytest.mark.parametrize(
    ("command", "words"), [(r"echo a\u0000b", "NUL"), (r"echo \ud800", "surrogate"), (r"\udc00\ud800", "surrogate")]
)
def test_unrunnable_command_has_a_result(command: str, words: str) -> None:
    """A model wrote the command, and a harness would raise on a 4xx."""
    reply = read(b'{"command": "%s"}' % command.encode())
    assert isinstance(reply, Local)
    result = orjson.loads(reply.body)
    assert (reply.status, result["exit_code"], result["stdout"]) == (200, 126, "")
    assert words in result["stderr"]


@pytest.mark.parametrize(
    "body", [b"{", b'{"command": "\\ud800', b'["\\ud800"]', b'{"command": NaN, "x": "\\ud800"}x', b'{"command": 1}']
)
def test_malformed_request_is_refused(body: bytes) -> None:
    """Those are faults of the harness."""
    with pytest.raises(RefusalError):
        read(body)


def test_whole_surrogate_pair_is_a_character() -> None:
    call = read(rb'{"command": "echo \ud83d\ude00"}')
    assert isinstance(call, Call)
    assert call.call.arguments["command"] == "echo \U0001f600"
