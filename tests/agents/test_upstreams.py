"""Servers outside Forkpoint's care: what is shared, what is asked again, and what never is."""

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from forkpoint.ephemeral_proxy import ephemeral_proxy
from sandboxes.upstream.driver import HttpDriver
from tests.agents.elsewhere import Elsewhere, elsewhere
from tests.proxy.serving import Running, serving

HIT = "forkpoint; hit"
READS: list[dict[str, Any]] = [{"on": "POST /search", "effect": "read"}]
SESSIONS: list[dict[str, Any]] = [
    {"on": "POST /open", "do": "open", "rollout": "fresh", "names": "body:session", "args": "none", "tool": "open"},
    {"on": "POST /list", "effect": "read", "rollout": "body:session", "tool": "list"},
    {"on": "POST /search", "stateless": True},
    {"on": "POST /{tool}", "rollout": "body:session", "tool": "{tool}"},
]


@pytest.fixture
def there() -> Iterator[Elsewhere]:
    with elsewhere() as told:
        yield told


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path, drivers={"http": HttpDriver(tmp_path / "http")}) as running:
        yield running


def put(proxy: Running, there: Elsewhere, **server: Any) -> None:
    spec = {"driver": "http", "servers": {"api": {"upstream": f"{there.url}/api", "timeout_s": 30, **server}}}
    answer = proxy.client.put("/api/v1/tasks/t", json=spec)
    assert answer.is_success, answer.text


def recorded(proxy: Running, rollout: str) -> int:
    return len(proxy.client.get(f"/api/v1/tasks/t/rollouts/{rollout}").json()["steps"]["items"])


def test_read_by_rule_is_requested_once(proxy: Running, there: Elsewhere) -> None:
    """A request that a rule marks as a read is sent once for all rollouts."""
    put(proxy, there, rules=READS)
    answers = [proxy.client.post(f"/t/t/r/{r}/api/search", json={"q": "x"}) for r in ("a", "b", "b")]
    assert [answer.json()["echo"] for answer in answers] == [{"q": "x"}] * 3
    assert [answer.headers["cache-status"] == HIT for answer in answers] == [False, True, True]
    assert there.asked == ["POST /api/search"]


def test_request_without_rule_is_sent_each_time(proxy: Running, there: Elsewhere) -> None:
    """A request that no rule matches is sent each time."""
    put(proxy, there, rules=READS)
    for rollout in ("a", "a", "b"):
        # A server whose state is nobody's to know: not even a GET may be believed.
        assert proxy.client.get(f"/t/t/r/{rollout}/api/thing").headers["cache-status"] == "forkpoint; fwd=bypass"
    assert there.asked == ["GET /api/thing"] * 3


def test_mode_pass_shares_nothing_whatever_the_rules_say(proxy: Running, there: Elsewhere) -> None:
    put(proxy, there, rules=READS, mode="pass")
    for _ in range(2):
        assert proxy.client.post("/t/t/r/a/api/search", json={"q": "x"}).headers["cache-status"] != HIT
    assert len(there.asked) == 2


class Client:
    """One agent, which knows its session by the name that it was given."""

    def __init__(self, proxy: Running) -> None:
        self.base, self.client, self.hits = "/t/t/api", proxy.client, 0
        self.session = self.post("/open")["session"]

    def post(self, path: str, **body: Any) -> Any:
        named = {"session": self.session} if hasattr(self, "session") else {}
        answer = self.client.post(self.base + path, json={**named, **body}, headers={"cookie": ""})
        assert answer.is_success, answer.text
        self.hits += answer.headers["cache-status"] == HIT
        return answer.json()


def test_diverging_session_is_opened_and_replayed(proxy: Running, there: Elsewhere) -> None:
    """A session that diverges from the tree is opened at the server, and its path is replayed."""
    put(proxy, there, rules=SESSIONS, bind=["session", "note"])
    clients = [Client(proxy) for _ in range(4)]
    for client in clients:
        assert client.post("/add", word="one")["words"] == ["one"]
        assert client.post("/list") == {"session": client.session, "words": ["one"]}
    assert [client.hits for client in clients] == [0, 3, 3, 3]
    assert len(there.sessions) == 1
    told = [client.post("/add", word=f"of {n}") for n, client in enumerate(clients)]
    assert [one["words"] for one in told] == [["one", f"of {n}"] for n in range(4)]
    assert [one["session"] for one in told] == [client.session for client in clients]
    assert sorted(map(tuple, there.sessions.values())) == [("one", f"of {n}") for n in range(4)]
    assert len({client.session for client in clients}) == 4


