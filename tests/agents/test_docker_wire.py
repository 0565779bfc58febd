"""Docker's protocol by hand: connections that become streams, and requests that no client should send."""

import json
import socket
import struct
from typing import Any

import pytest

from tests.agents.serving import Proxy
from tests.machine import wait_until


def send_bytes(proxy: Proxy, data: bytes, *, half_close: bool = True) -> bytes:
    """Send bytes; return what is received until the connection ends."""
    with socket.create_connection(proxy.address, timeout=30) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


def create_exec(proxy: Proxy, task: str, rollout: str, *argv: str, **more: Any) -> tuple[str, str]:
    """Create a container and an exec instance by plain requests; return their IDs."""
    base = f"/t/{task}/r/{rollout}/docker"
    container_id = proxy.client.post(
        f"{base}/containers/create", json={"Image": "any:1", "Cmd": ["sleep", "2h"]}
    ).json()["Id"]
    assert proxy.client.post(f"{base}/v1.41/containers/{container_id}/start").status_code == 204
    body = {"Cmd": list(argv), "AttachStdout": True, "AttachStderr": True, **more}
    return container_id, proxy.client.post(f"{base}/containers/{container_id}/exec", json=body).json()["Id"]


def start_request(task: str, rollout: str, exec_id: str, *, headers: str = "", body: bytes = b'{"Tty":false}') -> bytes:
    head = f"POST /t/{task}/r/{rollout}/docker/v1.41/exec/{exec_id}/start HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


UPGRADE = "Connection: Upgrade\r\nUpgrade: tcp\r\n"


@pytest.mark.parametrize(("headers", "first"), [(UPGRADE, b"HTTP/1.1 101 UPGRADED"), ("", b"HTTP/1.1 200 OK")])
def test_upgraded_and_plain_connections_become_streams(proxy: Proxy, task: str, headers: str, first: bytes) -> None:
    """New clients request an upgrade, old ones use the response's body; stdin may come with the request or after it."""
    for rollout in (f"a{len(headers)}", f"b{len(headers)}"):
        _, exec_id = create_exec(proxy, task, rollout, "sh", "-c", "cat; echo err >&2; exit 2", AttachStdin=True)
        request = start_request(task, rollout, exec_id, headers=headers)
        # Stdin may arrive in one packet with the request.
        extra = b"with it, " if headers else b""
        with socket.create_connection(proxy.address, timeout=30) as connection:
            connection.sendall(request + extra)
            head = connection.recv(65536)
            connection.sendall(b"after it\n" if headers else b"with it, after it\n")
            connection.shutdown(socket.SHUT_WR)
            data = head.partition(b"\r\n\r\n")[2]
            while chunk := connection.recv(65536):
                data += chunk
        assert head.startswith(first)
        assert frames(data) == {1: b"with it, after it\n", 2: b"err\n"}
        details = proxy.client.get(f"/t/{task}/r/{rollout}/docker/exec/{exec_id}/json").json()
        assert (details["ExitCode"], details["Running"]) == (2, False)
        # An instance runs once.
        assert send_bytes(proxy, request).startswith(b"HTTP/1.1 409 ")


def frames(data: bytes) -> dict[int, bytes]:
    streams: dict[int, bytes] = {}
    while data:
        kind, length = struct.unpack(">BxxxI", data[:8])
        if length:
            streams[kind] = streams.get(kind, b"") + data[8 : 8 + length]
        data = data[8 + length :]
    return streams


def test_request_may_arrive_in_pieces(proxy: Proxy, task: str) -> None:
    """A request that starts a stream may arrive in packets of any size."""
    for headers in (UPGRADE, ""):
        rollout = f"r{len(headers)}"
        _, exec_id = create_exec(proxy, task, rollout, "echo", "hi")
        with socket.create_connection(proxy.address, timeout=30) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = start_request(task, rollout, exec_id, headers=headers)
            for start in range(0, len(request), 40):
                connection.sendall(request[start : start + 40])
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        assert frames(answer.partition(b"\r\n\r\n")[2]) == {1: b"hi\n"}


