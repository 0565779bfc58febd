"""WebSockets to servers inside sandboxes, as an agent's client meets them through the whole proxy."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from proxy.tree.rollout import Outcome
from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_criu, wait_until

PROGRAM = Path(__file__).with_name("socket_server.py").read_text()
RULES: list[dict[str, Any]] = [
    {"on": "WS /many", "answers": 3},
    {"on": "WS /quiet", "answers": "quiet"},
    {"on": "WS /none", "answers": 0},
    {"on": "WS /reads", "effect": "read"},
]


def spec(**more: Any) -> dict[str, Any]:
    server = {"command": "exec python3 /srv.py 9000", "port": 9000, "ready": "/", "rules": RULES}
    return {"files": {"/srv.py": PROGRAM}, "servers": {"api": {**server, **more}}}


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with real_proxy() as running:
        yield running


@pytest.fixture
def task(proxy: Proxy, request: pytest.FixtureRequest) -> str:
    """A task of its own for each test."""
    name = request.node.name.split("[")[0][-100:]
    proxy.put(name, **spec())
    return str(name)


def opened(proxy: Proxy, place: str, **more: Any) -> ClientConnection:
    url = f"ws://{proxy.address[0]}:{proxy.address[1]}/t/{place}"
    opened: ClientConnection = connect(url, proxy=None, open_timeout=30, **more)
    return opened


def ask(line: ClientConnection, text: str) -> Any:
    line.send(text)
    return json.loads(line.recv(30))


def test_second_rollouts_messages_are_hits(proxy: Proxy, task: str) -> None:
    """Messages are calls, and the second rollout is answered from the tree."""
    told = {}
    before, hits = proxy.engine.counts.starts, proxy.engine.counts.outcomes[Outcome.HIT]
    for rollout in ("a", "b"):
        with opened(proxy, f"{task}/r/{rollout}/api/x") as line:
            told[rollout] = [ask(line, text) for text in ("add 1", "get", "add 2", "what else")]
    assert told["a"] == told["b"]
    assert told["a"][2] == {"said": ["1", "2"], "shared": ["1", "2"]}
    # Nobody connected anywhere for the second.
    assert proxy.engine.counts.starts == before + 1
    assert proxy.engine.counts.outcomes[Outcome.HIT] == hits + 4


def test_replay_rebuilds_the_connections_memory(proxy: Proxy, task: str) -> None:
    """A rollout that diverges from the tree finds its connection's memory, rebuilt by a replay."""
    with ExitStack() as stack:
        lines = [stack.enter_context(opened(proxy, f"{task}/r/{n}/api/x")) for n in range(3)]
        for line in lines:
            assert ask(line, "add 1")["said"] == ["1"]
        told = [ask(line, f"add of {n}") for n, line in enumerate(lines)]
        assert told == [{"said": ["1", f"of {n}"], "shared": ["1", f"of {n}"]} for n in range(3)]
        assert [ask(line, "get")["said"] for line in lines] == [["1", f"of {n}"] for n in range(3)]


def test_checkpoint_restores_the_connections_memory() -> None:
    """A value in a connection's memory that no replay could make again comes back from a checkpoint."""
    require_criu()
    with real_proxy(checkpoints=True) as running, ExitStack() as stack:
        running.put("random", **spec())
        lines = [stack.enter_context(opened(running, f"random/r/{n}/api/x")) for n in range(3)]
        drawn = [ask(line, "draw")["drawn"] for line in lines]
        assert len(set(drawn)) == 1
        wait_until(lambda: running.is_kept("random"), "no checkpoint was taken")
        told = [ask(line, f"add {n}")["said"] for n, line in enumerate(lines)]
        assert told == [[drawn[0], str(n)] for n in range(3)]
        # The connections go on in the restored sandboxes.
        assert [ask(line, "get")["said"] for line in lines] == told
        assert running.engine.counts.restores > 0


def test_connection_without_rollout_gets_its_own(proxy: Proxy, task: str) -> None:
    """A connection whose URL names no rollout is a rollout of its own."""
    with opened(proxy, f"{task}/api/x") as one, opened(proxy, f"{task}/api/x") as other:
        assert ask(one, "add 1")["said"] == ["1"]
        assert ask(other, "add 2")["said"] == ["2"]
        assert ask(one, "get")["said"] == ["1"]
        assert len(proxy.client.get(f"/api/v1/tasks/{task}/rollouts").json()["items"]) == 2
    wait_until(
        lambda: not [r for r in proxy.engine.tasks.rollouts.running if r[0] == task],
        "the rollouts did not end with them",
    )


