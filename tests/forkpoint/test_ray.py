"""Proxies on the nodes of a Ray cluster, whose nodes here are processes of one machine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import forkpoint.ray
from forkpoint.ephemeral_proxy import free_port
from forkpoint.ray.proxy_actor import ProxyActor, ProxyPlan
from tests.machine import Process, alive, process, wait_until
from tests.sandboxes.postgres_cluster import cluster as postgres
from tests.sandboxes.postgres_cluster import require_postgres

REPOSITORY = Path(__file__).parents[2]
WITHIN_S = 120.0
"""Ray starts several processes, which take their time on a busy machine."""
PATIENCE = {
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_agent_register_timeout_ms": f"{WITHIN_S * 1000:.0f}",
    "RAY_gcs_rpc_server_connect_timeout_s": f"{WITHIN_S:.0f}",
    "RAY_health_check_timeout_ms": f"{WITHIN_S * 1000:.0f}",
    "RAY_worker_register_timeout_seconds": f"{WITHIN_S:.0f}",
}
"""By default Ray ends a node whose processes do not answer each other in 5 to 30 s, and starts more than it needs."""


class DriverError(AssertionError):
    """A method of the driver failed."""


@dataclass(frozen=True)
class Driver:
    """The process of tests/forkpoint/ray_driver.py."""

    child: "subprocess.Popen[str]"
    log: Path

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            assert self.child.stdin is not None
            assert self.child.stdout is not None
            print(json.dumps([name, arguments]), file=self.child.stdin, flush=True)
            line = self.child.stdout.readline()
            if not line:
                log = self.log.read_text(errors="replace")[-4000:]
                # Of Ray itself, and no word about us: the machine is too busy for it.
                if "The current node timed out during startup" in log:
                    pytest.skip(f"Ray has not started a node within {WITHIN_S:.0f} s")
                pytest.fail(log)
            succeeded, result = json.loads(line)
            if not succeeded:
                raise DriverError(result)
            return result

        return call

    def proxy(self, url: str) -> dict[str, Any]:
        """Return the node whose proxy has a URL."""
        (found,) = [node for node in self.nodes() if node["url"] == url]
        return dict(found)


@pytest.fixture(scope="module")
def shared() -> Iterator[Driver]:
    """A Ray cluster of one node, and its driver."""
    # The paths of Ray's sockets have room for a short name only.
    folder = tempfile.mkdtemp(prefix="forkpoint-ray-", dir="/var/tmp")
    command = [sys.executable, "-m", "tests.forkpoint.ray_driver"]
    # `up` takes settings from variables too, and without any it takes what runs.
    ours = {name: value for name, value in os.environ.items() if name != "FORKPOINT_AUDIT_SHARE"}
    environment = ours | {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", **PATIENCE}
    try:
        with (
            (Path(folder) / "driver.log").open("wb") as log,
            subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log,
            ) as child,
        ):  # fmt: skip
            try:
                yield Driver(child, Path(log.name))
            finally:
                assert child.stdin is not None
                child.stdin.close()
                child.wait(WITHIN_S)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def ray(shared: Driver) -> Iterator[Driver]:
    """The driver of a cluster that has one node, and runs nothing of ours."""
    yield shared
    shared.down()
    shared.remove_all()


def settings(data: Path, **more: Any) -> dict[str, Any]:
    return {"data": str(data), "port": 0, "drivers": ["sqlite"], "log": "json"} | more


def processes(nodes: list[dict[str, Any]]) -> set[Process]:
    """Return the processes of proxies."""
    found = {process(node["pid"]) for node in nodes}
    return {each for each in found if each is not None}


def parent_of(pid: int) -> int:
    """Return the process that started a proxy: its actor's."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def answers(url: str) -> bool:
    return httpx.get(f"{url}/readyz", timeout=WITHIN_S).is_success


def test_ray_must_be_initialised() -> None:
    for call in (forkpoint.ray.up, forkpoint.ray.down, forkpoint.ray.nodes, forkpoint.ray.base_url):
        with pytest.raises(forkpoint.ray.RayError, match=r"Call ray\.init\(\) first"):
            call()


