"""What E2B's requests mean, and Connect's envelopes: the pure part."""

import base64
import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compat.e2b import connect_rpc as connect
from proxy.compat.e2b import requests as e2b
from proxy.compat.e2b import responses as e2b_told
from proxy.compat.e2b.connect_rpc import ConnectError
from proxy.compat.e2b.file_requests import Plain, Watching
from proxy.compat.e2b.requests import Chosen, Control, ProcessStart
from proxy.dialects import multipart
from proxy.dialects.base import Request
from proxy.refusals import RefusalError
from proxy.tree.keys import call_key
from sandboxes.calls import ToolCall
from sandboxes.process_output import END, ERR, OUT, Frames, frame
from sandboxes.spec import EnvironmentSpec

SPEC = EnvironmentSpec()
JSON = st.dictionaries(st.text(), st.recursive(st.none() | st.integers(-9, 9) | st.text(), st.lists, max_leaves=5))
NAMES = st.text(st.characters(exclude_characters='"\\\r\n\0', exclude_categories=["Cs"]), min_size=1)


def rpc(method: str, message: dict[str, Any] | bytes, *, pretty: bool = False, **headers: str) -> Request:
    """Return a request to envd as one of its clients sends it."""
    stream = method.partition("/")[2] in {"Start", "Connect", "StreamInput", "WatchDir"}
    kind = "application/connect+json" if stream else "application/json"
    body = message if isinstance(message, bytes) else json.dumps(message, indent=2 if pretty else None).encode()
    if stream and not isinstance(message, bytes):
        body = b"\0" + len(body).to_bytes(4, "big") + body
    given = {"content-type": kind, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return Request("POST", f"/{method}", tuple(given.items()), body)


def start(message: dict[str, Any], **headers: str) -> ProcessStart:
    asked = e2b.read(rpc("process.Process/Start", message, pretty=False, **headers), SPEC)
    assert isinstance(asked, ProcessStart)
    return asked


def process(command: str = "ls", **more: Any) -> dict[str, Any]:
    return {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command], **more}, "stdin": False}


@given(st.lists(JSON, max_size=4))
def test_what_is_put_into_envelopes_comes_out_of_them(values: list[dict[str, Any]]) -> None:
    assert connect.messages(b"".join(map(connect.envelope, values)) + connect.end()) == values


@given(JSON, st.data())
def test_a_stream_that_is_cut_off_is_refused(value: dict[str, Any], data: st.DataObject) -> None:
    whole = connect.envelope(value)
    cut = data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(RefusalError):
        connect.messages(whole[:cut])


@given(st.lists(st.tuples(NAMES, st.binary()), min_size=1, max_size=3), st.data())
def test_the_files_of_a_form_come_out_byte_for_byte(files: list[tuple[str, bytes]], data: st.DataObject) -> None:
    body = b"".join(
        b'--frontier\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\n%b\r\n' % (n.encode(), d)
        for n, d in files
    )
    form = "multipart/form-data; boundary=frontier"
    clean = [(name, content) for name, content in files if b"\r\n--frontier" not in b"\r\n" + content]
    if clean == files:
        assert [(f.name, f.data) for f in multipart.files(body + b"--frontier--\r\n", form)] == files
    with pytest.raises(RefusalError):
        multipart.files(body[: data.draw(st.integers(0, len(body) - 1))], form)


def test_a_form_of_another_generation_is_the_same_call() -> None:
    def upload(boundary: str) -> bytes:
        body = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="/a"\r\n\r\nabc\r\n--{boundary}--'
        )
        headers = (("content-type", f"multipart/form-data; boundary={boundary}"),)
        asked = e2b.read(Request("POST", "/files?path=/a", headers, body.encode()), SPEC)
        assert isinstance(asked, Plain)
        return call_key(asked.calls[0])

    raw = (("content-type", "application/octet-stream"), ("content-encoding", "gzip"))
    zipped = e2b.read(Request("POST", "/files?path=/a", raw, gzip.compress(b"abc")), SPEC)
    assert isinstance(zipped, Plain)
    assert upload("x") == upload("y") == call_key(zipped.calls[0])