def test_sessions_by_cookie_are_opened_again_too(proxy: Running, there: Elsewhere) -> None:
    opens = {"on": "POST /open", "do": "open", "tool": "open", "args": "body", "names": "body:session"}
    put(proxy, there, dialect="nemo-gym", rules=[opens], bind=["session", "note"])
    with ExitStack() as stack:
        base = f"{proxy.client.base_url}/t/t/api"
        clients = [stack.enter_context(httpx.Client(base_url=base, trust_env=False)) for _ in range(3)]
        for client in clients:
            client.post("/open").raise_for_status()
            assert client.post("/add", json={"word": "one"}).json()["words"] == ["one"]
        assert len(there.sessions) == 1
        told = [client.post("/add", json={"word": str(n)}).json()["words"] for n, client in enumerate(clients)]
        assert told == [["one", "0"], ["one", "1"], ["one", "2"]]


def test_what_is_stateless_touches_no_session(proxy: Running, there: Elsewhere) -> None:
    put(proxy, there, rules=SESSIONS, bind=["session", "note"])
    one, other = Client(proxy), Client(proxy)
    one.post("/add", word="x")
    asked = len(there.asked)
    for client in (one, other):
        assert client.client.post("/t/t/api/search", json={"q": 1}).json()["echo"] == {"q": 1}
    # Nobody's path was made again for it.
    assert there.asked[asked:] == ["POST /api/search"]


def test_call_without_session_explains_the_remedy(proxy: Running, there: Elsewhere) -> None:
    """A call before any session gets an error that says what to do."""
    put(proxy, there, rules=SESSIONS)
    answer = proxy.client.post("/t/t/r/a/api/add", json={"word": "x"})
    assert answer.status_code == 409
    assert "open" in answer.json()["detail"]
    assert there.asked == []


def test_lost_session_is_rebuilt(proxy: Running, there: Elsewhere) -> None:
    """A session that the server has lost is built again."""
    put(proxy, there, rules=SESSIONS, bind=["session", "note"], lost=[404])
    client = Client(proxy)
    client.post("/add", word="one")
    there.sessions.clear()
    gone = proxy.client.post("/t/t/api/add", json={"session": client.session, "word": "two"})
    assert gone.status_code == 502
    assert client.post("/add", word="two")["words"] == ["one", "two"]


def test_a_session_that_nobody_needs_is_parted_from(tmp_path: Path, there: Elsewhere) -> None:
    farewell = {"method": "DELETE", "path": "/session/{session}"}
    with serving(tmp_path, drivers={"http": HttpDriver(tmp_path / "http")}) as proxy:
        put(proxy, there, rules=SESSIONS, bind=["session", "note"], farewell=farewell)
        Client(proxy).post("/add", word="one")
        (session,) = there.sessions
    assert there.asked[-1] == f"DELETE /api/session/{session}"
    assert not there.sessions


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [("/fail", 500, "as asked"), ("/half", 502, "cannot be reached"), ("/silent", 504, "sent nothing")],
)
@pytest.mark.parametrize("mode", ["replay", "pass"])
def test_upstream_failure_is_never_recorded(
    proxy: Running, there: Elsewhere, path: str, status: int, words: str, mode: str
) -> None:
    """A failure of the server elsewhere is reported to the client and never recorded."""
    put(
        proxy,
        there,
        rules=[{"on": "* /{any}", "effect": "read"}],
        mode=mode,
        timeout_s=0.5 if path == "/silent" else 30,
    )
    for _ in range(2):
        answer = proxy.client.post(f"/t/t/r/a/api{path}", json={})
        assert (answer.status_code, answer.headers["cache-status"]) == (status, "forkpoint; fwd=miss; detail=error")
        assert words in answer.json()["detail"]
    assert len(there.asked) == 2
    assert recorded(proxy, "a") == 0


def test_too_many_requests_is_told_as_it_was(proxy: Running, there: Elsewhere) -> None:
    put(proxy, there, rules=[{"on": "* /{any}", "effect": "read"}])
    there.fails = 429
    assert proxy.client.post("/t/t/r/a/api/fail", json={}).status_code == 429
    assert recorded(proxy, "a") == 0


def test_nobody_there_is_an_error(proxy: Running, there: Elsewhere) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        there.port = closed.getsockname()[1]
        put(proxy, there)
        assert proxy.client.get("/t/t/r/a/api/x").status_code == 502


