"""Streams through a member that does not own the task: the unmodified clients of Docker, E2B, MCP, and WebSockets."""

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

from sandboxes.linux.files import remove_tree
from tests.agents.clients import packages, run
from tests.agents.mcp_requests import NEW, OLD
from tests.agents.mcp_requests import spec as mcp_spec
from tests.agents.test_e2b import KEY, PYTHON_SDKS, plain
from tests.agents.test_sockets import spec as socket_spec
from tests.machine import require_criu, wait_until
from tests.proxy.cluster.nodes import MORTAL, Node, nodes
from tests.proxy.compat.harness.test_harness import expected, say, told
from tests.proxy.compat.harness.test_harness import spec as harness_spec
from tests.sandboxes.postgres_cluster import Cluster
from tests.scripted_model import scripted_model


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


def test_an_agent_in_the_sandbox_of_another_member_repeats_and_branches(members: dict[str, Node]) -> None:
    """The requests to its model are steps like all others, whichever member runs the rollout."""
    a, b = members.values()
    put(a, "harness", **harness_spec().model_dump(mode="json", exclude_defaults=True))

    def ran(node: Node, name: str, url: str, **more: Any) -> list[dict[str, Any]]:
        address = f"{node.url}/t/harness/r/{name}/harness"
        answer = httpx.post(address, json={"upstream": url, **more}, timeout=120)
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]

    with scripted_model(say) as model:
        first = ran(b, "first", model.url())
        assert told(first) == expected(told(first)[0])
        again = ran(a, "again", model.url("other"))
        assert [event["outcome"] for event in again[:-1]] == ["hit"] * (len(first) - 1)
        branch = ran(b, "branch", model.url("own", 1), parent="first", turn=1)
        assert told(branch) == expected(told(first)[0], "", "own")


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
        assert closed.value.rcvd is None
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
