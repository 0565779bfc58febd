"""Tool servers inside sandboxes, as an agent's client meets them through the whole proxy."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_criu, wait_until

PROGRAM = Path(__file__).with_name("tool_server.py").read_text()
HIT = "forkpoint; hit"
STORED = "forkpoint; fwd=miss; stored"
BYPASS = "forkpoint; fwd=bypass"


def serve(**more: Any) -> dict[str, Any]:
    return {"api": {"command": "exec python3 /srv.py 9000", "port": 9000, **more}}


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with real_proxy() as running:
        yield running


@pytest.fixture
def task(proxy: Proxy, request: pytest.FixtureRequest) -> str:
    """A task of its own for each test."""
    name = request.node.name.split("[")[0][-100:]
    proxy.put(name, files={"/srv.py": PROGRAM}, servers=serve())
    return str(name)


@pytest.fixture
def limited(proxy: Proxy, task: str) -> str:
    """A task whose server may say nothing for three seconds."""
    name = f"{task}-limited"
    proxy.put(name, files={"/srv.py": PROGRAM}, servers=serve(timeout_s=3))
    return name


def raw(proxy: Proxy, sent: bytes) -> bytes:
    """Send bytes; return all that comes back until the connection ends."""
    with socket.create_connection(proxy.address, timeout=30) as connection:
        connection.sendall(sent)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


def test_second_rollout_gets_identical_bytes_from_the_tree(proxy: Proxy, task: str) -> None:
    """The second rollout is answered from the tree, byte for byte."""
    answers = {}
    for rollout in ("a", "b"):
        base = f"/t/{task}/r/{rollout}/api"
        answers[rollout] = [
            proxy.client.get(f"{base}/teapot"),
            proxy.client.post(f"{base}/put", json={"x": "1"}),
            proxy.client.head(f"{base}/teapot"),
            proxy.client.get(f"{base}/nothing"),
            proxy.client.post(f"{base}/fail"),
        ]
    assert [a.headers["cache-status"] for a in answers["a"]] == [STORED] * 4 + [BYPASS]
    # A server's own failure is each rollout's own: it may be one of the moment.
    assert [b.headers["cache-status"] for b in answers["b"]] == [HIT] * 4 + [BYPASS]
    ours = {"cache-status", "server-timing"}
    for a, b in zip(answers["a"][:4], answers["b"][:4], strict=True):
        kept = [[h for h in answer.headers.raw if h[0].decode() not in ours] for answer in (a, b)]
        assert (a.status_code, kept[0], a.content) == (b.status_code, kept[1], b.content)
    teapot = answers["b"][0]
    assert (teapot.status_code, teapot.text) == (418, "short and stout")
    assert [name for name, _ in teapot.headers.raw[2:4]] == [b"x-b", b"x-a"]
    assert answers["b"][4].status_code == 500


def test_hit_of_head_has_no_length_that_is_not_known(proxy: Proxy, task: str) -> None:
    """A server that sends chunks says no length, and 0 would be wrong."""
    answers = [proxy.client.head(f"/t/{task}/r/{rollout}/api/stream?n=0") for rollout in ("a", "b")]
    assert answers[1].headers["cache-status"] == HIT
    assert ["content-length" in answer.headers for answer in answers] == [False, False]


def test_server_memory_is_state(proxy: Proxy, task: str) -> None:
    """Changes of a server's memory split the tree; reads do not."""
    base = f"/t/{task}/r/{{}}/api"
    for rollout in ("a", "b"):
        proxy.client.post(base.format(rollout) + "/put", json={"x": "1"})
    proxy.client.post(base.format("a") + "/put", json={"x": "2"})
    proxy.client.get(base.format("b") + "/echo")
    proxy.client.post(base.format("b") + "/put", json={"y": "3"})
    seen = {r: proxy.client.get(base.format(r) + "/get?key=x").json()["value"] for r in ("a", "b")}
    assert seen == {"a": "2", "b": "1"}
    nodes = {r: proxy.client.get(base.format(r) + "/get?key=x").headers["x-forkpoint-node"] for r in ("a", "b")}
    before = nodes["a"]
    assert proxy.client.get(base.format("a") + "/echo").headers["x-forkpoint-node"] == before != nodes["b"]