def test_a_stream_reaches_its_client_as_it_comes(proxy: Running, there: Elsewhere) -> None:
    put(proxy, there, rules=[{"on": "GET /stream", "effect": "read"}], timeout_s=20)
    with proxy.client.stream("GET", "/t/t/r/a/api/stream") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: 0"
        there.gate.set()
        assert [line for line in lines if line] == ["data: 1", "data: 2"]
    assert proxy.client.get("/t/t/r/b/api/stream").headers["cache-status"] == HIT


def test_places_and_headers_are_the_upstream_s_own(proxy: Running, there: Elsewhere) -> None:
    put(proxy, there)
    base = f"{str(proxy.client.base_url).rstrip('/')}/t/t/r/a/api"
    for to, want in (
        (f"{there.url}/api/x?y", f"{base}/x?y"),
        ("/api/z", f"{base}/z"),
        # Outside the prefix is outside of what this endpoint is.
        ("/other", f"{there.url}/other"),
        ("relative", "relative"),
        ("http://other.example/", "http://other.example/"),
    ):
        assert proxy.client.post(f"{base}/away", json={"to": to}).headers["location"] == want
    proxy.client.get(f"{base}/x", headers={"Host": "evil.test", "Authorization": "Bearer theirs"})
    seen = there.headers[-1]
    assert (seen["host"], seen["authorization"]) == (f"127.0.0.1:{there.port}", "Bearer theirs")
    assert "x-forkpoint-task" not in seen


ESCAPES = ["/../x", "/%2e%2e/x", "/a/..%2fx", "/..;/x", "/a%5c..%5cx", "/./x"]


@pytest.mark.parametrize("path", ESCAPES)
def test_no_path_leaves_the_prefix(proxy: Running, there: Elsewhere, path: str) -> None:
    put(proxy, there)
    with socket.create_connection(proxy.address, timeout=30) as connection:
        connection.sendall(f"GET /t/t/r/a/api{path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert there.asked == []


@pytest.mark.parametrize(
    ("target", "asked"),
    [
        ("//evil.example/x", "GET /api//evil.example/x"),
        ("/@evil.example/x", "GET /api/@evil.example/x"),
        ("/http://evil.example/", "GET /api/http://evil.example/"),
        ("/a%2Fb?c=%2F&d", "GET /api/a%2Fb?c=%2F&d"),
        ("/%E2%82%AC?q=\u00e4", None),
    ],
)
def test_request_cannot_choose_its_server(proxy: Running, there: Elsewhere, target: str, asked: str | None) -> None:
    """A request chooses the path and the body, but not the server that gets them."""
    put(proxy, there)
    with socket.create_connection(proxy.address, timeout=30) as connection:
        line = f"GET /t/t/r/a/api{target} HTTP/1.1\r\nhost: evil.test\r\nconnection: close\r\n\r\n"
        connection.sendall(line.encode())
        b"".join(iter(lambda: connection.recv(65536), b""))
    assert there.asked == ([] if asked is None else [asked])


@pytest.mark.parametrize(
    "upstream",
    ["ftp://x", "http://user:pw@x", "http://x/?q", "http://x/#f", "http://x y", "http://", "//x", "http://x/\n", "x"],
)
def test_an_upstream_is_a_plain_url(proxy: Running, upstream: str) -> None:
    spec = {"driver": "http", "servers": {"api": {"upstream": upstream}}}
    assert proxy.client.put("/api/v1/tasks/t", json=spec).status_code == 422


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"driver": "http"}, "needs `servers`"),
        ({"driver": "http", "servers": {"a": {"command": "x", "port": 1}}}, "runs no servers"),
        ({"driver": "memory", "servers": {"a": {"upstream": "http://x"}}}, "Use driver 'http'"),
        ({"driver": "http", "setup": ["x"], "servers": {"a": {"upstream": "http://x"}}}, "has no sandbox"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(proxy: Running, spec: dict[str, Any], words: str) -> None:
    answer = proxy.client.put("/api/v1/tasks/t", json=spec)
    assert answer.status_code == 422
    assert words in answer.text


def test_there_is_no_shell_beside_an_upstream(proxy: Running, there: Elsewhere) -> None:
    put(proxy, there)
    answer = proxy.client.post("/t/t/r/a/shell/exec", json={"command": "id"})
    assert answer.status_code == 404
    assert "endpoints here are: api" in answer.json()["detail"]


def test_large_upload_is_spooled_to_disk(tmp_path: Path, there: Elsewhere) -> None:
    """An upload that is too large for memory is spooled to disk on its way."""
    with serving(tmp_path, drivers={"http": HttpDriver(tmp_path / "http")}, max_body_bytes=1 << 16) as proxy:
        body = random.Random(1).randbytes(3 << 20)  # noqa: S311
        put(proxy, there, mode="pass")
        told = proxy.client.post("/t/t/r/a/api/length", content=body)
        assert told.json() == {"length": len(body), "sum": sum(body[:1000])}
        assert there.headers[-1]["content-length"] == str(len(body))
        chunks = (body[n : n + 4096] for n in range(0, len(body), 4096))
        assert proxy.client.post("/t/t/r/a/api/length", content=chunks).json()["length"] == len(body)
        assert proxy.client.post("/t/t/r/a/api/length", content=bytes((1 << 22) + 1)).status_code == 413
        with socket.create_connection(proxy.address, timeout=30) as connection:
            connection.sendall(
                b"POST /t/t/r/a/api/length HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" + bytes(150_000)
            )
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
        # What is kept must be held, so it is bounded as ever.
        put(proxy, there, mode="replay")
        assert proxy.client.post("/t/t/r/b/api/length", content=body).status_code == 413
        assert len(there.asked) == 2
        assert not list(tmp_path.glob("upload-*"))


def test_large_bodies_need_constant_memory(there: Elsewhere) -> None:
    """Large bodies and long streams pass in constant memory."""
    with ephemeral_proxy() as proxy, httpx.Client(base_url=proxy.url, timeout=120, trust_env=False) as client:
        server = {"upstream": f"{there.url}/api", "answer_bytes": 1 << 20, "mode": "pass"}
        client.put("/api/v1/tasks/t", json={"driver": "http", "servers": {"api": server}}).raise_for_status()
        client.get("/t/t/r/a/api/big?2")
        before = _peak_mb(proxy.pid)
        body = bytes(10 << 20)
        for _ in range(5):
            assert client.post("/t/t/r/a/api/length", content=body).json()["length"] == len(body)
        sent = _peak_mb(proxy.pid)
        assert sent < before + 50, "several bodies were held"
        for path, size in (("big?100", 100 << 20), ("events?150000", 0)):
            with client.stream("GET", f"/t/t/r/a/api/{path}") as answer:
                heard = sum(map(len, answer.iter_raw()))
            assert heard >= (size or 30 << 20)
        assert _peak_mb(proxy.pid) < sent + 24, "a stream was held"


def _peak_mb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) >> 10


