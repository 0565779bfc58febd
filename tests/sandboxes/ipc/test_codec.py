"""Messages between processes: what is encoded is decoded to the same value, and everything else is refused."""

import contextlib
import json
import os
from dataclasses import fields
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.effects import StateDigest
from sandboxes.ipc import launch_messages, messages, server_messages, state_messages
from sandboxes.ipc.codec import IpcMessage, answers_of, decode, encode
from sandboxes.ipc.codec import messages as all_messages
from sandboxes.ipc.frames import HEADER, Inbox, MalformedFrameError, Message, pack

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
OBJECTS = st.dictionaries(st.text(), JSON, max_size=3)


def instances(cls: type[IpcMessage]) -> st.SearchStrategy[IpcMessage]:
    """Return a strategy for the instances of a message class, with JSON where its members are plain JSON."""
    named = {
        "arguments": OBJECTS, "sessions": st.dictionaries(st.text(), OBJECTS, max_size=2),
        "pristine": st.none() | OBJECTS, "checkpoint": st.none() | OBJECTS,
    }  # fmt: skip
    plain = {field.name for field in fields(cls)} & named.keys()  # type: ignore[arg-type]
    # Pause and freeze have a flag of the same name.
    if cls in {state_messages.Pause, state_messages.FreezeContainer}:
        plain -= {"checkpoint"}
    return st.builds(cls, **{name: named[name] for name in plain})


def as_frame(message: IpcMessage) -> Message:
    """Return a message as the receiver of its bytes gets it, with as few descriptors as it may have."""
    inbox = Inbox()
    least = message.descriptors[0]
    inbox.feed(pack(encode(message), b"body", least), [os.open("/dev/null", os.O_RDONLY) for _ in range(least)])
    frame = inbox.take()
    assert frame is not None
    return frame


@pytest.mark.parametrize("cls", all_messages().values(), ids=lambda cls: cls.op)
@given(data=st.data())
def test_decode_inverts_encode(cls: type[IpcMessage], data: st.DataObject) -> None:
    message = data.draw(instances(cls))
    frame = as_frame(message)
    try:
        assert decode(frame).message == message
    finally:
        for fd in frame.fds:
            os.close(fd)


@given(
    st.one_of([instances(cls) for cls in all_messages().values() if not cls.descriptors[0]]),
    st.booleans(),
    st.randoms(),
)
def test_missing_and_unknown_members_are_refused(message: IpcMessage, drop: bool, random: Random) -> None:
    """The error names the message, so that a log line says which conversation broke."""
    encoded = encode(message)
    members = sorted(encoded.keys() - {"op"})
    broken = dict(encoded, surplus=1)
    if members and drop:
        broken = dict(encoded)
        del broken[random.choice(members)]
    with pytest.raises(MalformedFrameError, match=message.op):
        decode(Message(broken, b"", []))


@given(
    OBJECTS | st.fixed_dictionaries({"op": JSON | st.sampled_from(sorted(all_messages()))}, optional={"error": JSON})
)
def test_any_object_is_decoded_or_refused(fields: dict[str, Any]) -> None:
    with contextlib.suppress(MalformedFrameError):
        assert isinstance(decode(Message(fields, b"", [])).message, IpcMessage)


@given(st.binary(max_size=64))
def test_any_bytes_are_framed_or_refused(data: bytes) -> None:
    inbox = Inbox()
    inbox.feed(data, [])
    try:
        frame = inbox.take()
        if frame is not None:
            decode(frame)
    except MalformedFrameError:
        pass


DONE = {
    "op": "call_done", "seconds": 0.5, "changed_session": False, "changed_processes": False, "changed_files": True,
    "settling": False, "host_full": False, "order": None, "discard": False, "seal": False,
    "outcome": {"op": "file_outcome", "status": 200, "media_type": "text/plain", "sql": None},
    "state": {"digest": {"exact": "00", "content": "ff"}, "witness": None, "restless": False},
}  # fmt: skip


def test_nested_records_are_decoded() -> None:
    done = decode(Message(json.loads(json.dumps(DONE)), b"", [])).message
    assert isinstance(done, messages.CallDone)
    assert done.state.digest == StateDigest(b"\x00", b"\xff")
    assert done.outcome == messages.FileOutcome(200, "text/plain")


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("seconds", "1"), ("seconds", True), ("seconds", float("nan")), ("seconds", float("inf")), ("seconds", 10**400),
        ("changed_files", 1), ("settling", None), ("outcome", None), ("outcome", {"op": "exec"}),
        ("outcome", {"op": ["file_outcome"]}), ("state", []),
        ("state", {"digest": {"exact": "0g", "content": ""}, "witness": None, "restless": False}),
        ("state", {"digest": {"exact": 1, "content": ""}, "witness": None, "restless": False}),
        ("state", {"digest": None, "witness": None}),
    ],
)  # fmt: skip
def test_wrong_types_are_refused(member: str, value: object) -> None:
    with pytest.raises(MalformedFrameError, match=f"call_done.*{member}"):
        decode(Message({**DONE, member: value}, b"", []))


@pytest.mark.parametrize("delta", [[], {"a": 1}, {"a": ["x"]}, {"a": ["x", "y"]}, {"a": [1, 2]}, {"a": ["x", 1, 2]}])
def test_malformed_deltas_are_refused(delta: object) -> None:
    with pytest.raises(MalformedFrameError, match=r"described.*delta"):
        decode(Message({"op": "described", "delta": delta, "sessions": {}, "pristine": None}, b"", []))


def test_deep_nesting_is_refused() -> None:
    """A parser that recurses must end with an error of ours, not with one that leaves the channel open."""
    text = b'{"op":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    inbox = Inbox()
    inbox.feed(HEADER.pack(len(text), 0, 0) + text, [])
    with pytest.raises(MalformedFrameError):
        inbox.take()


def test_wrong_number_of_descriptors_is_refused() -> None:
    """A message with a wrong number of descriptors is refused, and the descriptors are closed."""
    fd = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(MalformedFrameError, match="done: 1 descriptors"):
        decode(Message({"op": "done"}, b"", [fd]))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_requests_name_their_answers() -> None:
    assert answers_of(messages.RunCommand) == (messages.CallDone,)
    expected = (state_messages.NotFreezable, state_messages.ProcessTree, state_messages.LayerState)
    assert answers_of(state_messages.Pause) == expected
    assert answers_of(launch_messages.ForkSandbox) == (launch_messages.Forked,)
    assert answers_of(server_messages.FinishServerCall) == (messages.CallDone,)


def test_the_table_in_the_docstring_is_complete() -> None:
    """Each message of sandboxes is in the table of `sandboxes.ipc.messages`, except parts of others and `failed`."""
    parts = {"command_outcome", "file_outcome", "process_outcome", "server_outcome"}
    assert messages.__doc__ is not None
    ours = {op for op, message in all_messages().items() if message.__module__.startswith("sandboxes.")}
    missing = {op for op in ours if op not in parts and op not in messages.__doc__}
    assert missing - {"failed"} == set()