def test_read_that_writes_files_is_a_change(proxy: Proxy, task: str) -> None:
    """A request that writes files is a change, whatever its HTTP method says."""
    base = f"/t/{task}/r/a"
    before = proxy.client.get(f"{base}/api/echo").headers["x-forkpoint-node"]
    after = proxy.client.get(f"{base}/api/touch").headers["x-forkpoint-node"]
    assert before != after
    told = proxy.client.post(f"{base}/shell/exec", json={"command": "cat touched"}).json()
    assert told["stdout"] == "x"


def test_replay_rebuilds_the_servers_memory(proxy: Proxy, task: str) -> None:
    """A rollout that diverges from the tree finds the server's memory, rebuilt by a replay."""
    base = f"/t/{task}/r/{{}}/api"
    for rollout in ("a", "b"):
        for n in range(3):
            proxy.client.post(base.format(rollout) + "/put", json={f"k{n}": str(n)})
    proxy.client.post(base.format("a") + "/put", json={"k1": "of a"})
    found = proxy.client.post(base.format("b") + "/put", json={"k2": "of b"})
    assert found.json() == {"k0": "0", "k1": "1", "k2": "of b"}
    assert found.headers["cache-status"] == STORED


def test_checkpoint_restores_a_random_value_in_memory() -> None:
    """A value that no replay could make again comes back from a checkpoint."""
    require_criu()
    with real_proxy(checkpoints=True) as running:
        running.put("random", files={"/srv.py": PROGRAM}, servers=serve())
        base = "/t/random/r/{}/api"
        drawn = [running.client.post(base.format(r) + "/draw") for r in ("a", "b", "c")]
        wait_until(lambda: running.is_kept("random"), "no checkpoint was taken")
        for n, rollout in enumerate(("a", "b", "c")):
            running.client.post(base.format(rollout) + "/put", json={"own": str(n)})
        read = [running.client.get(base.format(r) + "/get?key=drawn").json()["value"] for r in ("a", "b", "c")]
    assert {d.json()["drawn"] for d in drawn} == set(read)
    assert [d.headers["cache-status"] for d in drawn] == [STORED, HIT, HIT]


def test_server_of_the_root_state_is_running() -> None:
    """A server that belongs to the root state runs before the first call."""
    require_criu()
    with real_proxy(checkpoints=True) as running:
        running.put("rooted", files={"/srv.py": PROGRAM}, servers=serve(start="root", ready="/echo"))
        first = running.client.get("/t/rooted/r/a/api/echo")
        assert (
            first.headers["x-forkpoint-node"] == running.client.get("/api/v1/tasks/rooted/rollouts/a").json()["start"]
        ), first.text
        snapshots = running.client.get("/api/v1/snapshots").json()["items"]
    assert "processes" in json.dumps(snapshots)


def test_stream_is_passed_on_live_and_recorded(proxy: Proxy, limited: str) -> None:
    """A stream reaches its client as it is produced, and other rollouts from the record."""
    base = f"/t/{limited}/r/{{}}"
    proxy.client.post(base.format("a") + "/shell/exec", json={"command": "touch gate"})
    proxy.client.post(base.format("b") + "/shell/exec", json={"command": "touch gate"})
    with proxy.client.stream("GET", base.format("a") + "/api/stream?n=3") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: 0"
        # The server waits: what has come, came before it went on. Nobody else can open the gate, so it is cut off.
    again = proxy.client.get(base.format("c") + "/api/stream?n=3")
    assert again.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
    hit = proxy.client.get(base.format("d") + "/api/stream?n=3")
    assert (hit.text, hit.headers["cache-status"], hit.headers["content-type"]) == (
        again.text, HIT, "text/event-stream",
    )  # fmt: skip


