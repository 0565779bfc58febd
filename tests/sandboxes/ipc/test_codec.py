"""Messages between processes: what is encoded is decoded to the same value, and everything else is refused."""

import contextlib
import os
from typing import Any

import msgspec
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from proxy.cluster import messages as cluster_messages
from proxy.workers import siblings
from sandboxes.effects import StateDigest
from sandboxes.egress import messages as egress_messages
from sandboxes.ipc import launch_messages, messages, server_messages, state_messages
from sandboxes.ipc.codec import IpcMessage, answers_of, decode, decode_bytes, encode, pack_message
from sandboxes.ipc.codec import messages as all_messages
from sandboxes.ipc.frames import Inbox, IpcFrame, MalformedFrameError
from sandboxes.postgres import messages as postgres_messages
from sandboxes.sqlite import messages as sqlite_messages
from sandboxes.video import messages as video_messages
from sandboxes.workers import messages as worker_messages

MODULES = (
    cluster_messages, egress_messages, launch_messages, messages, postgres_messages, server_messages, siblings,
    sqlite_messages, state_messages, video_messages, worker_messages,
)  # fmt: skip
# Tests have messages of their own, which are there or not by the order in which their modules are imported.
NAMES = {module.__name__ for module in MODULES}
OURS = [cls for _, cls in sorted(all_messages().items()) if cls.__module__ in NAMES]

# Names of files are bytes; a text has surrogates for those that are no UTF-8.
TEXTS = st.text() | st.binary(max_size=9).map(lambda name: name.decode(errors="surrogateescape"))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=5
)
SHALLOW = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(TEXTS, st.lists(SCALARS, max_size=2), max_size=2)
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(str, TEXTS)
OBJECTS = st.dictionaries(TEXTS, JSON, max_size=3)
REPORTS = st.dictionaries(TEXTS, SHALLOW, max_size=3)


def instances(cls: type[IpcMessage]) -> st.SearchStrategy[IpcMessage]:
    """Return a strategy for the instances of a message class, with JSON where its members are plain JSON."""
    named = {
        "arguments": OBJECTS, "sessions": st.dictionaries(TEXTS, REPORTS, max_size=2), "pristine": st.none() | REPORTS,
        "checkpoint": st.none() | REPORTS, "info": REPORTS, "settings": REPORTS,
    }  # fmt: skip
    plain = {field.name for field in msgspec.structs.fields(cls)} & named.keys()
    # Pause has a flag of the same name, and settings of SQLite are numbers.
    if cls is state_messages.Pause:
        plain -= {"checkpoint"}
    if cls.__module__.startswith("sandboxes.sqlite"):
        plain -= {"settings"}
    return st.builds(cls, **{name: named[name] for name in plain})


def as_frame(message: IpcMessage) -> IpcFrame:
    """Return a message as the receiver of its bytes gets it, with as few descriptors as it may have."""
    inbox = Inbox()
    least = message.descriptors[0]
    inbox.feed(pack_message(message, b"body", least), [os.open("/dev/null", os.O_RDONLY) for _ in range(least)])
    frame = inbox.take()
    assert frame is not None
    return frame


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.op)
@settings(max_examples=25)
@given(data=st.data())
def test_decode_inverts_encode(cls: type[IpcMessage], data: st.DataObject) -> None:
    """Also with names of files that are no UTF-8, and with integers of any size."""
    message = data.draw(instances(cls))
    frame = as_frame(message)
    try:
        assert decode(frame).message == message
    finally:
        for fd in frame.fds:
            os.close(fd)


def packed(content: object) -> IpcFrame:
    return IpcFrame(msgspec.msgpack.encode(content), b"", [])


@given(
    st.one_of([instances(cls) for cls in OURS if not cls.descriptors[0]]),
    st.booleans(),
)
def test_missing_and_unknown_members_are_refused(message: IpcMessage, drop: bool) -> None:
    members = msgspec.to_builtins(message, builtin_types=(bytes,))
    required = [field.name for field in msgspec.structs.fields(message) if field.required]
    try:
        frame = packed(members[: len(required)] if required and drop else [*members, 1])
    except (UnicodeEncodeError, OverflowError):
        reject()
    with pytest.raises(MalformedFrameError):
        decode(frame)


@given(JSON | st.tuples(JSON | st.sampled_from([cls.op for cls in OURS]), JSON, JSON))
def test_any_value_is_decoded_or_refused(value: object) -> None:
    with contextlib.suppress(MalformedFrameError, UnicodeEncodeError, OverflowError):
        assert isinstance(decode(packed(value)).message, IpcMessage)


