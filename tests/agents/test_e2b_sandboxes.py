"""E2B's sandboxes by hand: snapshots, forks, pauses, timeouts, restarts."""

import base64
from pathlib import Path

from tests.agents.e2b_requests import Client, calls
from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_sandboxes


def test_snapshots_forks_and_pauses_work(proxy: Proxy) -> None:
    """Snapshots and forks begin at nodes of the tree, and a paused sandbox resumes where it was."""
    client = Client(proxy, "places", metadata={"of": "mine"}, envVars={"TEAM": "blue"})
    client.run("echo $RANDOM$RANDOM >/root/drawn; echo one >/root/log")
    snapshot = client.control("POST", f"/sandboxes/{client.sandbox}/snapshots", name="s").json()
    client.run("echo two >>/root/log")
    output = client.run("cat /root/log /root/drawn; echo $TEAM")
    forked = client.control("POST", f"/sandboxes/{client.sandbox}/fork", count=2).json()
    for fork in forked:
        other = Client(proxy, "places", sandbox=fork["sandbox"]["sandboxID"])
        assert other.run("cat /root/log /root/drawn; echo $TEAM") == output
    back = Client(proxy, "places", templateID=snapshot["snapshotID"])
    assert back.run("cat /root/log /root/drawn") == output.replace("two\n", "").replace("blue\n", "")
    assert client.control("GET", "/snapshots").json() == [snapshot]
    first_page = client.control("GET", "/v2/sandboxes?metadata=of%3Dmine&state=running&limit=2")
    assert len(first_page.json()) == 2
    last_page = client.control(
        "GET", f"/v2/sandboxes?metadata=of%3Dmine&limit=2&nextToken={first_page.headers['x-next-token']}"
    )
    assert {sandbox["sandboxID"] for sandbox in first_page.json() + last_page.json()} == {
        client.sandbox, *(fork["sandbox"]["sandboxID"] for fork in forked)
    }  # fmt: skip
    path = f"/sandboxes/{client.sandbox}"
    assert client.control("POST", f"{path}/pause").status_code == 204
    assert client.control("POST", f"{path}/pause").status_code == 409
    assert client.call("process.Process/List").json()["message"] == "The sandbox was not found"
    assert client.control("GET", path).json()["state"] == "paused"
    assert client.control("POST", f"/v2{path}/connect").status_code == 201
    assert client.run("cat /root/log /root/drawn; echo $TEAM") == output
    assert client.control("DELETE", f"/templates/{snapshot['snapshotID']}").status_code == 204
    assert client.control("GET", "/snapshots").json() == []
    assert client.control("DELETE", path).status_code == 204
    assert client.control("DELETE", path).status_code == 404


def test_sandboxes_outlive_a_restart(tmp_path: Path) -> None:
    """Sandboxes, their metadata and their variables are there after a restart."""
    require_sandboxes()
    kept = tmp_path / "data"
    kept.mkdir()
    with real_proxy(kept=kept) as before:
        client = Client(before, "lasts", envVars={"TEAM": "blue"}, metadata={"of": "mine"})
        client.run("echo $TEAM >/root/team")
        # A process without a client does not delay the shutdown.
        with client.start("sleep 600") as stream:
            next(stream)
    with real_proxy(kept=kept) as after:
        client_after = Client(after, "lasts", sandbox=client.sandbox)
        assert client_after.control("GET", f"/sandboxes/{client.sandbox}").json()["metadata"] == {"of": "mine"}
        assert client_after.run("cat /root/team; echo $TEAM") == "blue\nblue\n"


def test_expired_sandbox_is_gone(proxy: Proxy) -> None:
    """A sandbox whose timeout has passed is gone for its client; the tree answers the next sandbox."""
    command = "echo begun; sleep 60"
    client = Client(proxy, "over", timeout=3600)
    path = f"/sandboxes/{client.sandbox}"
    with client.start(command) as stream:
        next(stream)
        assert base64.b64decode(next(stream)["data"]["stdout"]) == b"begun\n"
        assert client.control("POST", f"{path}/timeout", timeout=7200).status_code == 204
        assert client.run("echo goes on") == "goes on\n"
        assert client.control("POST", f"{path}/timeout", timeout=0).status_code == 204
        assert client.call("process.Process/List").json()["message"] == "The sandbox was not found"
        assert list(stream)[-1]["last"]["error"]["code"] == "unavailable"
    assert client.http.get(f"{client.base}/health", headers=client.headers).status_code == 502
    for method, target in (
        ("GET", path),
        ("POST", f"{path}/timeout"),
        ("POST", f"/v2{path}/connect"),
        ("DELETE", path),
    ):
        assert client.control(method, target).status_code == 404
    assert client.control("GET", "/v2/sandboxes").json() == []
    again = Client(proxy, "over")
    with again.start(command) as stream:
        next(stream)
        assert again.run("echo goes on") == "goes on\n"
    assert {outcome for _, outcome in calls(proxy, "over", again.sandbox)} == {"hit"}