def test_lost_client_does_not_cancel_the_run(proxy: Proxy, task: str) -> None:
    """A client that disconnects does not cancel the call; its result is recorded."""
    path = f"/t/{task}/r/{{}}/api/stream?n=20000"
    with socket.create_connection(proxy.address) as connection:
        connection.sendall(f"GET {path.format('a')} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert connection.recv(10)
    wait_until(lambda: _waiting(proxy, task) == 0, "the run does not end")
    other = proxy.client.get(path.format("b"), headers={"accept": "*/*"})
    assert other.text.endswith("data: 19999\n\n")


def _waiting(proxy: Proxy, task: str) -> int:
    return proxy.engine.tasks.rollouts.running[task, "a"].waiting


def test_response_without_end_ends_after_its_client(proxy: Proxy, limited: str) -> None:
    """Such as that of an event stream: the rollout's next call would wait for ever."""
    base = f"/t/{limited}/r/a/api"
    with proxy.client.stream("GET", f"{base}/endless") as response:
        assert next(response.iter_raw()) == b"."
    assert proxy.client.post(f"{base}/put", json={"x": "1"}, timeout=30).json() == {"x": "1"}
    assert proxy.outcomes(limited, "a") == ["miss"]


def test_response_too_long_to_record_is_passed_on(proxy: Proxy) -> None:
    """A response that is too long for a record reaches the client, and the next equal call runs again."""
    proxy.put("long", files={"/srv.py": PROGRAM}, servers=serve(answer_bytes=1 << 20))
    for rollout in ("a", "b"):
        answer = proxy.client.get(f"/t/long/r/{rollout}/api/big?mb=3")
        assert len(answer.content) == 3 << 20
        assert "hit" not in answer.headers["cache-status"]
    small = [proxy.client.get(f"/t/long/r/{r}/api/big?mb=1") for r in ("c", "d")]
    assert small[0].content == small[1].content


FAILS = {
    "/die": (502, "closed the connection without a response"),
    "/half": (502, "in the middle of its response"),
    "/garbage": (502, "not HTTP"),
    "/silent": (504, "says nothing"),
}


@pytest.mark.parametrize("path", FAILS)
def test_failing_server_records_nothing(proxy: Proxy, task: str, limited: str, path: str) -> None:
    """A failure of the server is an error for the client, and nothing is recorded."""
    status, words = FAILS[path]
    base = f"/t/{limited if path == '/silent' else task}/r/a/api"
    proxy.client.post(f"{base}/put", json={"x": "1"})
    recorded = proxy.recorded
    answer = proxy.client.get(base + path)
    assert answer.status_code == status
    assert words in answer.json()["detail"]
    assert proxy.recorded == recorded
    # The rollout goes on where it was, in another sandbox.
    assert proxy.client.get(f"{base}/get?key=x").json()["value"] == "1"


@pytest.mark.parametrize(
    ("command", "ready_s", "status", "words"),
    [("echo no such luck; exit 3", 30, 502, "no such luck"), ("echo waits; sleep 60", 2, 504, "waits")],
)
def test_failed_server_start_shows_its_output(
    proxy: Proxy, command: str, ready_s: float, status: int, words: str
) -> None:
    """A server that does not start is an error that contains the server's output."""
    name = f"start-{status}"
    proxy.put(name, servers={"api": {"command": command, "port": 9000, "ready_s": ready_s}})
    answer = proxy.client.get(f"/t/{name}/r/a/api/x")
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "1")
    assert words in answer.json()["detail"]
    assert proxy.client.get(f"/api/v1/tasks/{name}/rollouts/a").json()["calls"] in (0, [])