def test_actor_restarts_its_proxy(tmp_path: Path) -> None:
    """The same without Ray. Connections wait meanwhile, and the proxy ends with the actor."""
    actor = ProxyActor(ProxyPlan("127.0.0.1", 0, str(tmp_path), {"FORKPOINT_DRIVERS": '["sqlite"]'}, clustered=False))
    try:
        wait_until(lambda: actor.state().ready, "the proxy is not ready", within_s=WITHIN_S)
        first = actor.state()
        assert first.pid is not None
        assert first.url is not None
        os.kill(first.pid, signal.SIGKILL)
        assert answers(first.url)
        wait_until(lambda: actor.state().ready, "the proxy is not ready again", within_s=WITHIN_S)
        second = actor.state()
        assert (second.url, second.starts) == (first.url, 2)
        assert second.pid is not None
    finally:
        actor.stop()
    assert process(second.pid) is None
    actor.stop()


def test_proxy_comes_back_on_its_port(ray: Driver, tmp_path: Path) -> None:
    """On one node it is an ordinary proxy, started once however often `up` is called. It ends with `down`."""
    wanted = settings(tmp_path, port=free_port())
    with pytest.raises(DriverError, match="cluster needs the secret"):
        ray.up(settings(tmp_path, cluster="postgresql://nowhere"))
    with pytest.raises(DriverError, match=r"Call forkpoint\.ray\.up\(\)"):
        ray.url_here()
    (first,) = ray.up(wanted)
    assert ray.up(wanted) == ray.up({}) == [first]
    with pytest.raises(DriverError, match="with other settings"):
        ray.up(settings(tmp_path, max_sandboxes=3))
    assert ray.url_here() == first["url"]
    assert "pyarrow" not in Path(f"/proc/{parent_of(first['pid'])}/maps").read_text()
    os.kill(first["pid"], signal.SIGKILL)
    # The connection is not refused: it waits for the next proxy.
    assert answers(first["url"])
    wait_until(lambda: ray.proxy(first["url"])["ready"], "the proxy is not ready again", within_s=WITHIN_S)
    second = ray.proxy(first["url"])
    assert second["starts"] == 2
    # Ray starts the actor again, once the proxy has released port and data.
    os.kill(parent_of(second["pid"]), signal.SIGKILL)
    wait_until(lambda: not alive(processes([second])), "the proxy outlives its actor", within_s=WITHIN_S)
    (third,) = ray.up({})
    assert third["url"] == first["url"]
    running = processes([third])
    ray.down()
    ray.down()
    assert (len(running), alive(running), ray.actors()) == (1, set(), [])


def test_proxy_that_cannot_start_is_explained(ray: Driver, tmp_path: Path) -> None:
    """Nothing of it is left, so `up` can be called again with other settings."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DriverError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            ray.up(settings(tmp_path, port=port))
    assert ray.actors() == []


def test_nodes_join_and_leave(ray: Driver, tmp_path: Path) -> None:
    """Two nodes become members of one cluster, a third one joins, and the proxy of a node that fails ends."""
    require_postgres()
    with postgres() as server:
        server.create("members", "SELECT 1")
        ray.add()
        with pytest.raises(DriverError, match="2 nodes, and proxies on several nodes need"):
            ray.up(settings(tmp_path))
        shared = {
            "cluster": f"{server.dsn} dbname=members", "cluster_secret": "the secret of the tests",
            "store": str(tmp_path / "store"),
        }  # fmt: skip
        nodes = ray.up(settings(tmp_path, **shared))
        assert len({node["url"] for node in nodes}) == 2
        joined = ray.add()
        url = ray.url_on(joined)
        assert answers(url)
        members = httpx.get(f"{nodes[0]['url']}/api/v1/cluster", timeout=WITHIN_S).json()["members"]
        assert sum(member["alive"] for member in members) == 3
        running = processes([ray.proxy(url)])
        assert running
        ray.remove()
        wait_until(lambda: not alive(running), "the proxy outlives its node", within_s=WITHIN_S)
        wait_until(lambda: len(ray.nodes()) == 2, "the node is still listed", within_s=WITHIN_S)
        running = processes(ray.nodes())
        ray.down()
        assert (len(running), alive(running), ray.actors()) == (2, set(), [])
