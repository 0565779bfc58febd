"""E2B: events of processes."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compat.e2b import responses
from proxy.compat.e2b.connect_rpc import ConnectError
from sandboxes.process_output import END, ERR, OUT, Frames, frame


@given(
    st.lists(st.tuples(st.sampled_from([OUT, ERR]), st.binary(min_size=1)), max_size=5),
    st.integers(0, 40),
    st.booleans(),
)
def test_events_carry_output_after_skipped_bytes(pieces: list[tuple[int, bytes]], skip: int, terminal: bool) -> None:
    """The events of a result carry its whole output, without the bytes that the client has received already."""
    frames = Frames()
    for kind, data in pieces:
        frames.add(kind, data)
    received = b""
    for event in responses.output(frames.end(0), terminal=terminal, skip=skip):
        assert terminal == ("pty" in event["event"]["data"])
        received += b"".join(base64.b64decode(data) for data in event["event"]["data"].values())
    assert received == b"".join(data for _, data in pieces)[skip:]


def test_end_event_describes_exit() -> None:
    """Exit codes, signals and deadlines appear in the last event as envd reports them."""

    def ended(**fields: Any) -> Any:
        return responses.ended(frame(END, json.dumps({"timed_out": False, "truncated": False, **fields}).encode()))

    assert ended(exit_code=None) is None
    assert ended(exit_code=0)["event"]["end"] == {"exitCode": 0, "exited": True, "status": "exit status 0"}
    assert ended(exit_code=7)["event"]["end"]["error"] == "exit status 7"
    assert ended(exit_code=137)["event"]["end"]["exitCode"] == 137
    killed = {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed"}
    assert ended(exit_code=137, signal=9)["event"]["end"] == killed
    with pytest.raises(ConnectError, match="deadline"):
        ended(exit_code=124, timed_out=True)