SMUGGLED = {
    "an absolute target": (b"GET http://example.com/t/T/r/a/api/echo HTTP/1.1\r\nhost: example.com\r\n\r\n", 400),
    "an authority": (b"CONNECT example.com:80 HTTP/1.1\r\nhost: example.com\r\n\r\n", 400),
    "two framings": (
        (
            b"POST /t/T/r/a/api/put HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
            b"0\r\n\r\nGET /t/T/r/a/api/die HTTP/1.1\r\nhost: x\r\n\r\n"
        ), 400,
    ),
    "two lengths": (
        b"POST /t/T/r/a/api/put HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400,
    ),
    "a folded header": (b"GET /t/T/r/a/api/echo HTTP/1.1\r\nhost: x\r\nx-a: 1\r\n 2\r\n\r\n", 400),
    "a name with a space": (b"GET /t/T/r/a/api/echo HTTP/1.1\r\nhost: x\r\nx a: 1\r\n\r\n", 400),
    "an encoded slash in a name": (b"GET /t/T%2Fx/r/a/api/echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 400),
    "half an upload": (b"POST /t/T/r/a/api/put HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{", 0),
}  # fmt: skip


@pytest.mark.parametrize("case", SMUGGLED)
def test_ambiguous_request_is_refused(proxy: Proxy, task: str, case: str) -> None:
    """A request that two servers could parse differently is refused."""
    sent, status = SMUGGLED[case]
    recorded = proxy.recorded
    sent = sent.replace(b"/t/T", f"/t/{task}".encode())
    with socket.create_connection(proxy.address, timeout=30) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(f"HTTP/1.1 {status}".encode() if status else b"")
    assert b"die" not in answer
    assert proxy.recorded == recorded


def test_server_sees_only_its_own_address(proxy: Proxy, task: str) -> None:
    """The server sees its own address in a request, and no address of the proxy."""
    base = f"{proxy.url}/t/{task}/r/a/api"
    headers = {
        "Host": "evil.test", "X-Forkpoint-Task": "x", "Connection": "x-hop", "X-Hop": "1", "X-Kept": "2",
        "Referer": "http://evil.test/page",
    }  # fmt: skip
    told = dict(proxy.client.get(f"{base}/echo", headers=headers).json()["headers"])
    assert told["Host"] == "127.0.0.1:9000"
    assert told["x-kept"] == "2"
    assert not {"x-hop", "x-forkpoint-task"} & told.keys()
    own = proxy.client.get(f"{base}/echo", headers={"Origin": proxy.url, "Referer": f"{base}/page"}).json()["headers"]
    assert dict(own)["origin"] == "http://127.0.0.1:9000"
    assert dict(own)["referer"] == "http://127.0.0.1:9000/page"


def test_places_in_answers_are_ours_for_each_client(proxy: Proxy, task: str) -> None:
    for rollout in ("a", "b"):
        base = f"{proxy.url}/t/{task}/r/{rollout}/api"
        for to, want in (
            ("http://127.0.0.1:9000/x?y", f"{base}/x?y"),
            ("http://localhost:9000", base),
            ("/z", f"{base}/z"),
            ("relative", "relative"),
            ("http://other.example/", "http://other.example/"),
            ("//other.example/", "//other.example/"),
        ):
            assert proxy.client.get(f"{base}/redirect", params={"to": to}).headers["location"] == want
        cookie = proxy.client.get(f"{base}/cookie").headers["set-cookie"]
        assert cookie == f"s=1; Path=/t/{task}/r/{rollout}/api/"
        proxy.client.cookies.clear()


def test_encoded_slash_reaches_the_server_unchanged(proxy: Proxy, task: str) -> None:
    """An encoded slash below the endpoint reaches the server as it was sent."""
    told = raw(
        proxy, f"GET /t/{task}/r/a/api/a%2Fb/c?d=%2F&e HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
    )
    assert json.loads(told.partition(b"\r\n\r\n")[2]).get("target", "/a%2Fb/c?d=%2F&e") == "/a%2Fb/c?d=%2F&e"


def test_uploads_are_whole_and_binary(proxy: Proxy, task: str) -> None:
    body = bytes(range(256)) * (10 << 12)
    answer = proxy.client.post(f"/t/{task}/r/a/api/length", content=body)
    assert answer.json() == {"length": len(body)}
    over = proxy.client.post(f"/t/{task}/r/a/api/length", content=b"x" * ((64 << 20) + 1))
    assert over.status_code == 413


def test_key_contains_only_relevant_parts(proxy: Proxy, task: str) -> None:
    """The key contains the parts of a request that may change its result, and no others."""

    def asked(rollout: str, path: str, **headers: str) -> str:
        return str(proxy.client.get(f"/t/{task}/r/{rollout}/api{path}", headers=headers).headers["cache-status"])

    asked("a", "/echo?a=1&b=2", **{"X-User": "alice", "User-Agent": "one", "X-Request-ID": "1"})
    assert asked("b", "/echo?b=2&a=1", **{"X-User": "alice", "User-Agent": "two", "X-Request-ID": "2"}) == HIT
    assert asked("c", "/echo?a=1&b=2", **{"X-User": "bob"}) == STORED
    assert asked("d", "/echo?a=1&a=2", **{"X-User": "alice"}) == STORED
    assert asked("e", "/echo?a=2&a=1", **{"X-User": "alice"}) == STORED


def test_retried_request_joins_the_first(proxy: Proxy, task: str) -> None:
    """A request that is sent again joins the first one."""
    path, headers = f"/t/{task}/r/a/api/draw", {"X-Request-ID": "once"}
    first, second = (proxy.client.post(path, headers=headers).json() for _ in range(2))
    assert first == second
    other = proxy.client.post(path, headers={"X-Request-ID": "another"}).json()
    assert other != first


def test_two_clients_of_a_rollout_take_turns(proxy: Proxy, task: str) -> None:
    """Two clients that use one rollout are answered one after the other."""
    answers: list[httpx.Response] = []

    def put(n: int) -> None:
        answers.append(httpx.post(f"{proxy.url}/t/{task}/r/a/api/put", json={str(n): "x"}, timeout=30))

    threads = [threading.Thread(target=put, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(answer.json()) for answer in answers) == [1, 2, 3, 4]


def test_killed_server_is_started_again(proxy: Proxy, task: str) -> None:
    """A server that a command has killed is started again."""
    base = f"/t/{task}/r/a"
    proxy.client.post(f"{base}/api/put", json={"x": "1"})
    proxy.client.post(
        f"{base}/shell/exec", json={"command": "pkill -f srv.py; while pgrep -f srv.py; do sleep .01; done"}
    )
    assert proxy.client.get(f"{base}/api/get?key=x").json() == {"value": None}


def test_shell_and_server_share_files_and_loopback(proxy: Proxy, task: str) -> None:
    """The shell and the server share files and the loopback network."""
    base = f"/t/{task}/r/a"
    proxy.client.post(f"{base}/api/put", json={"x": "1"})
    told = proxy.client.post(f"{base}/shell/exec", json={"command": "curl -s http://127.0.0.1:9000/get?key=x"}).json()
    assert json.loads(told["stdout"]) == {"value": "1"}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"servers": {"api": {"command": "x", "port": 1, "dialect": "no-such"}}}, "there is no dialect"),
        ({"servers": {"shell": {"command": "x", "port": 1}}}, "built in"),
        ({"servers": {"a": {"command": "x", "port": 1}, "b": {"command": "x", "port": 1}}}, "the same port"),
        ({"driver": "memory", "servers": {"a": {"command": "x", "port": 1}}}, "runs no servers"),
        ({"servers": {"a": {"command": "x", "port": 1, "rules": [{"on": "nonsense"}]}}}, "a method and a path"),
    ],
)
def test_a_spec_that_cannot_be_served_is_refused(proxy: Proxy, spec: dict[str, Any], words: str) -> None:
    answer = proxy.client.put("/api/v1/tasks/refused", json=spec)
    assert answer.status_code == 422
    assert words in answer.text


def test_unknown_endpoints_are_told_which_there_are(proxy: Proxy, task: str) -> None:
    answer = proxy.client.get(f"/t/{task}/r/a/nothing/x")
    assert answer.status_code == 404
    assert "api, docker, e2b, mcp, shell" in answer.json()["detail"]
    nameless = proxy.client.get(f"/t/{task}/api/echo")
    assert nameless.status_code == 400
    assert "rollout" in nameless.json()["detail"]


def test_busy_rollout_does_not_block_others(proxy: Proxy, limited: str) -> None:
    """A request that waits for a busy rollout does not block requests of other rollouts."""
    for rollout in ("busy", "free"):
        assert proxy.client.post(f"/t/{limited}/r/{rollout}/api/put", json={"of": rollout}).is_success
    answers: list[httpx.Response] = []

    def silent() -> None:
        answers.append(httpx.get(f"{proxy.url}/t/{limited}/r/busy/api/silent", timeout=30))

    thread = threading.Thread(target=silent)
    thread.start()
    wait_until(lambda: proxy.engine.tasks.rollouts.running[limited, "busy"].waiting > 0, "the rollout is not busy")
    assert proxy.client.get(f"/t/{limited}/r/free/api/echo").is_success
    assert not answers
    thread.join()
