"""E2B: requests are parsed, and what they run has keys."""

import base64
import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compat.e2b import connect_rpc as connect
from proxy.compat.e2b import requests as e2b
from proxy.compat.e2b.connect_rpc import ConnectError
from proxy.compat.e2b.control_requests import ControlRequest
from proxy.compat.e2b.file_requests import CallsRequest, WatchRequest
from proxy.compat.e2b.requests import ProcessRequest, ProcessStart
from proxy.dialects import multipart
from proxy.dialects.base import Request
from proxy.refusals import RefusalError
from proxy.tree.keys import call_key
from sandboxes.calls import ToolCall
from sandboxes.spec import EnvironmentSpec

SPEC = EnvironmentSpec()
NAMES = st.text(st.characters(exclude_characters='"\\\r\n\0', exclude_categories=["Cs"]), min_size=1)


def rpc(method: str, message: dict[str, Any] | bytes, *, pretty: bool = False, **headers: str) -> Request:
    """Return a request to envd as an SDK sends it."""
    stream = method.partition("/")[2] in {"Start", "Connect", "StreamInput", "WatchDir"}
    media_type = "application/connect+json" if stream else "application/json"
    body = message if isinstance(message, bytes) else json.dumps(message, indent=2 if pretty else None).encode()
    if stream and not isinstance(message, bytes):
        body = b"\0" + len(body).to_bytes(4, "big") + body
    all_headers = {"content-type": media_type, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return Request("POST", f"/{method}", tuple(all_headers.items()), body)


def start(message: dict[str, Any], **headers: str) -> ProcessStart:
    request = e2b.read(rpc("process.Process/Start", message, pretty=False, **headers), SPEC)
    assert isinstance(request, ProcessStart)
    return request


def process(command: str = "ls", **more: Any) -> dict[str, Any]:
    return {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command], **more}, "stdin": False}


@given(st.lists(st.tuples(NAMES, st.binary()), min_size=1, max_size=3), st.data())
def test_form_files_round_trip(files: list[tuple[str, bytes]], data: st.DataObject) -> None:
    """Files of a multipart form are read byte for byte, and a truncated form is refused."""
    body = b"".join(
        b'--frontier\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\n%b\r\n' % (n.encode(), d)
        for n, d in files
    )
    form = "multipart/form-data; boundary=frontier"
    clean = [(name, content) for name, content in files if b"\r\n--frontier" not in b"\r\n" + content]
    if clean == files:
        assert [(f.filename, f.data) for f in multipart.files(body + b"--frontier--\r\n", form)] == files
    with pytest.raises(RefusalError):
        multipart.files(body[: data.draw(st.integers(0, len(body) - 1))], form)


def test_upload_key_ignores_encoding() -> None:
    """SDK versions upload the same file as a form with a random boundary or gzipped: all have the same key."""

    def upload(boundary: str) -> bytes:
        body = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="/a"\r\n\r\nabc\r\n--{boundary}--'
        )
        headers = (("content-type", f"multipart/form-data; boundary={boundary}"),)
        request = e2b.read(Request("POST", "/files?path=/a", headers, body.encode()), SPEC)
        assert isinstance(request, CallsRequest)
        return call_key(request.calls[0])

    raw = (("content-type", "application/octet-stream"), ("content-encoding", "gzip"))
    zipped = e2b.read(Request("POST", "/files?path=/a", raw, gzip.compress(b"abc")), SPEC)
    assert isinstance(zipped, CallsRequest)
    assert upload("x") == upload("y") == call_key(zipped.calls[0])


def test_start_key_consists_of_what_runs() -> None:
    """Ids and the JSON's form are not in the key of a start. What changes what runs is, and what clients call it."""
    plain = start(process()).call
    same = [
        start({**process(), "tag": ""}),
        start(process(), keepalive_ping_interval="7", e2b_sandbox_id="other", e2b_sandbox_port="1"),
        e2b.read(rpc("process.Process/Start", process(), pretty=True), SPEC),
        start(process(envs={}, cwd="/root")),
    ]
    for request in same:
        assert isinstance(request, ProcessStart)
        assert call_key(request.call) == call_key(plain)
    basic = "Basic " + base64.b64encode(b"me:").decode()
    others = [
        start(process("pwd")),
        start(process(envs={"A": "1"})),
        start(process(cwd="/tmp")),
        start({**process(), "stdin": True}),
        # Another rollout of the group would not find its process by its own tag, and would be shown this one's.
        start({**process(), "tag": "mine"}),
        start(process(), authorization=basic),
        start(process(), connect_timeout_ms="1000"),
        start({**process(), "pty": {"size": {"rows": 24, "cols": 80}}}),
        start({**process(), "pty": {"size": {"rows": 80, "cols": 24}}}),
    ]
    keys = {call_key(request.call) for request in others}
    assert len(keys) == len(others)
    assert call_key(plain) not in keys