BAD: dict[str, tuple[str, str, Any, int, str]] = {
    "unknown path": ("GET", "/no/such", None, 404, "page not found"),
    "unknown path below a container": ("GET", "/containers/{container_id}/export", None, 404, "page not found"),
    "wrong method": ("DELETE", "/version", None, 404, "page not found"),
    "too new": ("GET", "/v1.99/version", None, 400, "client version 1.99 is too new"),
    "too old": ("GET", "/v1.10/version", None, 400, "client version 1.10 is too old"),
    "no container": ("GET", "/containers/nosuch/json", None, 404, "No such container: nosuch"),
    "encoded slash": ("GET", "/containers/a%2Fb/json", None, 404, "No such container: a/b"),
    "parent directory in a path": ("GET", "/containers/..%2F..%2Fjson/json", None, 404, "No such container"),
    "no exec": ("GET", "/exec/nosuch/json", None, 404, "No such exec instance: nosuch"),
    "no command": ("POST", "/containers/{container_id}/exec", {"Cmd": []}, 400, "No exec command specified"),
    "arguments that are no strings": ("POST", "/containers/{container_id}/exec", {"Cmd": [1]}, 400, "list of strings"),
    "invalid JSON": ("POST", "/containers/{container_id}/exec", b"{", 400, "invalid JSON"),
    "no image": ("POST", "/containers/create", {"Cmd": ["a"]}, 400, "name an Image"),
    "bad name": ("POST", "/containers/create?name=a%20b", {"Image": "x"}, 400, "Invalid container name"),
    "truncated archive": ("PUT", "/containers/{container_id}/archive?path=/tmp", b"half", 400, "a whole tar archive"),
    "missing directory": ("PUT", "/containers/{container_id}/archive?path=/no/such", b"", 404, "Could not find"),
    "invalid JSON of a start": ("POST", "/exec/{exec_id}/start", b'{"Detach": tru', 400, "invalid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_request_has_dockers_error(proxy: Proxy, task: str, case: str) -> None:
    """Invalid requests get an error in Docker's form, and nothing is recorded."""
    method, path, body, status, text = BAD[case]
    rollout = case.replace(" ", "-")
    container_id, exec_id = create_exec(proxy, task, rollout, "true")
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    recorded = proxy.recorded
    answer = proxy.client.request(
        method,
        f"/t/{task}/r/{rollout}/docker{path.format(container_id=container_id, exec_id=exec_id)}",
        content=content,
    )
    assert (answer.status_code, list(answer.json())) == (status, ["message"])
    assert text in answer.json()["message"]
    if case not in {"truncated archive", "missing directory"}:
        assert proxy.recorded == recorded


def test_incomplete_and_smuggled_requests_run_nothing(proxy: Proxy, task: str) -> None:
    """A truncated request, or one with two framings, starts nothing; the instance can still be started."""
    _, exec_id = create_exec(proxy, task, "a", "sh", "-c", "echo ran > /tmp/ran")
    request = start_request(task, "a", exec_id, headers=UPGRADE)
    assert send_bytes(proxy, request[:-4]) == b""
    smuggled = start_request(task, "a", exec_id, headers=f"{UPGRADE}Transfer-Encoding: chunked\r\n")
    assert b"101" not in send_bytes(proxy, smuggled)[:20]
    assert proxy.outcomes(task, "a") == []
    # The instance can still be started.
    assert send_bytes(proxy, request).startswith(b"HTTP/1.1 101")


def test_containers_belong_to_their_url(proxy: Proxy, task: str) -> None:
    """A container and its execs are visible only below the URL that created it."""
    container_id, exec_id = create_exec(proxy, task, "a", "true")
    for path in (f"/containers/{container_id}/json", f"/exec/{exec_id}/json"):
        assert proxy.client.get(f"/t/{task}/r/a/docker{path}").status_code == 200
        assert proxy.client.get(f"/t/{task}/r/b/docker{path}").status_code == 404
        assert proxy.client.get(f"/t/{task}/docker{path}").status_code == 404
    assert send_bytes(proxy, start_request(task, "b", exec_id, headers=UPGRADE)).startswith(b"HTTP/1.1 404 ")


def test_container_goes_with_its_rollout(proxy: Proxy, task: str) -> None:
    """A trainer ends rollouts by REST. Their containers stayed in memory, and each request looked through them."""
    container_id, exec_id = create_exec(proxy, task, "a", "true")
    assert proxy.client.delete(f"/api/v1/tasks/{task}/rollouts/a").status_code == 204
    base = f"/t/{task}/r/a/docker"
    assert proxy.client.get(f"{base}/containers/json?all=1").json() == []
    for path in (f"/containers/{container_id}/json", f"/exec/{exec_id}/json"):
        assert proxy.client.get(base + path).status_code == 404


def test_ping_needs_no_task(proxy: Proxy) -> None:
    """A ping is answered for a task that does not exist, and does not create it."""
    answer = proxy.client.get("/t/unheard-of/r/x/docker/_ping")
    assert (answer.text, answer.headers["api-version"]) == ("OK", "1.44")
    assert proxy.client.get("/api/v1/tasks/unheard-of").status_code == 404


def test_execs_of_one_container_run_in_order(proxy: Proxy, task: str) -> None:
    """The second of two execs at the same time waits for the first."""
    container_id, first = create_exec(proxy, task, "a", "sh", "-c", "sleep 0.3; echo first >> /tmp/order")
    body = {"Cmd": ["sh", "-c", "echo second >> /tmp/order; cat /tmp/order"], "AttachStdout": True}
    second = proxy.client.post(f"/t/{task}/r/a/docker/containers/{container_id}/exec", json=body).json()["Id"]
    with socket.create_connection(proxy.address, timeout=30) as connection:
        connection.sendall(start_request(task, "a", first, headers=UPGRADE))
        rollout = proxy.engine.tasks.rollouts.running[task, "a"]
        wait_until(lambda: rollout.waiting + rollout.calls > 0, "it does not begin")
        answer = send_bytes(proxy, start_request(task, "a", second, headers=UPGRADE))
        while connection.recv(65536):
            pass
    assert frames(answer.partition(b"\r\n\r\n")[2]) == {1: b"first\nsecond\n"}