def test_second_connection_opens_another_to_the_server(proxy: Proxy, task: str) -> None:
    """A second connection of a rollout opens a second connection to the server."""
    for rollout in ("a", "b"):
        with opened(proxy, f"{task}/r/{rollout}/api/x") as line:
            ask(line, "add 1")
        with opened(proxy, f"{task}/r/{rollout}/api/x") as line:
            assert ask(line, "get") == {"said": [], "shared": ["1"]}


def test_text_and_binary_messages_differ(proxy: Proxy, task: str) -> None:
    """A text message and a binary message with the same bytes are different calls."""
    with opened(proxy, f"{task}/r/a/api/x") as line:
        line.send(b"\x00abc\xff")
        assert line.recv(30) == b"\xffcba\x00"
        assert ask(line, "abc") == {"echo": "abc"}
        line.send(b"abc")
        assert line.recv(30) == b"cba"
        line.send("parts")
        assert line.recv(30) == "one two"
        assert ask(line, "ping") == {"pong": True}
        assert ask(line, "big 300000") == "x" * 300_000


@pytest.mark.parametrize(("path", "text"), [("many", "many 3"), ("quiet", "many 5")])
def test_a_rule_says_how_many_messages_answer(proxy: Proxy, task: str, path: str, text: str) -> None:
    count = int(text.split(" ")[1])
    for rollout in ("a", "b"):
        with opened(proxy, f"{task}/r/{rollout}/api/{path}") as line:
            line.send(text)
            assert [json.loads(line.recv(30)) for _ in range(count)] == list(range(count))


def test_message_without_answer_is_a_call(proxy: Proxy, task: str) -> None:
    """A message that the server does not answer is a call as well."""
    for rollout in ("a", "b"):
        with opened(proxy, f"{task}/r/{rollout}/api/none") as line:
            line.send("nothing")
        wait_until(lambda r=rollout: _calls(proxy, task, r) == 1, "it was not recorded")  # type: ignore[misc]


def _calls(proxy: Proxy, task: str, rollout: str) -> int:
    found = proxy.engine.tasks.rollouts.running.get((task, rollout))
    return 0 if found is None else found.calls


def test_reading_message_does_not_split_the_tree(proxy: Proxy, task: str) -> None:
    """A message that changes nothing does not split the tree."""
    with opened(proxy, f"{task}/r/a/api/reads") as line:
        ask(line, "add 1")
        node = proxy.engine.tasks.rollouts.running[task, "a"].node
        ask(line, "get")
        assert proxy.engine.tasks.rollouts.running[task, "a"].node is node
        ask(line, "file x")
        assert proxy.engine.tasks.rollouts.running[task, "a"].node is not node


def test_server_close_code_reaches_the_client(proxy: Proxy, task: str) -> None:
    """When the server closes the connection, the client gets its close code."""
    for rollout in ("a", "b"):
        with opened(proxy, f"{task}/r/{rollout}/api/x") as line:
            line.send("close 4321")
            with pytest.raises(ConnectionClosed) as closed:
                line.recv(30)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4321, "as asked")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("die", "without a close"),
        ("cut", "without a close"),
        ("garbage", "breaks the WebSocket"),
        ("silent", "says nothing"),
    ],
)
def test_failing_server_closes_without_a_record(proxy: Proxy, task: str, text: str, words: str) -> None:
    """A server that fails closes the connection, and nothing is recorded."""
    place = f"{task}-{text}"
    proxy.put(place, **spec(**({"timeout_s": 3} if text == "silent" else {})))
    with opened(proxy, f"{place}/r/a/api/x") as line:
        ask(line, "add 1")
        recorded = proxy.recorded
        line.send(text)
        with pytest.raises(ConnectionClosed) as closed:
            line.recv(30)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1013
    assert words in closed.value.rcvd.reason
    assert proxy.recorded == recorded


