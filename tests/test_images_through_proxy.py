"""Sandboxes of an image behind the whole proxy, through its HTTP interface."""

import shutil
from collections.abc import Iterator

import httpx
import pytest

from tests.machine import Proxy, assert_nothing_left, data_directory, require_criu, require_sandboxes, served
from tests.sandboxes.image_archives import bash_image

HIT, MISS = "forkpoint; hit", "forkpoint; fwd=miss; stored"


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    require_sandboxes()
    with data_directory() as folder, served(folder) as running:
        yield running


@pytest.fixture
def client(proxy: Proxy) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=proxy.url, timeout=60) as client:
        spec = {"image": bash_image(), "setup": ["echo seed > /root/log"], "workdir": "/root"}
        client.put("/api/v1/tasks/task", json=spec).raise_for_status()
        yield client


def exec_(client: httpx.Client, rollout: str, command: str) -> tuple[str, str, str]:
    """Return the output of a call, its cache status, and the rollout's node after it."""
    answer = client.post(f"/t/task/r/{rollout}/shell/exec", json={"command": command}).raise_for_status()
    return answer.json()["stdout"], answer.headers["cache-status"], answer.headers["x-forkpoint-node"]


def test_rollouts_share_diverge_and_survive_a_kill(proxy: Proxy, client: httpx.Client) -> None:
    walked = [exec_(client, "a", command) for command in ("cd /tmp; X=1; echo a >> ~/log", "pwd; echo $X; cat ~/log")]
    assert [(out, how) for out, how, _ in walked] == [("", MISS), ("/tmp\n1\nseed\na\n", MISS)]
    assert walked[0][2] == walked[1][2], "a read-only call stays at its node"
    again = [exec_(client, "b", command) for command in ("cd /tmp; X=1; echo a >> ~/log", "pwd; echo $X; cat ~/log")]
    assert again == [(out, HIT, node) for out, _, node in walked]

    out, how, parted = exec_(client, "b", "echo b >> ~/log; cat ~/log; echo $X")
    assert (out, how) == ("seed\na\nb\n1\n", MISS)
    assert parted != walked[1][2]
    assert exec_(client, "a", "cat ~/log; pwd")[:2] == ("seed\na\n/tmp\n", MISS)

    processes = proxy.processes()
    proxy.kill()
    proxy.start()
    assert exec_(client, "b", "cat ~/log; echo $X; pwd") == ("seed\na\nb\n1\n/tmp\n", MISS, parted)
    assert exec_(client, "a", "cat ~/log; pwd")[:2] == ("seed\na\n/tmp\n", HIT)

    client.post("/api/v1/tasks/task/rollouts/b/fork", json={"name": "c"}).raise_for_status()
    assert exec_(client, "c", "cat ~/log; echo $X; pwd") == ("seed\na\nb\n1\n/tmp\n", HIT, parted)
    assert exec_(client, "c", "echo c >> ~/log; cat ~/log")[:2] == ("seed\na\nb\nc\n", MISS)
    assert exec_(client, "b", "echo b >> ~/log; cat ~/log")[:2] == ("seed\na\nb\nb\n", MISS)

    processes |= proxy.processes()
    proxy.stop()
    assert_nothing_left(proxy, processes, [])


def test_another_state_is_never_served(proxy: Proxy, client: httpx.Client) -> None:
    """All copies of a random state are gone: it is lost to those who are at it, and is not swapped for a new one."""
    made = "echo $RANDOM $RANDOM $RANDOM > /root/id; echo made"
    for rollout in ("a", "b"):
        assert exec_(client, rollout, made)[0] == "made\n"
    shown = exec_(client, "a", "cat /root/id")[0]
    assert len(shown.split()) == 3
    assert exec_(client, "b", "cat /root/id")[:2] == (shown, HIT)
    proxy.kill()
    shutil.rmtree(proxy.data / "local" / "layers")
    proxy.start()
    for rollout in ("a", "b"):
        assert exec_(client, rollout, "cat /root/id")[:2] == (shown, HIT)
        answer = client.post(f"/t/task/r/{rollout}/shell/exec", json={"command": "cat /root/id; true"})
        assert answer.status_code == 409, answer.text
        assert answer.json()["type"].endswith(":state-lost")
    # Another rollout gets a state of its own.
    assert exec_(client, "c", made)[:2] == ("made\n", MISS)
    own = exec_(client, "c", "cat /root/id")[0]
    assert own != shown
    assert exec_(client, "c", "cat /root/id; true")[0] == own
    proxy.stop()


