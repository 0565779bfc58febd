"""The data plane as an agent sees it: on a socket, with an ordinary HTTP client."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandboxes.calls import ToolCall
from tests.machine import PLAIN
from tests.proxy.serving import Running, serving


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data"), max_body_bytes=1 << 20) as running:
        yield running


def talk(proxy: Running, sent: bytes) -> bytes:
    """Send raw bytes, the last request of which asks to close; return all that comes back."""
    with socket.create_connection(proxy.address, timeout=30) as connection:
        connection.sendall(sent)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


def request(path: str, body: bytes, extra: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


def test_second_rollout_is_answered_from_the_tree(proxy: Running) -> None:
    first = proxy.exec("a", "echo 1 > f; cat f", task="second")
    ran = len(proxy.driver.executed)
    second = proxy.exec("b", "echo 1 > f; cat f", task="second")
    assert first.json() == second.json() == {
        "stdout": "1\n", "stderr": "", "exit_code": 0, "timed_out": False, "truncated": False,
    }  # fmt: skip
    assert first.headers["cache-status"] == "forkpoint; fwd=miss; stored"
    assert second.headers["cache-status"] == "forkpoint; hit"
    assert first.headers["x-forkpoint-node"] == second.headers["x-forkpoint-node"]
    assert len(proxy.driver.executed) == ran


def test_server_timing_header_has_all_parts(proxy: Running) -> None:
    timing = proxy.exec("a", "cat nothing", task="timing").headers["server-timing"]
    names = [part.split(";")[0] for part in timing.split(", ")]
    assert names == ["tool", "restore", "replay", "wait", "cpu", "memory", "read"]
    assert timing.startswith("tool;dur=10.000")


@pytest.mark.parametrize("way", ["headers", "x-api-key", "bearer"])
def test_rollout_may_be_named_by_headers(proxy: Running, way: str) -> None:
    begun = proxy.client.post("/api/v1/tasks/named/rollouts", json={"rollout": f"by-{way}"}).json()
    headers = {
        "headers": {"X-Forkpoint-Task": "named", "X-Forkpoint-Rollout": f"by-{way}"},
        "x-api-key": {"X-API-Key": begun["token"]},
        "bearer": {"Authorization": f"Bearer {begun['token']}"},
    }[way]
    answer = proxy.client.post("/e/shell/exec", json={"command": "cd /tmp"}, headers=headers)
    shown = proxy.client.get(f"/api/v1/tasks/named/rollouts/by-{way}").json()
    assert shown["node"] == answer.headers["x-forkpoint-node"] != shown["start"]


def test_file_transfers_are_calls(proxy: Running) -> None:
    base = "/t/files/r/{}/shell/files/work/data.bin"
    content = bytes(range(256))
    for rollout, status in (("a", "forkpoint; fwd=miss; stored"), ("b", "forkpoint; hit")):
        put = proxy.client.put(base.format(rollout), content=content)
        assert (put.status_code, put.headers["cache-status"]) == (201, status)
        assert proxy.client.get(base.format(rollout)).content == content
        assert proxy.client.delete(base.format(rollout)).status_code == 204
        gone = proxy.client.get(base.format(rollout))
        assert (gone.status_code, gone.headers["cache-status"]) == (404, status)


def test_uploads_of_different_contents_are_different_calls(proxy: Running) -> None:
    nodes = {
        proxy.client.put(f"/t/uploads/r/{body}/shell/files/f", content=body).headers["x-forkpoint-node"]
        for body in ("one", "two")
    }
    assert len(nodes) == 2


def test_defaults_do_not_change_the_key(proxy: Running) -> None:
    proxy.exec("a", "pwd", task="defaults")
    assert (
        proxy.exec("b", "pwd", task="defaults", session="main", timeout_s=120).headers["cache-status"]
        == "forkpoint; hit"
    )
    assert proxy.exec("c", "pwd", task="defaults", timeout_s=7).headers["cache-status"] != "forkpoint; hit"


BAD: dict[str, tuple[str, str, bytes | str | None, int]] = {
    "malformed JSON": ("POST", "/t/bad/r/a/shell/exec", b"{", 400),
    "not an object": ("POST", "/t/bad/r/a/shell/exec", b"[1]", 422),
    "no body": ("POST", "/t/bad/r/a/shell/exec", b"", 400),
    "no command": ("POST", "/t/bad/r/a/shell/exec", b"{}", 422),
    "a command that is no string": ("POST", "/t/bad/r/a/shell/exec", b'{"command": 1}', 422),
    "an unknown member": ("POST", "/t/bad/r/a/shell/exec", b'{"command": "ls", "cwd": "/"}', 422),
    "a command that is no UTF-8": ("POST", "/t/bad/r/a/shell/exec", b'{"command": "\xff"}', 400),
    "a lone surrogate": ("POST", "/t/bad/r/a/shell/exec", b'["\\ud800"]', 400),
    "NaN": ("POST", "/t/bad/r/a/shell/exec", b'{"command": "ls", "timeout_s": NaN}', 400),
    "no time": ("POST", "/t/bad/r/a/shell/exec", b'{"command": "ls", "timeout_s": 0}', 422),
    "a day and a bit": ("POST", "/t/bad/r/a/shell/exec", b'{"command": "ls", "timeout_s": 86401}', 422),
    "time as truth": ("POST", "/t/bad/r/a/shell/exec", b'{"command": "ls", "timeout_s": true}', 422),
    "a session with a slash": ("POST", "/t/bad/r/a/shell/exec", b'{"command": "ls", "session": "a/b"}', 422),
    "a service that is not there": ("POST", "/t/bad/r/a/shell/exec", b'{"command": "ls", "service": "db"}', 422),
    "a service that is no name": ("POST", "/t/bad/r/a/shell/exec", b'{"command": "ls", "service": ["db"]}', 422),
    "a user of no service": ("POST", "/t/bad/r/a/shell/exec", b'{"command": "ls", "user": "root"}', 422),
    "a session with a newline": ("POST", "/t/bad/r/a/shell/exec", b'{"command": "ls", "session": "a\\n"}', 422),
    "an unknown endpoint": ("POST", "/t/bad/r/a/nonsense/exec", b"{}", 404),
    "an unknown tool": ("POST", "/t/bad/r/a/shell/nonsense", b"{}", 404),
    "the wrong method": ("GET", "/t/bad/r/a/shell/exec", None, 405),
    "a method that files lack": ("PATCH", "/t/bad/r/a/shell/files/x", None, 405),
    "no rollout": ("POST", "/t/bad", b"{}", 404),
    "a task with an escaped slash": ("POST", "/t/a%2Fb/r/a/shell/exec", b"{}", 400),
    "a task of dots": ("POST", "/t/%2e%2e/r/a/shell/exec", b"{}", 400),
    "a rollout with a control": ("POST", "/t/bad/r/a%00b/shell/exec", b"{}", 400),
    "a rollout with a newline": ("POST", "/t/bad/r/a%0A/shell/exec", b"{}", 400),
    "a rollout that is no UTF-8": ("POST", "/t/bad/r/%ff/shell/exec", b"{}", 400),
    "a rollout of 201 letters": ("POST", f"/t/bad/r/{'a' * 201}/shell/exec", b"{}", 400),
    "a path that climbs": ("PUT", "/t/bad/r/a/shell/files/x/%2e%2e/y", b"", 422),
    "a path with a NUL": ("PUT", "/t/bad/r/a/shell/files/x%00", b"", 422),
    "a path of 5,000 letters": ("PUT", f"/t/bad/r/a/shell/files/{'a' * 5000}", b"", 422),
    "a mode that is none": ("PUT", "/t/bad/r/a/shell/files/x?mode=rwx", b"", 422),
    "nobody": ("POST", "/e/shell/exec", b"{}", 401),
    "a body above the limit": ("PUT", "/t/bad/r/a/shell/files/x", b"x" * (1 << 20) + b"x", 413),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_explained_and_not_recorded(proxy: Running, case: str) -> None:
    method, path, body, status = BAD[case]
    steps = sum(proxy.engine.counts.outcomes)
    ran = len(proxy.driver.executed)
    answer = proxy.client.request(method, path, content=body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem.keys() == {"type", "title", "status", "detail"}
    assert problem["status"] == status
    assert len(problem["detail"]) > 20
    assert sum(proxy.engine.counts.outcomes) == steps
    assert len(proxy.driver.executed) == ran


def test_too_long_command_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as roomy:
        assert roomy.exec("a", "x" * ((1 << 20) + 1)).status_code == 413


def test_chunked_request_is_one_request(proxy: Running) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"command":'
        yield b'"pwd"}'

    for rollout in ("a", "b"):
        answer = proxy.client.post(f"/t/chunked/r/{rollout}/shell/exec", content=chunks())
        assert answer.json()["stdout"] == "/root\n"


def test_trailers_name_no_rollout(proxy: Running) -> None:
    """A reverse proxy in front checks headers only, and the hit path knows no trailers."""
    head = b"POST /e/shell/exec HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n"
    names = b"x-forkpoint-task: trailing\r\nx-forkpoint-rollout: r\r\n"
    body = b'12\r\n{"command": "pwd"}\r\n0\r\n'
    assert b" 200 " in talk(proxy, head + names + b"connection: close\r\n\r\n" + body + b"\r\n")
    refused = talk(proxy, head + b"connection: close\r\n\r\n" + body + names + b"\r\n")
    assert refused.startswith(b"HTTP/1.1 4"), refused


def test_pipelined_requests_are_answered_in_order(proxy: Running) -> None:
    for command in (b"pwd", b"cat f", b"echo 1 > f"):
        proxy.exec("warm", command.decode(), task="pipeline")
    sent = b"".join(
        request("/t/pipeline/r/new/shell/exec", b'{"command": "%b"}' % command)
        for command in (b"pwd", b"cat f", b"echo never > g", b"echo 1 > f")
    )
    sent += request("/t/pipeline/r/new/shell/exec", b'{"command": "pwd"}', "connection: close\r\n")
    answer = talk(proxy, sent)
    assert answer.count(b"HTTP/1.1 200 OK") == 5
    shown = proxy.client.get("/api/v1/tasks/pipeline/rollouts/new").json()
    assert [step["call"]["arguments"]["command"] for step in shown["steps"]["items"]] == [
        "pwd", "cat f", "echo never > g", "echo 1 > f", "pwd",
    ]  # fmt: skip
    assert [step["outcome"] for step in shown["steps"]["items"]] == ["hit", "hit", "miss", "miss", "miss"]


@pytest.mark.parametrize("extra", ["", "expect: 100-continue\r\n"])
def test_hit_respects_connection_headers(proxy: Running, extra: str) -> None:
    proxy.exec("warm", "pwd", task="close")
    body = b'{"command": "pwd"}'
    answer = talk(proxy, request("/t/close/r/b/shell/exec", body, f"{extra}connection: close\r\n"))
    assert b"forkpoint; hit" in answer
    assert b"connection: close" in answer
    assert answer.startswith(b"HTTP/1.1 100" if extra else b"HTTP/1.1 200")


def test_hit_on_http_1_0_closes_its_connection(proxy: Running) -> None:
    proxy.exec("warm", "pwd", task="old")
    body = b'{"command": "pwd"}'
    sent = request("/t/old/r/b/shell/exec", body).replace(b"HTTP/1.1", b"HTTP/1.0")
    assert b"forkpoint; hit" in talk(proxy, sent)


def test_client_may_disconnect_within_its_request(proxy: Running) -> None:
    with socket.create_connection(proxy.address) as connection:
        connection.sendall(request("/t/left/r/a/shell/exec", b"x" * 100)[:-50])
    assert proxy.exec("a", "pwd", task="left").status_code == 200


def test_too_many_calls_are_refused_with_retry_after(tmp_path: Path) -> None:
    came, go = threading.Event(), threading.Event()

    async def gate(_: ToolCall) -> None:
        came.set()
        await asyncio.to_thread(go.wait)

    with serving(tmp_path, gate=gate, max_requests=1) as small, ThreadPoolExecutor() as threads:
        first = threads.submit(small.exec, "a", "pwd")
        assert came.wait(30)
        refused = small.exec("b", "pwd")
        go.set()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert first.result().status_code == 200


def test_a_tenant_at_its_quota_slows_no_other(tmp_path: Path) -> None:
    """Its next call is refused, leaves no record, and succeeds later. Its hits and other tasks are not affected."""
    came, go = threading.Event(), threading.Event()

    async def gate(call: ToolCall) -> None:
        if call.arguments["command"] == "hold":
            came.set()
            await asyncio.to_thread(go.wait)

    quotas = {"team-*": 1}
    with serving(tmp_path, gate=gate, quotas=quotas, sandbox_patience_s=0.1) as small, ThreadPoolExecutor() as threads:
        assert small.exec("a", "pwd", task="team-1").status_code == 200
        first = threads.submit(small.exec, "b", "hold", task="team-1")
        came.wait(30)
        refused = small.exec("c", "pwd", task="team-2")
        hit = small.exec("c", "pwd", task="team-1")
        other = small.exec("c", "pwd", task="other")
        metrics = small.client.get("/metrics").text
        go.set()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "team-* have a quota of 1 calls" in refused.json()["detail"]
        assert (hit.headers["cache-status"], other.status_code) == ("forkpoint; hit", 200)
        assert 'forkpoint_quota_calls{state="running",tasks="team-*"} 1.0' in metrics
        assert first.result().status_code == 200
        assert small.exec("c", "pwd", task="team-2").headers["cache-status"] == "forkpoint; fwd=miss; stored"


def test_names_of_real_tasks_are_accepted(proxy: Running) -> None:
    for name in ("django__django-12345", "gpt-4o.v1", "a@b", "x=1,y=2", "task:7", "0"):
        assert proxy.exec("r", "pwd", task=name).status_code == 200


@pytest.mark.parametrize("endpoint", ["shell/exec", "mcp"])
def test_a_call_that_has_no_answer_when_the_proxy_stops_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    """Its step may still be taken, so it is no error after which clients send a call again."""
    monkeypatch.setattr("proxy.server.GRACE_S", 0.2)
    begun, ends = threading.Event(), threading.Event()

    async def gate(_call: ToolCall) -> None:
        begun.set()
        await asyncio.to_thread(ends.wait, 10.0)

    body: dict[str, Any] = {"command": "true"}
    if endpoint == "mcp":
        params = {"name": "exec", "arguments": body}
        body = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}
    with ThreadPoolExecutor(1) as threads, httpx.Client(timeout=30, verify=PLAIN) as client:
        with serving(tmp_path, gate=gate) as proxy:
            url = f"http://{proxy.address[0]}:{proxy.address[1]}/t/task/r/a/{endpoint}"
            call = threads.submit(client.post, url, json=body, headers={"accept": "application/json"})
            assert begun.wait(10.0)
            # The engine waits for the call itself once its client has got an answer.
            call.add_done_callback(lambda _: ends.set())
        answer = call.result().json()
    if endpoint == "mcp":
        assert "stopped before the call had an answer" in str(answer["error"]), answer
        assert answer["id"] == 7
    else:
        assert answer["type"] == "urn:forkpoint:stopped"
        assert call.result().status_code == 500
        assert "retry-after" not in call.result().headers
    with serving(tmp_path) as proxy:
        again = proxy.client.get("/api/v1/tasks/task/rollouts/a").json()
        assert again["steps"]["total"] == 1, "the call has ended while the proxy stopped"
