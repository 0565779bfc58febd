"""Docker's compose, both versions unmodified: a project is one state, which rollouts share."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest
from docker.errors import APIError, NotFound

from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_criu
from tests.sandboxes.docker import BASH_IMAGE, require_docker

SERVER = """\
import socketserver, sys
print(sys.argv[1], 'begins', flush=True)
class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(eval(sys.argv[3]))
socketserver.TCPServer(('0.0.0.0', int(sys.argv[2])), Answer).serve_forever()
"""
"""A server; its arguments are its name, its port, and the Python expression that it answers."""
FILE = f"""\
version: "3.8"
x-server: &server
  image: {BASH_IMAGE}
  entrypoint:
    - python3
    - -c
    - |
{"".join(f"      {line}{chr(10)}" for line in SERVER.splitlines())}
services:
  agent:
    image: {BASH_IMAGE}
    command: sleep infinity
    working_dir: /pages
    volumes: ["pages:/pages"]
    depends_on: {{web: {{condition: service_healthy}}}}
  web:
    <<: *server
    command: [web, "80", "b'web: ' + open('/srv/text', 'rb').read()"]
    volumes: ["pages:/srv"]
    healthcheck: {{test: "exec 3<>/dev/tcp/web/80", interval: 1s}}
    depends_on: {{db: {{condition: service_healthy}}}}
  db:
    <<: *server
    command: [db, "5432", "b'row\\\\n'"]
    environment: {{KIND: database}}
    healthcheck: {{test: [CMD-SHELL, "exec 3<>/dev/tcp/127.0.0.1/5432"], interval: 1s}}
volumes:
  pages:
"""


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    require_docker()
    require_criu()
    with real_proxy(checkpoints=True) as running:
        yield running


def host(proxy: Proxy, task: str, rollout: str) -> str:
    return f"tcp://{proxy.address[0]}:{proxy.address[1]}/t/{task}/r/{rollout}/docker"


class Compose:
    """Compose as a client of one rollout. The project's name differs in each, as directories of harnesses do."""

    def __init__(self, client: list[str], folder: Path, proxy: Proxy, task: str, rollout: str) -> None:
        self.client, self.folder, self.project = client, folder, f"p-{rollout}"
        self.host = host(proxy, task, rollout)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "DOCKER_HOST": self.host}
        return subprocess.run(
            [*self.client, "-p", self.project, *arguments], cwd=self.folder, env=environment, capture_output=True,
            text=True, check=False, timeout=120,
        )  # fmt: skip

    def __call__(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def exec(self, service: str, command: str) -> str:
        return self("exec", "-T", service, "bash", "-c", command)


@pytest.mark.parametrize("client", [["docker", "compose"], ["docker-compose"]], ids=["v2", "v1"])
def test_project_is_one_shared_state(proxy: Proxy, client: list[str], tmp_path: Path) -> None:
    """The second rollout only hits; the third is right behind the fork, in files and in the memory of services."""
    try:
        subprocess.run([*client, "version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        assert not os.environ.get("FORKPOINT_NEEDS_COMPOSE"), client
        pytest.skip(f"{' '.join(client)} is not installed")
    (tmp_path / "docker-compose.yaml").write_text(FILE)
    task = f"compose-{len(client)}"
    rollouts = [Compose(client, tmp_path, proxy, task, name) for name in ("a", "b", "c")]
    seen = []
    for compose in rollouts[:2]:
        compose("up", "-d")
        assert {"agent", "web", "db"} <= set(compose("ps", "--services").split())
        seen.append([
            compose.exec("agent", "pwd; echo first >text; cat </dev/tcp/web/80; cat </dev/tcp/db/5432"),
            compose.exec("db", "echo $KIND; ls /pages 2>&1; true"),
            compose("logs", "--no-color", "db").split("|")[-1].strip(),
        ])  # fmt: skip
    assert seen[0][0] == "/pages\nweb: first\nrow\n"
    assert seen[0][1].startswith("database\n")
    assert seen[0][2] == "db begins"
    assert seen[1] == seen[0]
    assert set(proxy.outcomes(task, "b")) == {"hit"}
    third = rollouts[2]
    third("up", "-d")
    third.exec("agent", "pwd; echo first >text; cat </dev/tcp/web/80; cat </dev/tcp/db/5432")
    assert third.exec("web", "cat /srv/text; echo third >/srv/text") == "first\n"
    assert third.exec("agent", "cat </dev/tcp/web/80") == "web: third\n"
    assert proxy.outcomes(task, "c")[0] == "hit"
    assert rollouts[0].exec("agent", "cat text") == "first\n"
    for compose in rollouts:
        compose("down", "-v")
        assert compose("ps", "-q") == ""
    listed = proxy.client.get(f"/api/v1/tasks/{task}/rollouts").json()["items"]
    assert {rollout["state"] for rollout in listed} == {"finished"}


def test_a_published_task_mounts_directories_for_its_logs(proxy: Proxy) -> None:
    """As compose files of public tasks ask for it, with each of Docker's two forms of a mount."""
    bind = docker.types.Mount("/agent-logs", "/home/me/task/agent-logs", type="bind")
    with closing(docker.DockerClient(base_url=host(proxy, "published", "a"), timeout=60)) as client:
        agent = client.containers.run(
            BASH_IMAGE, ["sh", "-c", "sleep infinity"], detach=True, volumes=["/home/me/task/logs:/logs"],
            mounts=[bind], ports={"80/tcp": 8080}, nano_cpus=1_000_000_000,
        )  # fmt: skip
        count = "import os; print(len(os.sched_getaffinity(0)))"
        command = f"cd /agent-logs && echo done >/logs/out && ls /logs; python3 -c '{count}'"
        assert agent.exec_run(["bash", "-c", command]).output == b"out\n1\n"
        assert b"done" in b"".join(agent.get_archive("/logs/out")[0])
        told = client.api.create_container(
            BASH_IMAGE, ["sleep", "infinity"], host_config=client.api.create_host_config(binds=["/home/me/l:/logs"])
        )
        assert "empty directory" in told["Warnings"][0]


def test_services_have_files_of_their_own(proxy: Proxy) -> None:
    """Without compose: containers that share a network are a project. Copies reach the files of each container."""
    with closing(docker.DockerClient(base_url=host(proxy, "plain", "a"), timeout=60)) as client:
        client.networks.create("net")
        serving: dict[str, Any] = {"entrypoint": ["python3", "-c", SERVER], "detach": True, "network": "net"}
        check = {"test": ["CMD-SHELL", "exec 3<>/dev/tcp/127.0.0.1/80"]}
        web = client.containers.run(
            BASH_IMAGE, ["web", "80", "open('/text', 'rb').read()"], name="web", healthcheck=check, **serving
        )
        agent = client.containers.run(BASH_IMAGE, "sleep infinity", name="agent", network="net", detach=True)
        web.exec_run(["bash", "-c", "mkdir /of; echo of web >/text; cp /text /of; ln -s /of /link"])
        web.reload()
        assert web.attrs["State"]["Health"]["Status"] == "healthy"
        # An absolute link leads to the service's own file.
        chunks, _ = web.get_archive("/link/text")
        assert b"of web\n" in b"".join(chunks)
        with pytest.raises(NotFound):
            agent.get_archive("/text")
        assert agent.exec_run(["bash", "-c", "cat </dev/tcp/web/80"]).output == b"of web\n"
        assert web.exec_run(["no-such-program"]).exit_code == 127
        with pytest.raises(APIError, match="has made calls already"):
            client.containers.run(BASH_IMAGE, ["late"], name="late", healthcheck=check, **serving)
        web.stop()
        with pytest.raises(APIError, match="the services of a project run together"):
            agent.exec_run("true")
        with pytest.raises(APIError, match="has made calls already"):
            web.start()
        for container in (web, agent):
            container.remove(force=True)
        client.networks.get("net").remove()
        assert client.networks.list() == []


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"HostConfig": {"Binds": ["/etc:/mnt"]}}, "mounts nothing of the client's machine"),
        (
            {"HostConfig": {"Mounts": [{"Type": "bind", "Source": "/etc", "Target": "/m"}]}},
            "mounts nothing of the client's machine",
        ),
        ({"HostConfig": {"Privileged": True}}, "without privileges"),
        ({"HostConfig": {"NetworkMode": "others"}}, "does not belong to project 'p'"),
        ({"Labels": {"com.docker.compose.oneoff": "True"}}, "Use `docker compose exec`"),
        ({"Healthcheck": None}, "Nothing says when service 'web' is ready"),
    ],
)
def test_what_a_project_cannot_have_is_refused(proxy: Proxy, more: dict[str, Any], why: str) -> None:
    """The response says what is in the way, and what helps."""
    labels = {"com.docker.compose.project": "p", "com.docker.compose.service": "web", **more.pop("Labels", {})}
    body = {"Image": BASH_IMAGE, "Cmd": ["serve"], "Healthcheck": {"Test": ["CMD", "true"]}, "Labels": labels, **more}
    with httpx.Client(base_url=f"{proxy.url}/t/refused/r/a/docker", timeout=30) as client:
        client.post("/networks/create", json={"Name": "others"})
        answer = client.post("/containers/create", params={"name": "web"}, json=body)
        assert (answer.status_code, why in answer.json()["message"]) == (400, True), answer.text


def test_volume_ends_with_its_project(proxy: Proxy) -> None:
    """A volume is part of the state: after `down` without -v its files are gone, and that is not passed over."""
    with closing(docker.DockerClient(base_url=host(proxy, "volumes", "a"), timeout=60)) as client:
        client.volumes.create("data")
        client.networks.create("net")
        made: dict[str, Any] = {"detach": True, "network": "net", "volumes": ["data:/data"]}
        client.containers.run(BASH_IMAGE, "sleep infinity", name="planned", **made).remove(force=True)
        begun = client.containers.run(BASH_IMAGE, "sleep infinity", name="begun", **made)
        assert begun.exec_run(["bash", "-c", "mkdir -p /data; echo x >/data/f"]).exit_code == 0
        with pytest.raises(APIError, match="in use"):
            client.volumes.get("data").remove()
        begun.remove(force=True)
        with pytest.raises(APIError, match="was part of a state that has ended"):
            client.containers.create(BASH_IMAGE, "sleep infinity", network="net", volumes=["data:/data"])
        client.volumes.get("data").remove()
        assert client.volumes.list() == []