def test_missing_image_is_refused_with_remedy(client: httpx.Client) -> None:
    answer = client.put("/api/v1/tasks/other", json={"image": "/var/no-such-image.tar"})
    assert answer.status_code == 422
    assert "Name an image that Docker has, or the file" in answer.json()["detail"]


def test_docker_clients_see_the_image_of_a_task(client: httpx.Client) -> None:
    """The task's archive has an ID and a configuration; a client cannot name a file by itself."""
    shown = client.get("/t/task/docker/images/any:1/json").raise_for_status().json()
    assert shown["Id"].startswith("sha256:")
    assert shown["Config"]["Cmd"] == ["/bin/sh"]
    body = {"Image": bash_image(), "Cmd": ["sleep", "infinity"]}
    assert client.post("/t/unknown/docker/containers/create", json=body).status_code == 404
    assert bash_image() not in client.get("/t/unknown/docker/images/json").raise_for_status().text


def test_spec_of_the_former_driver_is_the_same_task(client: httpx.Client) -> None:
    """`container` was the driver of images in earlier versions. A spec that names it describes the same sandboxes."""
    exec_(client, "a", "echo a >> ~/log")
    spec = client.get("/api/v1/tasks/task").json()["spec"]
    assert spec["driver"] == "local"
    client.put("/api/v1/tasks/task", json={**spec, "driver": "container"}).raise_for_status()
    assert exec_(client, "b", "echo a >> ~/log")[1] == HIT


def test_live_processes_survive_a_kill(proxy: Proxy, client: httpx.Client) -> None:
    """A state with a live process is forked right after a start, and no call gets an error first."""
    require_criu()
    live = "sleep 1000 > /dev/null 2>&1 & echo $! > /root/pid"
    node = exec_(client, "a", live)[2]
    assert exec_(client, "b", live)[1:] == (HIT, node)
    client.post(f"/api/v1/tasks/task/nodes/{node}/snapshot").raise_for_status()
    proxy.kill()
    proxy.start()
    client.post("/api/v1/tasks/task/rollouts/a/fork", json={"name": "c"}).raise_for_status()
    assert exec_(client, "c", "kill -0 $(cat /root/pid) && echo alive; echo c > /root/c")[0] == "alive\n"
    proxy.stop()


def test_state_becomes_an_image_again(proxy: Proxy, client: httpx.Client) -> None:
    """A task on the archive begins with the files that the rollout had; the machine itself becomes no image."""
    node = exec_(client, "a", "echo a >> log; chmod 600 log")[2]
    with client.stream("GET", f"/api/v1/tasks/task/nodes/{node}/image?name=fixed:1") as response:
        response.raise_for_status()
        (proxy.folder / "fixed.tar").write_bytes(response.read())
        made = response.headers["x-forkpoint-image"]
    client.put("/api/v1/tasks/again", json={"image": str(proxy.folder / "fixed.tar")}).raise_for_status()
    answer = client.post("/t/again/r/a/shell/exec", json={"command": "pwd; cat log; stat -c %a log"}).raise_for_status()
    assert answer.json()["stdout"] == "/root\nseed\na\n600\n"
    nested = answer.headers["x-forkpoint-node"]
    again = client.get(f"/api/v1/tasks/again/nodes/{nested}/image").raise_for_status()
    assert again.headers["x-forkpoint-image"] == made, "equal states are equal images"
    client.put("/api/v1/tasks/host", json={"base": "host"}).raise_for_status()
    root = client.get("/api/v1/tasks/host/tree").json()["root"]
    refused = client.get(f"/api/v1/tasks/host/nodes/{root}/image")
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:forkpoint:no-image")
    assert "this machine itself" in refused.json()["detail"]
    assert list((proxy.data / "imports").iterdir()) == []
    processes = proxy.processes()
    proxy.stop()
    assert_nothing_left(proxy, processes, [])
