"""Streams through a member that does not own the task: the unmodified clients of Docker, E2B, MCP, and WebSockets."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest
from docker.errors import DockerException
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from proxy.cluster.link.passing import PeerLostError
from proxy.cluster.messages import pack_event
from proxy.cluster.streams import SocketRelay, frame_of, serve_hijacked
from proxy.compat.endpoints import StreamTransport
from sandboxes.linux.files import remove_tree
from tests.agents.clients import packages, run
from tests.agents.mcp_requests import NEW, OLD
from tests.agents.mcp_requests import spec as mcp_spec
from tests.agents.test_e2b import KEY, PYTHON_SDKS, plain
from tests.agents.test_sockets import spec as socket_spec
from tests.machine import require_criu, until, wait_until
from tests.proxy.cluster.nodes import MORTAL, Node, nodes
from tests.sandboxes.postgres_cluster import Cluster


@pytest.fixture(scope="module")
def members(server: Cluster) -> Iterator[dict[str, Node]]:
    """Run two members with sandboxes; the tests make `a` the owner."""
    require_criu()
    server.create("streams", "SELECT 1")
    folder = Path(tempfile.mkdtemp(prefix="forkpoint-streams-", dir="/var/tmp"))
    folder.chmod(0o755)
    options = {"FORKPOINT_DRIVERS": '["local"]', "FORKPOINT_WARM_SANDBOXES": "0"}
    try:
        with nodes(folder, f"{server.dsn} dbname=streams", "ab", **options, **MORTAL) as running:
            yield running
            for node in running.values():
                node.stop()
    finally:
        remove_tree(folder)


def put(node: Node, task: str, **spec: Any) -> None:
    response = httpx.put(f"{node.url}/api/v1/tasks/{task}", json=spec, timeout=60)
    assert response.is_success, response.text


def outcomes(node: Node, task: str, rollout: str) -> list[str]:
    steps = httpx.get(f"{node.url}/api/v1/tasks/{task}/rollouts/{rollout}", timeout=60).json()["steps"]["items"]
    return [step["outcome"] for step in steps]


@contextmanager
def sdk(node: Node, task: str) -> Iterator[docker.DockerClient]:
    with closing(docker.DockerClient(base_url=f"tcp://127.0.0.1:{node.port}/t/{task}/docker", timeout=60)) as client:
        yield client


def test_docker_containers_of_two_members(members: dict[str, Node]) -> None:
    """Containers share their calls, with streams in both directions, whichever member their client uses."""
    a, b = members.values()
    put(a, "docker", workdir="/root")
    drawn = []
    for node in (a, b, b):
        with sdk(node, "docker") as client:
            container = client.containers.run("any:1", "sleep infinity", detach=True)
            script = "echo err >&2; head -c 8 /dev/urandom | od -An -tx1 | tee drawn"
            result: Any = container.exec_run(["sh", "-c", script], demux=True)
            assert [result.exit_code, result.output[1]] == [0, b"err\n"]
            assert container.exec_run("cat drawn").output == result.output[0]
            drawn.append(result.output[0])
            assert outcomes(b, "docker", str(container.id)) == ["miss" if len(drawn) == 1 else "hit"] * 2
            # The output of a main command is streamed, and its end is seen by another connection.
            output = client.containers.run("any:1", ["sh", "-c", f"echo {len(drawn)}; echo end"], remove=True)
            assert output == f"{len(drawn)}\nend\n".encode()
    assert len(set(drawn)) == 1
    # A container is the same one at each member.
    with sdk(a, "docker") as client:
        assert client.containers.get(str(container.id)).exec_run("cat drawn").output == drawn[0]


def test_e2b_sandboxes_of_two_members(members: dict[str, Node]) -> None:
    """A group of E2B's SDK shares a prefix and diverges; each rollout uses another member."""
    a, b = members.values()
    put(a, "e2b")
    answers = {}
    for part, node in (("p1", a), ("p2", b)):
        base = f"{node.url}/t/e2b/r/{part}/e2b"
        env = {"E2B_API_URL": base, "E2B_SANDBOX_URL": base, "E2B_API_KEY": KEY}
        answers[part] = run(packages(f"e2b=={PYTHON_SDKS[0]}"), "e2b_client.py", part, env=env)
    shared = answers["p1"][0]
    assert answers["p2"][1][:shared] == answers["p1"][1][:shared]
    assert plain(answers["p2"][1], "p2") == plain(answers["p1"][1], "p1")
    assert outcomes(b, "e2b", "p2").count("hit") >= shared - 2


def test_mcp_sessions_of_two_members(members: dict[str, Node]) -> None:
    """Clients of two MCP SDKs share a tree; progress reaches them while a tool runs."""
    a, b = members.values()
    put(a, "mcp", **mcp_spec())
    answers = [
        run(packages(requirement), "mcp_client.py", f"{node.url}/t/mcp/r/{node.name}/mcp", mode, node.name)
        for requirement, mode, node in ((OLD, "-", a), (NEW, "auto", b))
    ]
    shared = answers[0][0]
    assert answers[0][1][:shared] == answers[1][1][:shared]
    assert answers[0][2] == answers[1][2] != []