def test_a_request_may_name_its_task_itself(proxy: Running, there: Elsewhere) -> None:
    put(proxy, there, rules=READS, task="body:task_id")
    for task in ("one", "two", "one"):
        answer = proxy.client.post("/t/t/r/a/api/search", json={"q": "x", "task_id": task})
        assert answer.json()["echo"]["task_id"] == task
    assert len(there.asked) == 2
    assert {task["task"] for task in proxy.client.get("/api/v1/tasks").json()["items"]} >= {"t", "one", "two"}
    assert proxy.client.post("/t/t/r/a/api/search", json={"q": "x"}).json()["echo"] == {"q": "x"}
    assert proxy.client.post("/t/t/r/a/api/search", json={"q": "x", "task_id": "one"}).headers["cache-status"] == HIT
    refused = proxy.client.post("/t/t/r/a/api/search", json={"task_id": "../x"})
    assert (refused.status_code, refused.json()["type"]) == (400, "urn:forkpoint:name")


@pytest.mark.parametrize("seed", range(6))
def test_rollouts_get_the_same_answers_as_alone(proxy: Running, there: Elsewhere, seed: int) -> None:
    """Each rollout gets the answers that it would get without the others."""
    lots = random.Random(seed)  # noqa: S311
    put(proxy, there, rules=SESSIONS, bind=["session", "note"])
    clients = [(Client(proxy), list[str]()) for _ in range(4)]
    for _ in range(40):
        client, alone = lots.choice(clients)
        match lots.choice(["add", "add", "list", "search", "close"]):
            case "add":
                alone.append(lots.choice("xy"))
                assert client.post("/add", word=alone[-1]) == {"session": client.session, "words": alone}
            case "list":
                assert client.post("/list") == {"session": client.session, "words": alone}
            case "search":
                assert client.client.post("/t/t/api/search", json={"q": 1}).json()["echo"] == {"q": 1}
            case "close" if lots.random() < 0.3:
                # The server forgets the session, and its proxy finds out by itself.
                there.sessions.clear()
                put(proxy, there, rules=SESSIONS, bind=["session", "note"], lost=[404])
                clients = [(Client(proxy), []) for _ in clients]