def test_other_rollouts_have_no_timeout(proxy: Proxy) -> None:
    """A rollout that was started through another protocol is a sandbox without a timeout."""
    proxy.client.post("/t/other/r/seven/shell/exec", json={"command": "echo begun >/root/how"}).raise_for_status()
    client = Client(proxy, "other", sandbox="seven")
    assert client.control("POST", "/v2/sandboxes/seven/connect", timeout=0).status_code == 200
    assert client.run("cat /root/how") == "begun\n"


def test_expired_sandbox_may_pause_and_resume(proxy: Proxy) -> None:
    """A sandbox created with autoPause pauses on timeout; with autoResume the next request resumes it."""
    for resumes in (False, True):
        client = Client(proxy, "pauses", timeout=3600, autoPause=True, autoResume={"enabled": resumes})
        path = f"/sandboxes/{client.sandbox}"
        client.run("echo kept >/root/kept")
        client.control("POST", f"{path}/timeout", timeout=0)
        assert client.control("GET", path).json()["state"] == "paused"
        if not resumes:
            assert client.call("process.Process/List").status_code == 502
            assert client.control("POST", f"/v2{path}/connect", timeout=60).status_code == 201
        assert client.run("cat /root/kept") == "kept\n"
        details = client.control("GET", path).json()
        assert details["state"] == "running"
        assert details["lifecycle"] == {"onTimeout": "pause", "autoResume": resumes}


def test_url_rollout_names_the_first_sandbox(proxy: Proxy) -> None:
    """The first sandbox below a URL with a rollout is that rollout; a second one has a name of its own."""
    base = "/t/named/r/seven/e2b"
    first, second = (proxy.client.post(f"{base}/v2/sandboxes", json={}).json()["sandboxID"] for _ in range(2))
    assert first == "seven"
    assert second.startswith("seven-")
    Client(proxy, "named", sandbox=first).run("echo first >/root/name")
    answer = proxy.client.get(f"{base}/files?path=/root/name", headers={"e2b-sandbox-id": second})
    assert answer.status_code == 404
    assert proxy.client.get(f"{base}/files?path=name").text == "first\n"


def test_create_is_idempotent(proxy: Proxy) -> None:
    """A create with the same idempotency key returns the same sandbox."""
    headers = {"idempotency-key": "k1"}
    created = [proxy.client.post("/t/idem/e2b/v2/sandboxes", json={}, headers=headers).json() for _ in range(2)]
    assert created[0] == created[1]
    assert Client(proxy, "idem").sandbox != created[0]["sandboxID"]


def test_sandboxes_and_containers_have_the_name_of_their_token(tmp_path: Path) -> None:
    """As on the plain endpoints: `report --by owner` counts a fork and a container of Docker's too."""
    require_sandboxes()
    (tmp_path / "tokens").write_text("alice-token-012345678 @alice\n")
    with real_proxy(token_file=tmp_path / "tokens") as proxy:
        proxy.client.headers["x-forkpoint-token"] = "alice-token-012345678"
        proxy.client.put("/api/v1/tasks/own", json={}).raise_for_status()
        sandbox = proxy.client.post("/t/own/r/e2b/e2b/sandboxes", json={"templateID": "base"}).json()["sandboxID"]
        forked = proxy.client.post(f"/t/own/e2b/sandboxes/{sandbox}/fork", json={}).json()
        container = proxy.client.post("/t/own/r/docker/docker/v1.43/containers/create", json={"Image": "any:1"})
        assert container.is_success, container.text
        listed = proxy.client.get("/api/v1/tasks/own/rollouts").json()["items"]
        names = {"e2b", "docker", forked[0]["sandbox"]["sandboxID"]}
        assert {each["rollout"]: each["labels"].get("owner") for each in listed} == dict.fromkeys(names, "alice")