def test_a_refused_handshake_of_the_server_is_told(proxy: Proxy, task: str) -> None:
    with opened(proxy, f"{task}/r/a/api/forbidden") as line:
        line.send("x")
        with pytest.raises(ConnectionClosed) as closed:
            line.recv(30)
    assert closed.value.rcvd is not None
    assert "refuses the WebSocket" in closed.value.rcvd.reason


def test_server_sees_own_address_and_client_headers(proxy: Proxy, task: str) -> None:
    """The server sees its own address and the client's headers."""
    more = {"User-Agent": "mine", "X-Forkpoint-Task": "x", "Authorization": "Bearer theirs"}
    with opened(
        proxy,
        f"{task}/r/a/api/deep/er?q=1%2F2",
        additional_headers=more,
        subprotocols=["one", "two"],
    ) as line:
        told = ask(line, "head")
        assert line.subprotocol == "one"
    fields = told["fields"]
    assert told["target"] == "/deep/er?q=1%2F2"
    assert fields["host"] == "127.0.0.1:9000"
    assert fields["authorization"] == "Bearer theirs"
    assert not {"x-forkpoint-task", "origin", "sec-websocket-extensions"} & fields.keys()


def test_a_page_of_another_site_opens_no_connection(proxy: Proxy, task: str) -> None:
    with pytest.raises(InvalidStatus) as refused, opened(proxy, f"{task}/r/a/api/x", origin="http://evil.test"):
        pass
    assert refused.value.response.status_code == 403


def test_ping_is_answered_during_a_message(proxy: Proxy, task: str) -> None:
    """A client's ping is answered while a message is still being answered."""
    proxy.put("slow", **spec(command="sleep 3; exec python3 /srv.py 9000"))
    with opened(proxy, "slow/r/a/api/x") as line:
        line.send("add 1")
        assert line.ping().wait(30)
        with pytest.raises(TimeoutError):
            line.recv(0)
        assert json.loads(line.recv(30))["said"] == ["1"]
    del task


def test_many_messages_at_once_are_answered_in_order(proxy: Proxy, task: str) -> None:
    with opened(proxy, f"{task}/r/a/api/x") as line:
        for n in range(100):
            line.send(f"echo {n}")
        assert [json.loads(line.recv(30))["echo"] for _ in range(100)] == [f"echo {n}" for n in range(100)]


def test_lost_client_does_not_cancel_its_message(proxy: Proxy, task: str) -> None:
    """A client that disconnects does not cancel its message; the result is recorded."""
    with opened(proxy, f"{task}/r/a/api/x") as line:
        ask(line, "add 1")
        line.send("add 2")
        line.socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: _calls(proxy, task, "a") == 2, "its message was not run")
    with opened(proxy, f"{task}/r/b/api/x") as other:
        ask(other, "add 1")
        assert ask(other, "add 2")["said"] == ["1", "2"]


@pytest.mark.parametrize(
    ("place", "status", "words"),
    [
        ("T/r/a/shell/exec", 400, "no-websocket"),
        ("T/r/a/nothing/x", 404, "no-such-endpoint"),
        ("T/r/a%2Fb/api/x", 400, "name"),
        ("T/r", 404, "no-such-path"),
    ],
)
def test_a_handshake_that_leads_nowhere_is_refused(
    proxy: Proxy, task: str, place: str, status: int, words: str
) -> None:
    with pytest.raises(InvalidStatus) as refused, opened(proxy, place.replace("T", task, 1)):
        pass
    assert refused.value.response.status_code == status
    assert words in (refused.value.response.body or b"").decode()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET ws://evil.example/t/T/r/a/api/x HTTP/1.1\r\nhost: evil.test\r\n",
        b"GET /t/T/r/a/api/x HTTP/1.1\r\nhost: x\r\nsec-websocket-key: short\r\n",
    ],
)
def test_a_handshake_that_is_none_reaches_nobody(proxy: Proxy, task: str, sent: bytes) -> None:
    head = b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\r\n"
    with socket.create_connection(proxy.address, timeout=30) as connection:
        connection.sendall(sent.replace(b"/T/", f"/{task}/".encode()) + head)
        assert connection.recv(65536).startswith(b"HTTP/1.1 4")
    assert (task, "a") not in proxy.engine.tasks.rollouts.running