def opened(node: Node, place: str) -> ClientConnection:
    line: ClientConnection = connect(f"ws://127.0.0.1:{node.port}/t/{place}", proxy=None, open_timeout=60)
    return line


def ask(line: ClientConnection, text: str) -> Any:
    line.send(text)
    return json.loads(line.recv(60))


def read_to_end(output: Any) -> None:
    """Read a stream to its end, which an owner that dies does not send. Empty frames come meanwhile."""
    while output.read(1 << 16):
        pass


def test_killed_owner_ends_streams(members: dict[str, Node]) -> None:
    """An owner dies with streams open: each ends with an error, and the next owner goes on where agents are."""
    a, b = members.values()
    put(a, "sockets", **socket_spec())
    put(a, "cut", workdir="/root")
    words = ("add 1", "get", "add 2", "what else")
    with opened(a, "sockets/r/1/api/x") as line:
        answers = [ask(line, text) for text in words]
    with opened(b, "sockets/r/2/api/x") as line, sdk(b, "cut") as client:
        assert [ask(line, text) for text in words] == answers
        assert outcomes(b, "sockets", "2") == ["hit"] * 4
        container = client.containers.run("any:1", "sleep infinity", detach=True)
        assert container.exec_run(["sh", "-c", "echo kept > own"]).exit_code == 0
        started = client.api.exec_create(container.id, ["sh", "-c", "echo begun; sleep 600"])
        output: Any = client.api.exec_start(started["Id"], socket=True)
        # The first of them is the socket itself, which this client leaves open.
        with closing(output._sock), closing(output):
            assert b"begun\n" in iter(lambda: output.read(64)[8:], b"")
            a.kill()
            with pytest.raises(ConnectionResetError):
                read_to_end(output)
        with pytest.raises(ConnectionClosed) as closed:
            line.recv(60)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
        # What the agents were answered is there still; what was cut off is not.
        found: list[Any] = []

        def goes_on() -> bool:
            try:
                found.append(client.containers.get(str(container.id)).exec_run("cat own").output)
            except (OSError, DockerException):
                return False
            return True

        wait_until(goes_on, "no other member takes the container over", within_s=60)
        assert found == [b"kept\n"]
        with opened(b, "sockets/r/2/api/x") as again:
            assert ask(again, "get")["shared"] == ["1", "2"]
    a.start()


class Echo:
    """A stream that notes what its client does."""

    def __init__(self) -> None:
        self.events: list[bytes] = []

    def feed(self, data: bytes) -> None:
        self.events.append(data)

    def end_input(self) -> None:
        self.events.append(b"<end>")

    def lose(self) -> None:
        if self.events[-1:] != [b"<lost>"]:
            self.events.append(b"<lost>")


@pytest.mark.parametrize("is_whole", [True, False])
def test_only_a_stream_that_was_closed_has_an_end(*, is_whole: bool) -> None:
    """The owner reads a client's bytes behind the request's body, and an aborted stream is cut off."""

    async def go() -> None:
        incoming: asyncio.Queue[Any] = asyncio.Queue()
        sent, stream, bodies = list[Any](), Echo(), list[bytes]()

        async def send(message: Any) -> None:
            sent.append(message)

        def opened_stream(body: bytes, transport: StreamTransport) -> tuple[Echo, Any]:
            async def answer() -> None:
                transport.write(b"out")
                await transport.drain()
                await until(lambda: b"<end>" in stream.events)
                transport.write(b"last")
                (transport.close if is_whole else transport.abort)()

            bodies.append(body)
            return stream, answer()

        framed = frame_of(b"body") + b"first"
        for piece, more in ((framed[:3], True), (framed[3:], True), (b"second", False)):
            incoming.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        await serve_hijacked(incoming.get, send, opened_stream)
        assert bodies == [b"body"]
        assert stream.events == [b"first", b"second", b"<end>", b"<lost>"]
        assert b"".join(message.get("body", b"") for message in sent) == b"out" + is_whole * b"last"
        assert sent[-1].get("more_body", False) is not is_whole

    asyncio.run(go())


def test_socket_without_a_last_event_is_closed() -> None:
    """Events arrive whole from pieces of any size. If the owner's have no end, the agent may connect again."""
    events: list[Any] = [{"type": "websocket.accept"}, {"type": "websocket.send", "text": "\u00e9"}]

    async def go() -> None:
        sent = list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)

        relay = SocketRelay(send)
        await relay.head(200, (("transfer-encoding", "chunked"),))
        for byte in b"".join(frame_of(pack_event(event)) for event in events):
            await relay.data(bytes([byte]))
        assert sent == events
        await relay.cut()
        assert sent[2]["code"] == 1012
        refused = SocketRelay(send)
        with pytest.raises(PeerLostError):
            await refused.head(500, ())
        assert not refused.begun.is_set()

    asyncio.run(go())