def test_pid_or_tag_selects_process() -> None:
    """Requests about a running process select it by pid or by tag; a stream of input is one write."""
    assert e2b.read(rpc("process.Process/SendSignal", {"process": {"pid": 7}, "signal": "SIGNAL_SIGKILL"}), SPEC) == (
        ProcessRequest("signal", 7, arguments={"signal": 9})
    )
    assert e2b.read(
        rpc("process.Process/SendInput", {"process": {"tag": "t"}, "input": {"stdin": "eA=="}}), SPEC
    ) == ProcessRequest("write", None, "t", b"x")
    streamed = b"".join(
        connect.envelope(message)
        for message in (
            {"start": {"process": {"pid": 7}}},
            {"data": {"input": {"stdin": "YQ=="}}},
            {"data": {"input": {"stdin": "Yg=="}}},
        )
    )
    assert e2b.read(rpc("process.Process/StreamInput", streamed), SPEC) == ProcessRequest("write", 7, data=b"ab")


def test_terminal_input_and_size_are_parsed() -> None:
    """Input that is typed at a terminal is marked as such, and a missing dimension is 0."""
    typed = rpc("process.Process/SendInput", {"process": {"pid": 7}, "input": {"pty": "eA=="}})
    assert e2b.read(typed, SPEC) == ProcessRequest("write", 7, data=b"x", arguments={"typed": True})
    resized = rpc("process.Process/Update", {"process": {"pid": 7}, "pty": {"size": {"cols": 80}}})
    assert e2b.read(resized, SPEC) == ProcessRequest("resize", 7, arguments={"size": [0, 80]})


def test_watch_requests_are_parsed() -> None:
    """Both ways to begin a watch make the same call; the streaming one has the stream's limits."""
    message = {"path": "~/w", "recursive": True}
    call = ToolCall("process", "watch", {"path": "~/w", "user": "", "recursive": True})
    begun = e2b.read(rpc("filesystem.Filesystem/CreateWatcher", message), SPEC)
    assert isinstance(begun, WatchRequest)
    assert (begun.verb, begun.call) == ("begin", call)
    streamed = e2b.read(rpc("filesystem.Filesystem/WatchDir", message, connect_timeout_ms="1500"), SPEC)
    assert streamed == WatchRequest("stream", call, keepalive_s=50.0, deadline_s=1.5)
    events = e2b.read(rpc("filesystem.Filesystem/GetWatcherEvents", {"watcherId": "9"}), SPEC)
    assert events == WatchRequest("events", watcher="9", keepalive_s=50.0)


def test_both_versions_of_create_are_equal() -> None:
    """SDK versions create sandboxes at /sandboxes or at /v2/sandboxes."""
    body = b'{"templateID":"base"}'
    for path in ("/sandboxes", "/v2/sandboxes"):
        assert e2b.read(Request("POST", path, (), body), SPEC) == ControlRequest("create", body={"templateID": "base"})
    assert e2b.read(Request("DELETE", "/sandboxes/i1", (), b""), SPEC) == ControlRequest("kill", "i1")


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
def test_invalid_rpc_has_connect_code(request_: Request, code: str) -> None:
    with pytest.raises(ConnectError) as refused:
        e2b.read(request_, SPEC)
    assert refused.value.code == code


def test_gzip_file_behind_another_is_refused() -> None:
    """Some servers unpack all of them, and others the first one: half of a file must not pass for the whole."""
    raw = (("content-type", "application/octet-stream"), ("content-encoding", "gzip"))
    with pytest.raises(RefusalError, match="more than one gzip file"):
        e2b.read(Request("POST", "/files?path=/a", raw, gzip.compress(b"abc") + gzip.compress(b"def")), SPEC)


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
def test_invalid_http_request_has_status(method: str, target: str, body: bytes, status: int) -> None:
    with pytest.raises(RefusalError) as refused:
        e2b.read(Request(method, target, (), body), SPEC)
    assert refused.value.status == status


def test_driver_without_processes_is_refused() -> None:
    """A task whose driver runs no processes has no e2b endpoint."""
    spec = EnvironmentSpec.model_validate({"driver": "sqlite", "databases": {"d": {"source": "/d.sql"}}})
    with pytest.raises(RefusalError, match="no e2b endpoint"):
        e2b.read(Request("POST", "/sandboxes", (), b"{}"), spec)