def test_the_key_of_a_start_is_what_it_does() -> None:
    plain = start(process()).call
    same = [
        start({**process(), "tag": "mine"}),
        start(process(), keepalive_ping_interval="7", e2b_sandbox_id="other", e2b_sandbox_port="1"),
        e2b.read(rpc("process.Process/Start", process(), pretty=True), SPEC),
        start(process(envs={}, cwd="/root")),
    ]
    for asked in same:
        assert isinstance(asked, ProcessStart)
        assert call_key(asked.call) == call_key(plain)
    basic = "Basic " + base64.b64encode(b"me:").decode()
    others = [
        start(process("pwd")),
        start(process(envs={"A": "1"})),
        start(process(cwd="/tmp")),
        start({**process(), "stdin": True}),
        start(process(), authorization=basic),
        start(process(), connect_timeout_ms="1000"),
        start({**process(), "pty": {"size": {"rows": 24, "cols": 80}}}),
        start({**process(), "pty": {"size": {"rows": 80, "cols": 24}}}),
    ]
    keys = {call_key(asked.call) for asked in others}
    assert len(keys) == len(others)
    assert call_key(plain) not in keys


def test_what_is_about_a_process_names_it_by_pid_or_tag() -> None:
    assert e2b.read(rpc("process.Process/SendSignal", {"process": {"pid": 7}, "signal": "SIGNAL_SIGKILL"}), SPEC) == (
        Chosen("signal", 7, more={"signal": 9})
    )
    assert e2b.read(
        rpc("process.Process/SendInput", {"process": {"tag": "t"}, "input": {"stdin": "eA=="}}), SPEC
    ) == Chosen("write", None, "t", b"x")
    streamed = b"".join(
        connect.envelope(message)
        for message in (
            {"start": {"process": {"pid": 7}}},
            {"data": {"input": {"stdin": "YQ=="}}},
            {"data": {"input": {"stdin": "Yg=="}}},
        )
    )
    assert e2b.read(rpc("process.Process/StreamInput", streamed), SPEC) == Chosen("write", 7, data=b"ab")


def test_what_is_typed_and_how_large_a_terminal_is_are_told_apart_from_stdin() -> None:
    typed = rpc("process.Process/SendInput", {"process": {"pid": 7}, "input": {"pty": "eA=="}})
    assert e2b.read(typed, SPEC) == Chosen("write", 7, data=b"x", more={"typed": True})
    resized = rpc("process.Process/Update", {"process": {"pid": 7}, "pty": {"size": {"cols": 80}}})
    assert e2b.read(resized, SPEC) == Chosen("resize", 7, more={"size": [0, 80]})


def test_a_watch_is_a_call_by_path_user_and_depth_and_goes_on_as_long_as_its_stream() -> None:
    message = {"path": "~/w", "recursive": True}
    call = ToolCall("process", "watch", {"path": "~/w", "user": "", "recursive": True})
    begun = e2b.read(rpc("filesystem.Filesystem/CreateWatcher", message), SPEC)
    assert isinstance(begun, Watching)
    assert (begun.verb, begun.call) == ("begin", call)
    streamed = e2b.read(rpc("filesystem.Filesystem/WatchDir", message, connect_timeout_ms="1500"), SPEC)
    assert streamed == Watching("stream", call, keepalive_s=50.0, deadline_s=1.5)
    asked = e2b.read(rpc("filesystem.Filesystem/GetWatcherEvents", {"watcherId": "9"}), SPEC)
    assert asked == Watching("events", watcher="9", keepalive_s=50.0)