FAILED = encode(messages.Failed("x"))


@given(st.binary(max_size=64) | st.builds(lambda new, at: new + FAILED[at:], st.binary(max_size=9), st.integers(0, 9)))
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    inbox = Inbox()
    inbox.feed(data, [])
    with contextlib.suppress(MalformedFrameError):
        inbox.take()
    with contextlib.suppress(MalformedFrameError):
        assert isinstance(decode_bytes(data), IpcMessage)


DONE = messages.CallDone(
    messages.FileOutcome(200, "text/plain"), 0.5, changed_session=False, changed_processes=False, changed_files=True,
    settling=False, host_full=False, short=False,
    state=messages.StateSummary(StateDigest(b"\0", b"\xff"), None, restless=False),
)  # fmt: skip


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("seconds", "1"), ("seconds", True), ("seconds", float("nan")), ("seconds", float("inf")),
        ("changed_files", 1), ("settling", None), ("outcome", None), ("outcome", ["exec", "main", 1.0]),
        ("outcome", [["file_outcome"], 200, ""]), ("state", {}),
        ("state", [{"exact": "00", "content": b""}, None, False]),
        ("state", [{"exact": 1, "content": b""}, None, False]),
        ("state", [None, None]),
    ],
)  # fmt: skip
def test_wrong_types_are_refused(member: str, value: object) -> None:
    """The error names the message, so that a log line says which conversation broke."""
    members = msgspec.to_builtins(DONE, builtin_types=(bytes,))
    members[1 + DONE.__struct_fields__.index(member)] = value
    with pytest.raises(MalformedFrameError, match="call_done"):
        decode(packed(members), messages.CallDone)


def test_only_expected_messages_are_decoded() -> None:
    with pytest.raises(MalformedFrameError, match="it is not done or failed"):
        decode(IpcFrame(encode(DONE), b"", []), messages.Done, messages.Failed)


@pytest.mark.parametrize("delta", [[], {"a": 1}, {"a": ["x"]}, {"a": ["x", "y"]}, {"a": [1, 2]}, {"a": ["x", 1, 2]}])
def test_malformed_deltas_are_refused(delta: object) -> None:
    with pytest.raises(MalformedFrameError, match="described"):
        decode(packed(["described", delta, {}, None]), messages.Described)


def test_names_that_are_no_text_arrive() -> None:
    """A file's name may be any bytes; a report of it must name the same file."""
    name = os.fsdecode(b"caf\xe9\xff \xf0\x9f")
    described = messages.Described({name: ("changed", 1 << 70)}, {"main": {"cwd": name}}, None)
    assert decode(as_frame(described)).message == described
    call = messages.RunFileOperation("get", {"path": name}, 1.0)
    assert decode(as_frame(call)).message == call


DEEP_JSON = b"\x92\xa4json\xda\xff\xff" + b"[" * 65535


@pytest.mark.parametrize("nested", [b"\x91" * 100_000, b"\x81\xa1a" * 100_000, DEEP_JSON])
def test_deep_nesting_is_refused(nested: bytes) -> None:
    """A parser that recurses must end with an error of ours, not with one that leaves the channel open."""
    with pytest.raises(MalformedFrameError):
        decode_bytes(nested)


@pytest.mark.parametrize("session", [{"a": {"b": {"c": {"d": {}}}}}, {"a": b""}, {"a": {1: 2}}, {"a": float("nan")}])
def test_a_report_holds_json_only(session: object) -> None:
    """It is written to disk as JSON, and lists in lists would make room for all of the frame again and again."""
    with pytest.raises(MalformedFrameError):
        decode(packed(["described", None, {"main": session}, None]))


def test_wrong_number_of_descriptors_is_refused() -> None:
    """A message with a wrong number of descriptors is refused, and the descriptors are closed."""
    fd = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(MalformedFrameError, match="done: 1 descriptors"):
        decode(IpcFrame(encode(messages.Done()), b"", [fd]))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_requests_name_their_answers() -> None:
    assert answers_of(messages.RunCommand) == (messages.CallDone,)
    expected = (state_messages.NotFreezable, state_messages.ProcessTree, state_messages.LayerState)
    assert answers_of(state_messages.Pause) == expected
    assert answers_of(launch_messages.ForkSandbox) == (launch_messages.Forked,)
    assert answers_of(server_messages.FinishServerCall) == (messages.CallDone,)