def test_both_creates_are_one() -> None:
    body = b'{"templateID":"base"}'
    for path in ("/sandboxes", "/v2/sandboxes"):
        assert e2b.read(Request("POST", path, (), body), SPEC) == Control("create", body={"templateID": "base"})
    assert e2b.read(Request("DELETE", "/sandboxes/i1", (), b""), SPEC) == Control("kill", "i1")


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (rpc("process.Process/Start", b"\0\0\0\0\x05{}"), "invalid_argument"),
        (rpc("process.Process/Start", b"\1\0\0\0\x02{}"), "invalid_argument"),
        (rpc("process.Process/Start", b""), "invalid_argument"),
        (rpc("process.Process/Start", {}), "invalid_argument"),
        (rpc("process.Process/Start", {**process(), "pty": {}}), "invalid_argument"),
        (rpc("process.Process/Start", process("a\0b")), "invalid_argument"),
        (rpc("process.Process/Start", process(envs={"A=": "1"})), "invalid_argument"),
        (rpc("process.Process/Start", process(), connect_timeout_ms="-1"), "invalid_argument"),
        (rpc("process.Process/Start", process(), authorization="Basic /"), "invalid_argument"),
        (rpc("process.Process/Start", process(), content_type="application/connect+proto"), "invalid_argument"),
        (rpc("process.Process/SendInput", {"process": {"pid": 1}, "input": {"stdin": "?"}}), "invalid_argument"),
        (rpc("process.Process/SendSignal", {"process": {"pid": 1}, "signal": "HUP"}), "invalid_argument"),
        (rpc("process.Process/SendSignal", {"process": {"pid": True}, "signal": 9}), "invalid_argument"),
        (rpc("process.Process/Nothing", {}), "unimplemented"),
        (rpc("filesystem.Filesystem/Stat", {"path": ""}), "invalid_argument"),
        (rpc("filesystem.Filesystem/Stat", {"path": "a\0"}), "invalid_argument"),
        (rpc("filesystem.Filesystem/ListDir", {"path": "/", "depth": 10**6}), "invalid_argument"),
        (rpc("filesystem.Filesystem/CreateWatcher", {"path": "/", "includeEntry": True}), "unimplemented"),
        (rpc("filesystem.Filesystem/WatchDir", {"path": ""}), "invalid_argument"),
        (rpc("process.Process/Update", {"process": {"pid": 1}, "pty": {"size": {"rows": 70000}}}), "invalid_argument"),
        (rpc("process.Process/Update", {"process": {"pid": 1}, "pty": {"size": {"rows": True}}}), "invalid_argument"),
        (Request("GET", "/process.Process/List", (), b""), "unimplemented"),
    ],
)
def test_a_bad_call_is_told_in_connects_words(request_: Request, code: str) -> None:
    with pytest.raises(ConnectError) as refused:
        e2b.read(request_, SPEC)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("method", "target", "body", "status"),
    [
        ("POST", "/sandboxes", b"[", 400),
        ("PATCH", "/sandboxes", b"", 405),
        ("GET", "/nothing", b"", 404),
        ("POST", "/v3/templates", b"{}", 501),
        ("PUT", "/sandboxes/a/network", b"{}", 501),
        ("POST", "/execute", b"{}", 501),
        ("DELETE", "/files?path=/a", b"", 405),
        ("GET", "/files", b"", 400),
        ("GET", "/files?path=/%00", b"", 400),
        ("POST", "/files?path=/" + "a" * 5000, b"x", 400),
    ],
)
def test_a_bad_request_is_told_in_https_words(method: str, target: str, body: bytes, status: int) -> None:
    with pytest.raises(RefusalError) as refused:
        e2b.read(Request(method, target, (), body), SPEC)
    assert refused.value.status == status


def test_a_driver_without_processes_has_no_such_endpoint() -> None:
    spec = EnvironmentSpec.model_validate({"driver": "sqlite", "databases": {"d": {"source": "/d.sql"}}})
    with pytest.raises(RefusalError, match="no e2b endpoint"):
        e2b.read(Request("POST", "/sandboxes", (), b"{}"), spec)


@given(
    st.lists(st.tuples(st.sampled_from([OUT, ERR]), st.binary(min_size=1)), max_size=5),
    st.integers(0, 40),
    st.booleans(),
)
def test_events_carry_all_output_but_what_was_told_before(
    pieces: list[tuple[int, bytes]], skip: int, terminal: bool
) -> None:
    frames = Frames()
    for kind, data in pieces:
        frames.add(kind, data)
    told = b""
    for event in e2b_told.output(frames.end(0), terminal=terminal, skip=skip):
        assert terminal == ("pty" in event["event"]["data"])
        told += b"".join(base64.b64decode(data) for data in event["event"]["data"].values())
    assert told == b"".join(data for _, data in pieces)[skip:]


def test_how_a_process_ended() -> None:
    def ended(**told: Any) -> Any:
        return e2b_told.ended(frame(END, json.dumps({"timed_out": False, "truncated": False, **told}).encode()))

    assert ended(exit_code=None) is None
    assert ended(exit_code=0)["event"]["end"] == {"exitCode": 0, "exited": True, "status": "exit status 0"}
    assert ended(exit_code=7)["event"]["end"]["error"] == "exit status 7"
    assert ended(exit_code=137)["event"]["end"]["exitCode"] == 137
    killed = {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed"}
    assert ended(exit_code=137, signal=9)["event"]["end"] == killed
    with pytest.raises(ConnectError, match="deadline"):
        ended(exit_code=124, timed_out=True)
